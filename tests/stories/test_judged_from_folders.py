"""Two dumps and no model at hand: is the difference rounding or a bug, and which module makes it?

The reference was recorded with floors. Healthy pairs of many architectures are accused of nothing; a planted fault is
named first. Nothing but the runs is looked at: no fingerprints of weights, which would give the fault away.
"""

from __future__ import annotations

import collections
import random

import pytest
import torch
from torch import nn

import families
import layerscope as ls

# One of each kind; `make stress` goes through all of them.
FEW = ("llama", "bert", "vit", "resnet", "qwen2moe")
HALVES = (torch.bfloat16, torch.float16)


def recorded(model, given, *, floors=False, taps="**:io", run=None):
    with (
        torch.no_grad(),
        ls.record(model, taps, keep="tensor", floors=floors, options=ls.RecordOptions(weights=False)) as rec,
    ):
        model(**given) if run is None else run(model)
    return rec.run


def cast(given, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def padded(name):
    given = families.inputs(name)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    side = slice(-9, None) if families.FAMILIES[name][1].endswith("Model") else slice(9)
    given["attention_mask"][0, side] = 0
    return given


class Bf16Products(torch.utils._python_dispatch.TorchDispatchMode):
    """What accelerators do that store float32 and multiply in bfloat16."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self.PRODUCTS:
            return func(*args, **(kwargs or {}))
        coarse = [a.bfloat16().float() if a.dtype == torch.float32 else a for a in args]
        return func(*coarse, **(kwargs or {})).bfloat16().float()


def in_threads(model, given, taps):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return recorded(model, given, taps=taps)
    finally:
        torch.set_num_threads(before)


def healthy(name, taps="**:io"):
    """Yield what is done otherwise, and the run it gives."""
    given = families.inputs(name)
    for dtype in HALVES:
        yield f"{dtype}", recorded(families.family(name, dtype=dtype), cast(given, dtype), taps=taps)
    yield "two threads", in_threads(families.family(name), given, taps)
    yield "other taps", recorded(families.family(name, dtype=torch.bfloat16), cast(given, torch.bfloat16), taps="**")
    with Bf16Products():
        run = recorded(families.family(name), given, taps=taps)
    yield "products in bfloat16", run
    try:
        other = families.family(name, attention="sdpa")
    except ValueError:
        return
    if other.config._attn_implementation == "sdpa":
        yield "sdpa", recorded(other, given, taps=taps)
        half = families.family(name, attention="sdpa", dtype=torch.bfloat16)
        yield "sdpa in bfloat16", recorded(half, cast(given, torch.bfloat16), taps=taps)


def assert_not_accused(reference, name, found):
    accused = {}
    for what, run in found:
        result = ls.compare(reference, run)
        if str(result.verdict) not in ("same", "noise"):
            accused[what] = result.verdict.because
    assert not accused, f"{name}: {accused}"


# Faults -----------------------------------------------------------------------------------------


def scaled(factor):
    def plant(module):
        for parameter in module.parameters(recurse=False):
            parameter.mul_(factor)

    return plant


def rows_exchanged(module):
    axis = 1 if type(module).__name__ == "Conv1D" else 0
    order = torch.arange(module.weight.shape[axis])
    order[1:3] = order[1:3].flip(0)
    module.weight.copy_(module.weight.index_select(axis, order))


def bias_dropped(module):
    module.bias.zero_()


FAULTS = {"x 1.01": scaled(1.01), "x 1.1": scaled(1.1), "rows": rows_exchanged, "bias": bias_dropped}


def targets(name, fault, given):
    model, called = families.family(name), set()
    handles = [m.register_forward_hook(lambda *a, n=n: called.add(n)) for n, m in model.named_modules()]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    uses = collections.Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    found = []
    for at, module in model.named_modules():
        fits = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm)) or type(module).__name__ == "Conv1D"
        fits = fits and (fault != "rows" or (module.weight.ndim >= 2 and min(module.weight.shape[:2]) > 2))
        fits = fits and (fault != "bias" or module.bias is not None)
        if fits and at in called and uses[id(module.weight)] == 1:  # a shared weight is two modules' fault
            found.append(at)
    return found


def missed(reference, name, fault, dtype, *, taps="**:io"):
    """Say what was named instead of the module with a fault; nothing when that is named."""
    given = families.inputs(name)
    candidates = targets(name, fault, given)
    if not candidates:
        return ""
    at = random.Random(f"{name} {fault} {dtype}").choice(candidates)
    model = families.family(name, dtype=dtype)
    with torch.no_grad():
        FAULTS[fault](model.get_submodule(at))
    result = ls.compare(reference, recorded(model, cast(given, dtype), taps=taps))
    first = result.first_divergence
    if first is not None and first.name == at and str(result.verdict) == "differs":
        return ""
    return f"{name} {fault} {dtype} at {at}: {result.verdict}, {first}: {result.verdict.because}"


# The short form ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FEW)
def family(request):
    return request.param, recorded(families.family(request.param), families.inputs(request.param), floors=True)


def test_no_healthy_pair_is_accused(family):
    name, reference = family
    assert_not_accused(reference, name, healthy(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fault", ["x 1.01", "rows"])
def test_a_fault_is_named_first(family, fault, dtype):
    name, reference = family
    assert not missed(reference, name, fault, dtype)


def test_padding_accuses_nobody_and_a_mask_that_is_ignored_is_found():
    given = padded("llama")
    reference = recorded(families.family("llama"), given, floors=True)
    other = recorded(families.family("llama", attention="sdpa"), given)
    result = ls.compare(reference, other)
    assert str(result.verdict) == "noise", result.verdict.because
    masks = [row for row in result.rows if "mask" in str(row.point.leaf)]
    assert masks
    assert {row.kind for row in masks} <= {"same", "noise", "unpaired"}
    ignored = recorded(families.family("llama"), {**given, "attention_mask": torch.ones_like(given["attention_mask"])})
    result = ls.compare(reference, ignored)
    assert str(result.verdict) == "differs"
    assert result.first_divergence.name.startswith("model.layers.0.self_attn")


def test_steps_of_other_shapes_and_other_inputs_are_judged_by_the_first_step_s_floors():
    prompt = families.inputs("llama")["input_ids"][:1, :10]

    def generate(model):
        model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)

    reference = recorded(families.family("llama"), None, floors=True, run=generate)
    for how in ({"attention": "sdpa"}, {"dtype": torch.bfloat16}):
        result = ls.compare(reference, recorded(families.family("llama", **how), None, run=generate))
        assert str(result.verdict) == "noise", result.verdict.because
    model = families.family("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.03)
    found = ls.compare(reference, recorded(model, None, run=generate)).first_divergence
    assert found.name == "model.layers.1.mlp.up_proj"


def test_without_floors_no_healthy_pair_is_accused_and_a_fault_in_fp32_is_found():
    given = families.inputs("llama")
    reference = recorded(families.family("llama"), given)
    assert_not_accused(reference, "llama", healthy("llama"))
    model = families.family("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    result = ls.compare(reference, recorded(model, given))
    assert result.first_divergence.name == "model.layers.1.mlp.up_proj"
    assert "record the reference with floors=True" in result.candidates[0].basis


def test_outputs_alone_accuse_no_products_in_bf16_though_their_attention_cancels():
    given = families.inputs("bert")
    reference = recorded(families.family("bert"), given, floors=True, taps="**")
    assert_not_accused(reference, "bert", healthy("bert", taps="**"))
    model = families.family("bert")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.value.weight.mul_(1.01)
    found = ls.compare(reference, recorded(model, given, taps="**"))
    assert found.first_divergence.name == "encoder.layer.1.attention.self.value"


def test_another_activation_is_named_with_its_function():
    given = families.inputs("bert")
    reference = recorded(families.family("bert"), given, floors=True)
    model = families.family("bert")
    model.encoder.layer[1].intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")
    result = ls.compare(reference, recorded(model, given))
    assert result.first_divergence.name == "encoder.layer.1.intermediate.intermediate_act_fn"
    assert "it computes gelu, tanh form, the reference gelu" in result.first_divergence.because


def test_a_scale_that_is_folded_into_a_projection_is_written_otherwise():
    given = families.inputs("llama")
    reference = recorded(families.family("llama"), given, floors=True)
    model = families.family("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(0.25)
        model.model.layers[1].self_attn.scaling *= 4
    result = ls.compare(reference, recorded(model, given))
    assert (str(result.verdict), "is written otherwise" in result.verdict.because) == ("noise", True)
    model.model.layers[1].self_attn.scaling /= 4
    assert str(ls.compare(reference, recorded(model, given)).verdict) == "differs"


# The long form ----------------------------------------------------------------------------------


@pytest.mark.stress
def test_every_architecture_s_healthy_pairs_and_faults():
    accused, names, planted = [], [], 0
    for name in families.FAMILIES:
        reference = recorded(families.family(name), families.inputs(name), floors=True)
        for what, run in healthy(name):
            planted += 1
            result = ls.compare(reference, run)
            if str(result.verdict) not in ("same", "noise"):
                accused.append(f"{name} {what}: {result.verdict.because}")
        names += [
            said
            for fault in FAULTS
            for dtype in (torch.float32, torch.bfloat16)
            if (said := missed(reference, name, fault, dtype))
        ]
    assert not accused, f"{len(accused)} of {planted}: {accused}"
    assert len(names) <= 0.01 * len(FAULTS) * 2 * len(families.FAMILIES), names
