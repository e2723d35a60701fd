"""A checkpoint that transformers quantised with torchao, against its float original."""

import json
import math

import pytest
import torch

import layerscope as ls
from layerscope.cli import main
from layerscope.models import load_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchao")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The float original, and what transformers makes of it with torchao, as both are saved."""
    from torchao.quantization import Int8WeightOnlyConfig

    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(root / "float")
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        root / "float",
        quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2)),
        dtype=torch.float32,
    )
    packed.save_pretrained(root / "int8")
    return root / "float", root / "int8"


@pytest.fixture(scope="module")
def pair(checkpoints):
    return tuple(load_model(str(folder)).model for folder in checkpoints)


IDS = torch.arange(20).view(1, 20)


def test_from_two_folders_the_packed_one_is_quantised_and_healthy_by_what_its_weights_show(pair, tmp_path):
    for model, name in zip(pair, ("float", "int8"), strict=True):
        with ls.record(model, "model.layers.*:io", to=tmp_path / name), torch.no_grad():
            model(IDS)
    said = [ls.open_run(tmp_path / name).manifest.settings.get("quantised") for name in ("float", "int8")]
    assert said[0] is None
    assert said[1] == "weights in a Int8Tensor"
    result = ls.compare(tmp_path / "float", tmp_path / "int8")
    assert str(result.verdict) == "quantised"
    assert result.first_divergence is None


def by_hand(weight):
    """Round each row to 255 steps of its largest value, in float64."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return (weight / scale).round().clamp(-128, 127) * scale


def decibels(wanted, got):
    return 10 * math.log10(float(wanted.square().sum()) / float((wanted - got).square().sum()))


def test_every_packed_module_is_paired_by_its_name_with_the_sqnr_of_its_weights_and_outputs(pair):
    reference, candidate = pair
    finding = ls.diagnose(reference, candidate, {"input_ids": IDS})
    assert finding.root is None
    linears = [name for name, m in reference.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    assert {one.name for one in finding.packed} == set(linears)
    assert len(linears) == 14
    given = {}
    hooks = [
        reference.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: given.update({name: (a[0], out)})
        )
        for name in linears
    ]
    with torch.no_grad():
        reference(IDS)
    for hook in hooks:
        hook.remove()
    for one in finding.packed:
        weight = reference.get_submodule(one.name).weight.detach().double()
        packed = candidate.get_submodule(one.name).weight
        values = packed.qdata.double() * packed.scale.double().reshape(-1, 1)
        assert one.weight_sqnr == pytest.approx(decibels(weight, values), abs=1e-3)
        assert one.weight_sqnr == pytest.approx(decibels(weight, by_hand(weight)), abs=0.2)
        x, out = (tensor.detach().double() for tensor in given[one.name])
        assert one.output_sqnr == pytest.approx(decibels(out, x @ values.T), abs=0.05)


def test_a_pair_of_plain_models_has_no_packed_weights(pair):
    assert ls.diagnose(pair[0], pair[0], {"input_ids": IDS}).packed == ()


def test_a_packed_weight_that_is_off_is_named(pair, checkpoints):
    reference, _ = pair
    broken = load_model(str(checkpoints[1])).model
    broken.model.layers[1].mlp.up_proj.weight.scale.mul_(1.5)
    finding = ls.diagnose(reference, broken, {"input_ids": IDS})
    assert finding.root == "model.layers.1.mlp.up_proj"
    worst = min(finding.packed, key=lambda one: one.weight_sqnr)
    assert worst.name == finding.root
    assert worst.weight_sqnr == pytest.approx(-20 * math.log10(0.5), abs=0.1)


def test_fingerprints_are_of_the_dequantised_weights(pair, tmp_path):
    reference, candidate = pair
    plain = transformers.LlamaForCausalLM(reference.config).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            held = candidate.get_parameter(name)
            parameter.copy_(held.dequantize() if hasattr(held, "qdata") else held)
    prints = {}
    for name, model in (("packed", candidate), ("plain", plain), ("float", reference)):
        with ls.record(model, "model.layers.*", to=tmp_path / name), torch.no_grad():
            model(IDS)
        prints[name] = ls.open_run(tmp_path / name).manifest.weights
    assert prints["packed"] == prints["plain"]
    different = {name for name in prints["float"] if prints["float"][name] != prints["packed"][name]}
    assert len(different) == 14
    found = ls.compare(tmp_path / "float", tmp_path / "packed")
    assert len(found.rows) == 2


def test_the_command_line_diagnoses_the_two_folders(checkpoints, capsys):
    with pytest.raises(SystemExit) as left:
        main(["diagnose", *map(str, checkpoints), "--prompt", "Hello, packed world", "--json"])
    page = json.loads(capsys.readouterr().out)
    assert (left.value.code or 0) == 0
    assert len(page["packed"]) == 14
    assert all(one["kind"] == "Int8Tensor" and 30 < one["weight_sqnr"] < 60 for one in page["packed"])
