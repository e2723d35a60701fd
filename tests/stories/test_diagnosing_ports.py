"""A port is built otherwise: wrapped, renamed, fused, called twice. The fault is named as the reference calls it."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import architectures
import layerscope as ls
import zoo
from layerscope.errors import BadModel, Unsupported

FUSED = """
fuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj
fuse **.gate_proj, **.up_proj -> **.gate_up_proj
"""
TARGET = "model.layers.1.self_attn.v_proj"


def llama(dtype=torch.float32):
    return architectures.make("llama", dtype=dtype)


def scale(model, name, factor=1.05):
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(factor)
    return model


def diagnosed(candidate, *, reference=None, **how):
    return ls.diagnose(reference or llama(), candidate, architectures.inputs("llama"), **how)


# Wrappers ---------------------------------------------------------------------------------------


class Around(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def adapted(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config).eval()


WRAPPERS = {
    "module": Around,
    "twice": lambda model: Around(Around(model)),
    "DataParallel": nn.DataParallel,
    "LoRA": adapted,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_wrapper_is_no_fault_and_a_fault_inside_is_named_as_the_reference_names_it(wrap, dtype):
    assert diagnosed(wrap(llama(dtype))).root is None
    finding = diagnosed(wrap(scale(llama(), TARGET).to(dtype)))
    assert [blame.name for blame in finding.roots] == [TARGET], finding.verdict.because


def test_a_wrapped_reference_names_the_fault_with_its_own_names():
    finding = diagnosed(scale(llama(), TARGET), reference=Around(llama()))
    assert finding.root == f"module.{TARGET}"


def test_an_adapter_that_has_learned_is_a_difference_of_the_module_it_adapts():
    candidate = adapted(llama())
    with torch.no_grad():
        layer = candidate.get_submodule(f"base_model.model.{TARGET}")
        layer.lora_B["default"].weight.normal_(0, 0.02)
    finding = diagnosed(candidate)
    assert [blame.name for blame in finding.roots] == [TARGET], finding.verdict.because


# Fused against split ----------------------------------------------------------------------------


class FusedAttention(nn.Module):
    """One projection for queries, keys and values; the rest is the original's."""

    def __init__(self, split):
        super().__init__()
        self.split = (split,)  # not a child
        self.qkv_proj = fused(split.q_proj, split.k_proj, split.v_proj)
        self.o_proj = split.o_proj

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        (split,) = self.split
        sizes = [split.q_proj.out_features, split.k_proj.out_features, split.v_proj.out_features]
        shape = (*hidden_states.shape[:-1], -1, split.head_dim)
        q, k, v = (x.view(shape).transpose(1, 2) for x in self.qkv_proj(hidden_states).split(sizes, dim=-1))
        q, k = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        out, weights = transformers.models.llama.modeling_llama.eager_attention_forward(
            split, q, k, v, attention_mask, scaling=split.scaling
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class FusedMLP(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.gate_up_proj = fused(split.gate_proj, split.up_proj)
        self.down_proj = split.down_proj
        self.act_fn = split.act_fn

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


def fused(*parts):
    made = nn.Linear(parts[0].in_features, sum(p.out_features for p in parts), bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.cat([p.weight for p in parts]))
    return made


def fuse(model):
    for layer in model.model.layers:
        layer.self_attn = FusedAttention(layer.self_attn)
        layer.mlp = FusedMLP(layer.mlp)
    return model.eval()


@pytest.mark.parametrize("rules", [FUSED, ()], ids=["declared", "not declared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_projections_are_no_fault(dtype, rules):
    candidate = fuse(llama()).to(dtype)
    with torch.no_grad():
        out = candidate(**architectures.inputs("llama"), use_cache=False).logits
        twin = llama(dtype)(**architectures.inputs("llama")).logits
    torch.testing.assert_close(out, twin, rtol=1e-4 if dtype == torch.float32 else 0.1, atol=1e-2)
    finding = diagnosed(candidate, pairing=rules)
    assert finding.root is None, finding.verdict.because


@pytest.mark.parametrize("target", [TARGET, "model.layers.2.mlp.up_proj", "model.layers.0.mlp.down_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_fault_in_one_part_of_a_declared_fusion_is_that_parts(target, dtype):
    finding = diagnosed(fuse(scale(llama(), target)).to(dtype), pairing=FUSED)
    assert [blame.name for blame in finding.roots] == [target], finding.verdict.because


@pytest.mark.parametrize("target", [TARGET, "model.layers.2.mlp.up_proj"])
def test_a_fusion_that_is_not_declared_is_found_out_or_judged_through_its_parent(target):
    finding = diagnosed(fuse(scale(llama(), target)))
    assert finding.root in (target, target.rpartition(".")[0]), finding.verdict.because


def test_a_fused_reference_against_a_split_candidate():
    rules = "split **.qkv_proj -> **.q_proj, **.k_proj, **.v_proj\nsplit **.gate_up_proj -> **.gate_proj, **.up_proj"
    assert diagnosed(llama(), reference=fuse(llama()), pairing=rules).root is None
    finding = diagnosed(scale(llama(), TARGET), reference=fuse(llama()), pairing=rules)
    assert finding.root == "model.layers.1.self_attn.qkv_proj", finding.verdict.because


# Other names ------------------------------------------------------------------------------------


class Named(nn.Module):
    """The same four linear layers under whatever names; the second half only where there is one."""

    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        self.order = names
        for name in names:
            self.add_module(name, nn.Linear(32, 32))

    def forward(self, x):
        for name in self.order:
            x = functional.gelu(self.get_submodule(name)(x))
        return x


@pytest.mark.parametrize(
    "rules", ["pair fc1 -> up\npair fc2 -> mid\npair fc3 -> down", ()], ids=["declared", "inferred"]
)
def test_renamed_modules_are_paired_and_named_as_in_the_reference(rules):
    x = torch.randn(4, 32)
    reference, candidate = Named("fc1", "fc2", "fc3"), Named("up", "mid", "down")
    assert ls.diagnose(reference, candidate, x, pairing=rules).root is None
    finding = ls.diagnose(reference, scale(candidate, "mid"), x, pairing=rules)
    assert finding.root == "fc2"
    assert finding.roots[0].row.counterpart == "mid"


def test_a_layer_too_many_is_the_code_of_the_model_around_it():
    candidate = Named("fc1", "fc2", "extra", "fc3")
    candidate.load_state_dict(Named("fc1", "fc2", "fc3").state_dict(), strict=False)
    finding = ls.diagnose(Named("fc1", "fc2", "fc3"), candidate, torch.randn(4, 32))
    assert finding.root == ""


# Ways of being called ---------------------------------------------------------------------------


class Calling(nn.Module):
    """A module called three times, one under two names, and one that is never called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.thrice = nn.Linear(16, 16)
        self.one = nn.Linear(16, 16)
        self.other = self.one
        self.never = nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.thrice(x))
        return self.other(torch.tanh(self.one(x)))


def test_a_module_called_several_times_is_judged_at_every_call():
    candidate, calls = Calling(), []

    def late(module, args, out):
        calls.append(module)
        return out * 1.05 if len(calls) % 3 == 2 else out

    candidate.thrice.register_forward_hook(late)
    finding = ls.diagnose(Calling(), candidate, torch.randn(5, 16))
    assert finding.root == "thrice"
    assert finding.roots[0].row.call == 1


@pytest.mark.parametrize("target", ["thrice", "one"])
def test_a_shared_module_is_blamed_once(target):
    assert ls.diagnose(Calling(), Calling(), torch.randn(5, 16)).root is None
    finding = ls.diagnose(Calling(), scale(Calling(), target), torch.randn(5, 16))
    assert [blame.name for blame in finding.roots] == [target]


def test_a_module_that_is_never_called_is_no_fault_whatever_it_holds():
    assert ls.diagnose(Calling(), scale(Calling(), "never"), torch.randn(5, 16)).root is None


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(32, 32)
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.after = nn.Linear(32, 32)

    def forward(self, x):
        x = self.before(x)
        return self.after(x + self.attn(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_torchs_own_attention(dtype):
    x = torch.randn(2, 9, 32)
    assert ls.diagnose(Attending().eval(), Attending().eval().to(dtype), x).root is None
    candidate = Attending().eval()
    with torch.no_grad():
        candidate.attn.in_proj_weight.mul_(1.05)
    assert ls.diagnose(Attending().eval(), candidate.to(dtype), x).root == "attn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_that_are_used_without_a_call_of_their_module_are_blamed_by_their_own_name(dtype):
    """`MultiheadAttention` never calls its out_proj, Mamba's mixer never its conv1d and dt_proj."""
    candidate = scale(Attending().eval(), "attn.out_proj")
    assert ls.diagnose(Attending().eval(), candidate.to(dtype), torch.randn(2, 9, 32)).root == "attn.out_proj"
    for target in ("backbone.layers.1.mixer.conv1d", "backbone.layers.1.mixer.dt_proj"):
        candidate = scale(architectures.make("mamba"), target).to(dtype)
        finding = ls.diagnose(architectures.make("mamba"), candidate, architectures.inputs("mamba"))
        assert [blame.name for blame in finding.roots] == [target], finding.verdict.because


def test_experts_that_hold_their_weights_themselves():
    target = "model.layers.1.mlp.experts"
    candidate = architectures.make("minimax-m2")
    with torch.no_grad():
        candidate.get_submodule(target).gate_up_proj[2].mul_(1.05)
    finding = ls.diagnose(architectures.make("minimax-m2"), candidate.bfloat16(), architectures.inputs("minimax-m2"))
    assert [blame.name for blame in finding.roots] == [target], finding.verdict.because


# State and randomness ---------------------------------------------------------------------------


def test_batch_norm_that_learns_from_its_batch_is_replayed_with_its_state():
    def net():
        return architectures.make("convnet").train()

    def without_dropout(model):
        model.dropout.p = 0.0
        return model

    inputs = architectures.inputs("convnet")
    assert ls.diagnose(without_dropout(net()), without_dropout(net()), inputs).root is None
    candidate = without_dropout(net())
    candidate.blocks[1].bn1.weight.data.mul_(1.05)
    assert ls.diagnose(without_dropout(net()), candidate, inputs).root == "blocks.1.bn1"


def test_a_random_reference_is_compared_with_the_same_random_numbers():
    reference = architectures.make("gpt2").train()
    assert ls.diagnose(reference, copy.deepcopy(reference), architectures.inputs("gpt2")).root is None
    candidate = scale(copy.deepcopy(reference), "transformer.h.1.mlp.c_fc")
    assert ls.diagnose(reference, candidate, architectures.inputs("gpt2")).root == "transformer.h.1.mlp.c_fc"


class Counting(nn.Module):
    """Adds how often it was called: its answer depends on what it remembers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x + self.seen


def test_a_module_that_remembers_is_replayed_as_if_for_the_first_time():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Counting(), nn.Linear(8, 8))

    x = torch.randn(3, 8)
    assert ls.diagnose(net(), net(), x).root is None
    assert ls.diagnose(net(), scale(net(), "2"), x).root == "2"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_model_that_returns_its_loss(backward):
    """A value without dimensions, and gradients that go back from it."""
    inputs = {**architectures.inputs("llama"), "labels": architectures.inputs("llama")["input_ids"]}
    for dtype in (torch.float32, torch.bfloat16):
        assert ls.diagnose(llama(), llama(dtype), inputs, backward=backward).root is None
        finding = ls.diagnose(llama(), scale(llama(), TARGET).to(dtype), inputs, backward=backward)
        assert [blame.name for blame in finding.roots] == [TARGET], finding.verdict.because


@pytest.mark.parametrize("make", zoo.ALL)
def test_awkward_models_are_the_same_as_themselves(make):
    (reference, inputs), (candidate, _) = make(), make()
    finding = ls.diagnose(reference, candidate, inputs)
    assert finding.root is None, finding.verdict.because


# A candidate that fails -------------------------------------------------------------------------


def test_a_candidate_that_raises_is_blamed_where_it_raises():
    candidate = llama()

    def raises(module, args, out):
        raise RuntimeError("kernel not found")

    candidate.get_submodule(TARGET).register_forward_hook(raises)
    finding = diagnosed(candidate)
    assert str(finding.verdict) == "differs"
    assert finding.root == TARGET
    assert "kernel not found" in finding.verdict.because


def test_a_candidate_of_another_shape_is_blamed_where_the_shape_is_made():
    candidate = llama()
    down = candidate.get_submodule("model.layers.1.mlp.down_proj")
    down.register_forward_hook(lambda module, args, out: out[..., :-1])
    finding = diagnosed(candidate)
    assert finding.root == "model.layers.1.mlp.down_proj"
    assert finding.cause.kind == "shape"


def test_a_fault_before_a_candidate_that_raises_is_found_too():
    candidate = scale(llama(), "model.layers.0.mlp.up_proj")

    def raises(module, args):
        raise ValueError("no such layout")

    candidate.model.layers[2].mlp.register_forward_pre_hook(raises)
    finding = diagnosed(candidate)
    assert finding.root == "model.layers.0.mlp.up_proj"
    assert "model.layers.2.mlp" in [blame.name for blame in finding.roots]


# Gradients that are cut off, weights that are borrowed, what is made first --------------------------------


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))


class InputDetached(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


class OutputDetached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize("kind", [InputDetached, OutputDetached])
def test_a_gradient_that_is_cut_off_is_laid_to_the_module_that_cuts_it(kind):
    reference, candidate = chain(), chain()
    candidate[1].__class__ = kind
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert [blame.name for blame in ls.diagnose(reference, candidate, x, backward=True).roots] == ["1"]
    assert ls.diagnose(reference, candidate, x).root is None
    assert ls.diagnose(reference, chain(), x, backward=True).root is None


class Tied(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.up, self.gain = nn.Embedding(50, 32), nn.Linear(32, 32), gain

    def forward(self, ids):
        hidden = self.emb(ids)
        hidden = hidden + self.gain * torch.tanh(self.up(hidden))
        return nn.functional.linear(hidden, self.emb.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_borrows_a_wrong_weight_does_not_take_the_blame(dtype):
    ids = torch.arange(18).reshape(2, 9)
    for gain, roots in ((1.0, ["emb"]), (1.3, ["emb", ""])):
        candidate = Tied(gain).to(dtype)
        with torch.no_grad():
            candidate.emb.weight.mul_(1.05)
        assert [blame.name for blame in ls.diagnose(Tied(), candidate, (ids,)).roots] == roots


def test_a_module_that_runs_many_times_is_one_module_and_not_a_quantised_crowd():
    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            for _ in range(12):
                x = torch.tanh(self.cell(x))
            return self.head(x)

    candidate = Rounds()
    with torch.no_grad():
        candidate.cell.weight.add_(0.02 * torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))
    assert ls.diagnose(Rounds(), candidate, torch.ones(2, 8)).root == "cell"


def test_a_layer_of_another_width_is_to_blame_and_not_the_one_that_chokes_on_it():
    candidate = chain()
    candidate[0] = nn.Linear(6, 5)
    assert ls.diagnose(chain(), candidate, torch.ones(2, 6)).root == "0"


def test_weights_without_numbers_are_refused():
    with pytest.raises(Unsupported, match="meta"):
        ls.diagnose(chain(), chain().to("meta"), torch.ones(2, 6))


class Branches(nn.Module):
    """A branch whose result is thrown away, and one that counts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.idle, self.used = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.used(x) + 0.0 * self.idle(x)


def test_a_suspect_that_explains_nothing_is_demoted_when_another_explains_something():
    both, alone = Branches(), Branches()
    with torch.no_grad():
        both.idle.weight.mul_(2)
        alone.idle.weight.mul_(2)
        both.used.weight.mul_(1.05)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    finding = ls.diagnose(Branches(), both, x)
    assert [blame.name for blame in finding.roots] == ["used"]
    assert any("idle" in note and "explains nothing" in note for note in finding.notes)
    assert ls.diagnose(Branches(), alone, x).root == "idle"


def test_inputs_without_an_element_are_no_proof_of_health():
    with pytest.raises(BadModel, match="nothing to compare"):
        ls.diagnose(chain(), chain(), torch.empty(0, 6))
