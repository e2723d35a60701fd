"""A user has two live models that should agree: which module makes the difference, if any does?

Each fault is planted in one module of one architecture and one precision; see `planted.py` for the ways.

    pytest tests/stories/test_diagnosing.py -k "llama and bf16 and scaled"
"""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import architectures
import layerscope as ls
import planted
from planted import DTYPES, Case

COVER = planted.cover()
REST = [case for case in planted.every_case() if case not in set(COVER)]


@functools.cache
def diagnosed(case):
    """The finding, and the module that is right."""
    candidate, blamed = planted.planted(case)
    backward = planted.BY_NAME[case.fault].backward
    reference = architectures.make(case.model)
    return ls.diagnose(reference, candidate, architectures.inputs(case.model), backward=backward), blamed


def ran(model, name):
    """The model's first output, with the same random numbers every time."""
    dtype = next(model.parameters()).dtype
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in architectures.inputs(name).items()}
    torch.manual_seed(3)
    result = model(**given)
    return result if isinstance(result, torch.Tensor) else result[0]


def relative(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# The suite itself -------------------------------------------------------------------------------


def test_the_cover_is_small_and_leaves_no_pair_out():
    assert len(COVER) <= 120
    assert {pair for case in COVER for pair in planted.pairs(case)} == {
        pair for case in planted.every_case() for pair in planted.pairs(case)
    }


@pytest.mark.stress
@pytest.mark.parametrize("case", planted.every_case(), ids=str)
def test_a_planted_fault_is_one_and_is_where_it_is_said_to_be(case):
    candidate, blamed = planted.planted(case)
    twin = architectures.make(case.model, dtype=DTYPES[case.dtype])
    if planted.BY_NAME[case.fault].backward:
        assert torch.equal(ran(candidate, case.model), ran(twin, case.model))
        assert relative(*(input_gradient(model, case.model) for model in (candidate, twin))) > 1e-4
        return
    with torch.no_grad():
        right, wrong = ran(twin, case.model), ran(candidate, case.model)
        assert not relative(wrong, right) < 1e-7  # NaN is a difference
        names = [blamed, blamed.replace(".1", ".2")] if "swapped" in case.fault else [blamed]
        assert torch.equal(healed(candidate, twin, names, case.model), right)


def input_gradient(model, name):
    result = ran(model, name).float()
    model.zero_grad()
    result.backward(torch.randn(result.shape, generator=torch.Generator().manual_seed(5)))
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def healed(candidate, twin, names, model):
    """What the candidate says with the twin's outputs in place of these modules'."""
    right = {name: [] for name in names}
    handles = [twin.get_submodule(n).register_forward_hook(lambda m, a, out, n=n: right[n].append(out)) for n in names]
    ran(twin, model)
    handles += [candidate.get_submodule(n).register_forward_hook(lambda m, a, out, n=n: right[n].pop(0)) for n in names]
    result = ran(candidate, model)
    for handle in handles:
        handle.remove()
    return result


WITHOUT_EFFECT = [
    Case(model, dtype, fault.name)
    for model in architectures.EVERY
    for fault in planted.FAULTS
    for dtype in DTYPES
    if dtype not in fault.dtypes
]


@pytest.mark.parametrize("case", WITHOUT_EFFECT, ids=str)
def test_a_fault_that_is_left_out_of_a_precision_has_no_effect_there(case):
    """A value of eight bits survives a dtype of eleven, but for what is too small for its exponent."""
    candidate, blamed = planted.planted(case)
    twin = architectures.make(case.model, dtype=DTYPES[case.dtype])
    seen = []
    for model in (candidate, twin):
        model.get_submodule(blamed).register_forward_hook(lambda m, args, out: seen.append(out))
        with torch.no_grad():
            ran(model, case.model)
    assert relative(*seen) < torch.finfo(DTYPES[case.dtype]).eps / 1000


# One fault --------------------------------------------------------------------------------------


def assert_blamed(case):
    finding, blamed = diagnosed(case)
    assert str(finding.verdict) == "differs", finding.verdict.because
    assert finding.root == blamed, finding.verdict.because
    others = [blamed.replace(".1", ".2")] if "swapped" in case.fault else []
    assert [blame.name for blame in finding.roots] == [blamed, *others]


@pytest.mark.parametrize("case", COVER, ids=str)
def test_the_module_with_the_fault_is_the_root(case):
    assert_blamed(case)


@pytest.mark.stress
@pytest.mark.parametrize("case", REST, ids=str)
def test_the_module_with_the_fault_is_the_root_in_every_case(case):
    assert_blamed(case)


CAUSES = {
    "scaled": {"weights"},
    "rows": {"weights", "heads"},
    "epsilon": {"constant"},
    "grid": {"grid"},
    "saturated": {"saturation"},
    "roundtrip": {"cast"},
    "nan": {"nonfinite", "weights"},
    "tokens": {"tokens"},
    "rope": {"weights", "constant", "operation", "order"},
    "attention-scale": {"constant", "operation"},
    "mask": {"operation", "constant"},
    "residual": {"operation"},
    "swapped": {"weights", "order"},
    "dropout": {"randomness"},
    "gradient": {"operation", "constant", "scale"},
}
SURE = ("scaled-1.05", "permuted-rows", "row-times", "epsilon-attribute", "nan", "dropout")


@pytest.mark.parametrize("case", COVER, ids=str)
def test_a_cause_that_is_named_is_the_right_one(case):
    finding, _ = diagnosed(case)
    unsure = set() if case.fault.startswith(SURE) else {"unknown"}
    assert finding.cause.kind in CAUSES[case.family] | unsure, str(finding.cause)


@pytest.mark.parametrize("case", [case for case in COVER if case.fault == "scaled-1.05-weights"], ids=str)
def test_the_sentence_names_the_module_the_factor_and_what_putting_it_right_removes(case):
    finding, blamed = diagnosed(case)
    sentence = finding.verdict.because
    assert blamed in sentence
    assert "times 1.05" in sentence
    assert "%" in sentence


@pytest.mark.parametrize("case", [case for case in COVER if case.dtype == "fp32" and case.family == "rows"], ids=str)
def test_in_one_precision_putting_the_reference_there_removes_the_whole_error(case):
    finding, _ = diagnosed(case)
    assert finding.roots[0].removed == pytest.approx(1, abs=1e-3)
    candidate, _ = planted.planted(case)
    with torch.no_grad():
        outputs = [ran(model, case.model) for model in (candidate, architectures.make(case.model))]
    assert finding.final.error == pytest.approx(relative(*outputs), rel=0.05)


# Two faults -------------------------------------------------------------------------------------

TWO = [
    ("llama", "scaled-1.05-weights", "scaled-1.01-norm"),
    ("llama", "attention-scale-attribute", "grid-int4-forward"),
    ("llama", "nan-output", "scaled-1.01-parameter"),
    ("llama", "residual-missing", "mask-hook"),
    ("llama", "dropout-hook", "row-times-30"),
    ("gpt2", "mask-forward", "permuted-rows"),
    ("gpt2", "dropout-module", "epsilon-attribute"),
    ("bert", "saturated-output", "shifted-tokens-input"),
    ("bert", "scaled-1.05-weights", "residual-missing"),
    ("mamba", "row-times-30", "scaled-1.003-weights"),
    ("minimax-m2", "rope-buffer", "scaled-1.01-parameter"),
    ("t5", "dropped-token-output", "epsilon-module"),
    ("vit", "permuted-heads", "roundtrip-fp8"),
    ("convnet", "residual-missing", "scaled-1.01-norm"),
]


def assert_both_blamed(model, first, second, dtype):
    candidate = architectures.make(model)
    blamed = [planted.plant(candidate, Case(model, dtype, f), layer=at) for at, f in ((0, first), (2, second))]
    finding = ls.diagnose(architectures.make(model), candidate.to(DTYPES[dtype]), architectures.inputs(model))
    assert [blame.name for blame in finding.roots] == blamed, finding.verdict.because
    assert finding.root == blamed[0]


IN_TURN = [(*faults, dtype) for faults, dtype in zip(TWO, itertools.cycle(DTYPES), strict=False)]
THE_REST = [(*faults, dtype) for faults in TWO for dtype in DTYPES if (*faults, dtype) not in IN_TURN]


@pytest.mark.parametrize("case", IN_TURN, ids="-".join)
def test_of_two_faults_both_are_found_and_the_first_to_run_is_the_root(case):
    assert_both_blamed(*case)


@pytest.mark.stress
@pytest.mark.parametrize("case", THE_REST, ids="-".join)
def test_of_two_faults_both_are_found_in_every_precision(case):
    assert_both_blamed(*case)


# Quantised --------------------------------------------------------------------------------------


def quantised(model, bits=8):
    """Every weight on a grid of its own channel, as a weight-only quantisation leaves it."""
    levels = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D":
                rows = planted.first_outputs(module)
                step = rows.abs().flatten(1).amax(1).view(-1, *[1] * (rows.dim() - 1)) / levels
                rows.copy_(torch.round(rows / step) * step)
    return model


def scale_wrong(module):
    module.weight.mul_(1.3)


def one_channel_wrong(module):
    planted.first_outputs(module)[2] *= 4


def zero_point_missed(module):
    module.weight.add_(0.5 * module.weight.std())


UNTIED = ("llama", "bert", "minimax-m2", "vit", "convnet")  # elsewhere the head shares the embedding's weight


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("model", UNTIED)
def test_quantised_alike_is_healthy_and_ranked(model, bits):
    candidate = quantised(architectures.make(model), bits)
    finding = ls.diagnose(architectures.make(model), candidate, architectures.inputs(model))
    assert finding.root is None, finding.verdict.because
    assert str(finding.verdict) == "noise"
    names = [name for name, _ in finding.ranking]
    every = [name for name, module in candidate.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert [n for n in every if not any(f"{n}.".startswith(f"{ranked}.") for ranked in names)] == []
    assert {f"{planted.PLACES[model].layers}.{i}" for i in range(3)} <= set(names)
    damage = [value for _, value in finding.ranking]
    assert damage == sorted(damage, reverse=True)


@pytest.mark.parametrize("fault", [scale_wrong, one_channel_wrong, zero_point_missed])
@pytest.mark.parametrize(("model", "dtype"), [*zip(UNTIED, itertools.cycle(("bf16", "fp32")), strict=False)])
def test_of_many_quantised_layers_the_one_with_a_wrong_scale_is_the_root(model, dtype, fault):
    candidate = quantised(architectures.make(model))
    places = planted.PLACES[model]
    target = f"{places.layers}.1.{places.projections[0]}"
    with torch.no_grad():
        fault(candidate.get_submodule(target))
    finding = ls.diagnose(architectures.make(model), candidate.to(DTYPES[dtype]), architectures.inputs(model))
    assert [blame.name for blame in finding.roots] == [target], finding.verdict.because


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "one wrong scale"])
@pytest.mark.parametrize("model", ["llama", "bert", "vit"])
def test_a_model_quantised_by_torchao(model, wrong):
    quantization = pytest.importorskip("torchao.quantization")
    candidate = architectures.make(model)
    quantization.quantize_(candidate, quantization.Int8WeightOnlyConfig())
    places = planted.PLACES[model]
    target = f"{places.layers}.2.{places.projections[1]}"
    if wrong:
        candidate.get_submodule(target).weight.scale.mul_(1.3)
    finding = ls.diagnose(architectures.make(model), candidate, architectures.inputs(model))
    assert finding.root == (target if wrong else None), finding.verdict.because
    assert len(finding.roots) == int(wrong)


