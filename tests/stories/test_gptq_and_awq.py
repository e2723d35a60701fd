"""Checkpoints of GPTQ and AWQ, packed here by their published layouts, against the float original they were made of."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import layerscope as ls
from layerscope.errors import BadModel
from layerscope.models import load_model

transformers = pytest.importorskip("transformers")

GROUP = 16
IDS = torch.arange(20).view(1, 20)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "float"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


# The packers: numpy, a word at a time ---------------------------------------------------------------


def coded(weight, group, bits, g_idx):
    """Round a weight (outputs, inputs) to codes with a scale and a zero for each group of inputs and each output."""
    groups = int(g_idx.max()) + 1
    scales, zeros = np.zeros((groups, len(weight)), np.float16), np.zeros((groups, len(weight)), np.int64)
    codes = np.zeros(weight.T.shape, np.int64)
    for g in range(groups):
        own = weight[:, g_idx == g].astype(np.float64)
        low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
        scales[g] = (high - low) / (2**bits - 1)
        zeros[g] = np.clip(np.rint(-low / scales[g].astype(np.float64)), 1, 2**bits - 1)
        exact = np.rint(own / scales[g].astype(np.float64)[:, None]) + zeros[g][:, None]
        codes[g_idx == g] = np.clip(exact, 0, 2**bits - 1).T
    values = (codes - zeros[g_idx]) * scales.astype(np.float64)[g_idx]
    return codes, zeros, scales, values.T


def words(integers, bits, order=None):
    """Pack integers along the last axis into int32 words, the first in the low bits."""
    per = 32 // bits
    order = range(per) if order is None else order
    integers = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, -integers.shape[-1] % per)])
    cut = integers.reshape(*integers.shape[:-1], -1, per)
    packed = np.zeros(cut.shape[:-1], np.uint32)
    for at, which in enumerate(order):
        packed |= cut[..., which].astype(np.uint32) << np.uint32(at * bits)
    return torch.from_numpy(packed.view(np.int32).copy())


def gptq(weight, *, bits=4, group=GROUP, shuffled=False, less=1):
    inputs = weight.shape[1]
    g_idx = np.arange(inputs) // (inputs if group < 0 else group)
    if shuffled:
        g_idx = np.random.default_rng(0).permutation(g_idx)
    codes, zeros, scales, values = coded(weight, group, bits, g_idx)
    return {
        "qweight": words(codes.T, bits).t().contiguous(),
        "qzeros": words(zeros - less, bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }, values


def awq(weight, *, bits=4, group=GROUP):
    inputs = weight.shape[1]
    codes, zeros, scales, values = coded(weight, group, bits, np.arange(inputs) // (inputs if group < 0 else group))
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's AWQ_ORDER: what lies at each place of a word
    packed = {"qweight": words(codes, bits, order), "qzeros": words(zeros, bits, order)}
    return {**packed, "scales": torch.from_numpy(scales)}, values


FORMS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "gptq, act order": (
        lambda w: gptq(w, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq"},
    ),
    "gptq_v2, 8 bits, one group": (
        lambda w: gptq(w, bits=8, group=-1, less=0),
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, ragged": (lambda w: gptq(w, group=12), {"quant_method": "gptq", "bits": 4, "group_size": 12}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "GEMM"}),
}


def packed(original, folder, form):
    """Write the checkpoint with every Linear of the layers packed; return it and the weights it stands for."""
    pack, said = FORMS[form]
    shutil.copytree(original, folder)
    weights, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if ("_proj" in name or "c_" in name) and name.endswith("weight")]:
        weight = weights.pop(name).numpy()
        parts, values[name] = pack(weight.T if "c_" in name else weight)
        weights |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


def decibels(wanted, got):
    return 10 * math.log10(float((wanted**2).sum()) / float(((wanted - got) ** 2).sum()))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "gptq, ragged"])
def test_packed_weights_are_what_they_stand_for_and_each_module_has_its_sqnr(original, tmp_path, form):
    folder, values = packed(original, tmp_path / "packed", form)
    reference, candidate = load_model(str(original)).model, load_model(str(folder)).model
    assert len(values) == 14
    for name, expected in values.items():
        got = candidate.get_parameter(name).detach().double().numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0)
    finding = ls.diagnose(reference, candidate, {"input_ids": IDS})
    assert finding.root is None, str(finding)
    assert {f"{one.name}.weight" for one in finding.packed} == set(values)
    expected_kind = {"gptq_v2, 8 bits, one group": "GPTQ int8", "awq": f"AWQ int4 g{GROUP}"}
    assert {one.kind for one in finding.packed} == {expected_kind.get(form, f"GPTQ int4 g{GROUP}")}
    given = {}
    hooks = [
        reference.get_submodule(one.name).register_forward_hook(
            lambda _, args, out, name=one.name: given.update({name: (args[0].double(), out.double())})
        )
        for one in finding.packed
    ]
    with torch.no_grad():
        reference(IDS)
    for hook in hooks:
        hook.remove()
    for one in finding.packed:
        weight = reference.get_submodule(one.name).weight.detach().double().numpy()
        stands_for = values[f"{one.name}.weight"]
        assert one.weight_sqnr == pytest.approx(decibels(weight, stands_for), abs=1e-3)
        x, out = (tensor.numpy() for tensor in given[one.name])
        assert one.output_sqnr == pytest.approx(decibels(out, x @ stands_for.T), abs=0.05)


def test_gpt2s_linears_lie_the_other_way_round_and_inputs_need_not_fill_a_word(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=300, n_embd=36, n_layer=3, n_head=2, n_inner=60, n_positions=64)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "float")
    folder, values = packed(tmp_path / "float", tmp_path / "packed", "gptq, ragged")
    model = load_model(str(folder)).model
    assert len(values) == 12
    for name, expected in values.items():
        np.testing.assert_allclose(model.get_parameter(name).detach().double().numpy().T, expected, rtol=1e-6, atol=0)
    finding = ls.diagnose(theirs, model, {"input_ids": IDS})
    assert finding.root is None, str(finding)
    assert len(finding.packed) == 12


def test_a_scale_that_is_off_is_named(original, tmp_path):
    folder, _ = packed(original, tmp_path / "packed", "gptq")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.scales"] *= 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    finding = ls.diagnose(load_model(str(original)).model, load_model(str(folder)).model, {"input_ids": IDS})
    assert finding.root == "model.layers.1.mlp.up_proj"


def test_weights_are_in_the_fingerprints_as_what_they_stand_for(original, tmp_path):
    folder, values = packed(original, tmp_path / "packed", "awq")
    plain = load_model(str(original)).model
    with torch.no_grad():
        for name, value in values.items():
            plain.get_parameter(name).copy_(torch.from_numpy(value))
    prints = {}
    for name, model in (("packed", load_model(str(folder)).model), ("plain", plain)):
        with ls.record(model, "model.layers.*", to=tmp_path / "runs" / name), torch.no_grad():
            model(IDS)
        prints[name] = ls.open_run(tmp_path / "runs" / name).manifest.weights
    assert prints["packed"] == prints["plain"]


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"quant_method": "gptq", "bits": 3}, "its GPTQ weights have 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "its AWQ weights are in the format 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "are in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 24}, "inputs in groups of 24 are not"),
        ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, "does not fit GPTQ int8 g16"),
    ],
)
def test_what_is_not_read_is_refused_by_name(original, tmp_path, said, refused):
    folder, _ = packed(original, tmp_path / "packed", "gptq")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match=refused):
        load_model(str(folder))


def test_a_checkpoint_that_says_it_is_packed_and_is_not_is_refused(original, tmp_path):
    shutil.copytree(original, tmp_path / "packed")
    config = json.loads((original / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match=r"there is no \.qweight"):
        load_model(str(tmp_path / "packed"))
