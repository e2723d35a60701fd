"""The built-in mixture of experts: transformers' numbers under transformers' names, in graphs that compilers take."""

import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from layerscope.errors import BadModel
from layerscope.models import load_model
from layerscope.models.minimax import Experts, MiniMaxM2, MiniMaxM2Config, Router, minimax_m2

SHALLOW = MiniMaxM2Config(num_hidden_layers=2)
IDS = torch.tensor([list(b"hello, world")])
OTHER = torch.tensor([list(b"not the same"[::-1] * 2), list(b"another text" * 2), list(b"and a third " * 2)])


@pytest.fixture
def theirs():
    """transformers' own, with weights, biases and norms that all matter."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    config = transformers.MiniMaxM2Config(
        vocab_size=256,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=rope,
    )
    model = transformers.MiniMaxM2ForCausalLM(config).eval()
    for weight in model.state_dict().values():
        weight.copy_(torch.randn_like(weight) * 0.3 + (weight.dim() == 1))
    return model


def test_it_has_62_layers_and_is_tiny():
    model = minimax_m2()
    assert len(model.model.layers) == 62
    assert sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        assert model(IDS).shape == (1, 12, 256)
    assert flops.get_total_flops() < 200e6  # tens of milliseconds


@pytest.mark.parametrize("name", ["minimax-m2", "minimax-m2-tiny"])
def test_both_names_are_of_one_model(name):
    loaded = load_model(name)
    assert isinstance(loaded.model, MiniMaxM2)
    assert torch.equal(loaded.model.lm_head.weight, minimax_m2(seed=0).lm_head.weight)


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = minimax_m2(SHALLOW, seed=7)(IDS)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(one, minimax_m2(SHALLOW, seed=7)(IDS))
    assert not torch.equal(one, minimax_m2(SHALLOW, seed=8)(IDS))


def test_a_position_never_sees_what_comes_after_it():
    model = minimax_m2(SHALLOW)
    changed = IDS.clone()
    changed[0, 6:] = 0
    torch.testing.assert_close(model(IDS)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(IDS)[:, 6:], model(changed)[:, 6:])


# Beside transformers' own ---------------------------------------------------------------------------


def test_with_the_same_weights_it_says_what_transformers_says(theirs):
    ours = MiniMaxM2(MiniMaxM2Config.of(theirs.config)).eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        expected = theirs(OTHER).logits
        torch.testing.assert_close(ours(OTHER), expected, rtol=1e-5, atol=1e-5)
        ours.model.layers[1].mlp.e_score_correction_bias[0] += 5  # one expert is chosen more often
        assert not torch.allclose(ours(OTHER), expected, rtol=1e-2)


def test_its_modules_have_transformers_names(theirs):
    ours = {name for name, _ in MiniMaxM2(MiniMaxM2Config.of(theirs.config)).named_modules()}
    expected = {name for name, _ in theirs.named_modules() if not name.endswith("act_fn")}
    assert ours == expected


def test_runs_of_both_align_layer_by_layer(theirs):
    from layerscope import compare, record

    ours = MiniMaxM2(MiniMaxM2Config.of(theirs.config)).eval()
    ours.load_state_dict(theirs.state_dict())
    taps = ["model.embed_tokens", "model.layers.*", "**.self_attn.*", "**.mlp", "**.mlp.*", "model.norm", "lm_head"]
    runs = []
    for model in (theirs, ours):
        with torch.no_grad(), record(model, taps) as rec:
            model(IDS)
        runs.append(rec.run)
    result = compare(*runs)
    assert result.verdict.word in ("same", "noise")  # some processors round both alike to the last bit
    assert {row.kind for row in result.rows} <= {"same", "noise"}
    assert {"model.layers.2:output", "model.layers.2.mlp.gate:output[0]", "lm_head:output"} <= {
        str(row.point) for row in result.rows
    }


def test_a_checkpoint_folder_of_theirs_loads_and_so_does_its_configuration(theirs, tmp_path):
    import json

    theirs.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path)).model
    assert type(loaded) is type(theirs)
    with torch.no_grad():
        assert torch.equal(loaded(OTHER).logits, theirs(OTHER).logits)
    written = json.loads((tmp_path / "config.json").read_text())
    assert MiniMaxM2Config.of(written) == MiniMaxM2Config.of(theirs.config)
    released = {key: value for key, value in written.items() if key != "rope_parameters"}
    old = MiniMaxM2Config.of({**released, "rope_theta": 5e6, "rotary_dim": 4, "rope_scaling": None})
    assert (old.rope_theta, old.rotary_dim) == (5e6, 4)
    assert MiniMaxM2Config.of(released).rotary_dim == old.head_dim  # transformers rotates all of it by default


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "the configuration of a 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and the built-in MiniMax-M2 knows 'silu' alone"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"hidden_size": None}, "does not say hidden_size"),
    ],
)
def test_a_configuration_it_cannot_follow_is_refused(theirs, change, said):
    with pytest.raises(BadModel, match=said):
        MiniMaxM2Config.of({**theirs.config.to_dict(), **change})


# Routing --------------------------------------------------------------------------------------------


def test_experts_are_chosen_with_the_bias_and_weighed_without_it():
    router = Router(MiniMaxM2Config(hidden_size=2, num_local_experts=3, num_experts_per_tok=2))
    router.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    logits, weights, chosen = router(torch.tensor([[2.0, 1.0]]), torch.tensor([0.0, 0.0, 9.0]))
    assert logits.tolist() == [[2.0, 1.0, -3.0]]
    assert chosen.tolist() == [[2, 0]]
    scores = torch.sigmoid(torch.tensor([-3.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(weights[0].double(), scores / scores.sum())


def test_only_the_chosen_experts_are_heard():
    config = MiniMaxM2Config(hidden_size=6, intermediate_size=5, num_local_experts=4, num_experts_per_tok=2)
    experts = Experts(config).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens, weights = torch.randn(7, 6).double(), torch.rand(7, 2).double()
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    expected = torch.zeros(7, 6).double()
    for token in range(7):
        for slot in range(2):
            expert = chosen[token, slot]
            gate, up = (experts.gate_up_proj[expert] @ tokens[token]).split(5)
            said = experts.down_proj[expert] @ (gate * torch.sigmoid(gate) * up)
            expected[token] += weights[token, slot] * said
    torch.testing.assert_close(experts(tokens, chosen, weights), expected)


# What compilers take --------------------------------------------------------------------------------


def test_a_trace_follows_other_inputs_of_other_shapes():
    model = minimax_m2(SHALLOW)
    with torch.no_grad():
        traced = torch.jit.trace(model, (IDS,))
        for ids in (IDS, OTHER):
            torch.testing.assert_close(traced(ids), model(ids))


def test_an_export_follows_other_inputs_of_other_shapes():
    model = minimax_m2(SHALLOW)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=4096)
    with torch.no_grad():
        exported = torch.export.export(model, (OTHER,), dynamic_shapes={"input_ids": {0: batch, 1: length}}).module()
        for ids in (IDS, OTHER, OTHER[:, :5]):
            torch.testing.assert_close(exported(ids), model(ids))


def test_onnx_follows_other_inputs_of_other_shapes(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = minimax_m2(MiniMaxM2Config(num_hidden_layers=1))
    file = tmp_path / "model.onnx"
    shapes = {"input_ids": {0: "batch", 1: "length"}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (OTHER,), file, dynamo=True, dynamic_shapes=shapes, verbose=False)
        session = runtime.InferenceSession(str(file))
        for ids in (IDS, OTHER, OTHER[:, :5]):
            (logits,) = session.run(None, {"input_ids": ids.numpy()})
            torch.testing.assert_close(torch.from_numpy(logits), model(ids), rtol=1e-5, atol=1e-5)