def test_what_the_ranking_puts_first_does_the_most_damage():
    """Keeping that one layer in high precision helps the output more than keeping the last."""
    reference, candidate = architectures.make("llama"), quantised(architectures.make("llama"), 4)
    names = [name for name, _ in ls.diagnose(reference, candidate, architectures.inputs("llama")).ranking]

    def error_without(name):
        kept = copy.deepcopy(candidate)
        kept.get_submodule(name).load_state_dict(reference.get_submodule(name).state_dict())
        with torch.no_grad():
            return relative(ran(kept, "llama"), ran(reference, "llama"))

    assert error_without(names[0]) < error_without(names[-1])


# Healthy pairs ----------------------------------------------------------------------------------


def assert_healthy(reference, candidate, model, *, words=("same", "noise"), **how):
    finding = ls.diagnose(reference, candidate, architectures.inputs(model), **how)
    assert finding.root is None, finding.verdict.because
    assert finding.cause is None
    assert finding.roots == ()
    assert str(finding.verdict) in words, finding.verdict.because
    assert not [row for row in finding.rows if row.kind in ("root", "nonfinite", "random")]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("model", architectures.EVERY)
def test_a_healthy_port_to_half_precision_has_no_root(model, dtype, backward):
    candidate = architectures.make(model, dtype=DTYPES[dtype])
    assert_healthy(architectures.make(model), candidate, model, words=("noise",), backward=backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("model", architectures.EVERY)
def test_a_model_made_again_is_the_same(model, backward):
    assert_healthy(architectures.make(model), architectures.make(model), model, words=("same",), backward=backward)


def test_a_model_against_itself_is_the_same():
    model = architectures.make("llama")
    assert_healthy(model, model, "llama", words=("same",))
    assert_healthy(model, copy.deepcopy(model), "llama", words=("same",))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", [name for name in architectures.EVERY if name not in ("mamba", "convnet")])
def test_another_attention_kernel_is_no_fault(model, dtype):
    candidate = architectures.make(model, dtype=DTYPES[dtype], attention="sdpa")
    assert_healthy(architectures.make(model), candidate, model)


@pytest.mark.parametrize("model", ["llama", "bert", "t5"])
def test_two_half_precision_models_with_other_kernels_are_healthy(model):
    """The reference's own dtype is no longer finer than the candidate's."""
    reference = architectures.make(model, dtype=torch.bfloat16)
    assert_healthy(reference, architectures.make(model, dtype=torch.bfloat16, attention="sdpa"), model)


@pytest.mark.parametrize("model", ["llama", "bert", "convnet"])
def test_half_precision_by_autocast_is_no_fault(model):
    """The weights stay in float32; what is computed from them does not."""
    candidate = architectures.make(model)
    right = candidate.forward

    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return right(*args, **kwargs)

    candidate.forward = forward
    assert_healthy(architectures.make(model), candidate, model, words=("noise",))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("model", ["llama", "bert", "convnet"])
def test_a_compiled_model_is_no_fault(model, backend):
    torch._dynamo.reset()
    candidate = torch.compile(architectures.make(model), backend=backend)
    assert_healthy(architectures.make(model), candidate, model)


def test_a_fault_in_a_compiled_model_is_found():
    torch._dynamo.reset()
    candidate, blamed = planted.planted(Case("llama", "bf16", "scaled-1.05-weights"))
    finding = ls.diagnose(
        architectures.make("llama"), torch.compile(candidate, backend="eager"), architectures.inputs("llama")
    )
    assert finding.root == blamed


def test_another_number_of_threads_is_no_fault():
    before = torch.get_num_threads()
    candidate = architectures.make("llama")
    candidate.register_forward_pre_hook(lambda module, args: torch.set_num_threads(before + 1))
    candidate.register_forward_hook(lambda module, args, out: torch.set_num_threads(before))
    try:
        assert_healthy(architectures.make("llama"), candidate, "llama")
    finally:
        torch.set_num_threads(before)
