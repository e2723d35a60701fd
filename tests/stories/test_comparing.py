"""A user ports or quantises a real model and has dumps of both: which module is to blame, if any?

Each fault is planted in one module of one architecture; the comparison sees nothing but the runs on disk.
"""

from __future__ import annotations

import pytest
import torch

import architectures
import layerscope as ls


def recorded(folder, name, model, taps="**"):
    with torch.no_grad(), ls.record(model, taps, to=folder, keep="tensor") as rec:
        model(**architectures.inputs(name))
    return rec.run.address


@pytest.fixture(scope="module", params=architectures.NAMES)
def family(request, tmp_path_factory):
    """One architecture: its name, the reference's run and a BF16 noise run."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = recorded(folder / "fp32", request.param, architectures.make(request.param))
    bf16 = architectures.make(request.param, dtype=torch.bfloat16)
    return request.param, reference, recorded(folder / "bf16", request.param, bf16)


# The faults -------------------------------------------------------------------------------------


def scaled(factor):
    def plant(module):
        for parameter in module.parameters():
            parameter.mul_(factor)

    return plant


def rows_permuted(module):
    axis = 1 if type(module).__name__ == "Conv1D" else 0
    order = torch.randperm(module.weight.shape[axis], generator=torch.Generator().manual_seed(7))
    module.weight.copy_(module.weight.index_select(axis, order))


def one_row_times_30(module):
    (module.weight[:, 3] if type(module).__name__ == "Conv1D" else module.weight[3]).mul_(30)


def nan_in_one_token(module):
    def spoil(module, args, out):
        out = out.clone()
        out[0, 5, 0] = torch.nan
        return out

    module.register_forward_hook(spoil)


def last_token_zeroed(module):
    module.register_forward_hook(lambda module, args, out: torch.cat([out[:, :-1], torch.zeros_like(out[:, -1:])], 1))


FAULTS = {
    "scaled by 1.05": scaled(1.05),
    "scaled by 1.01": scaled(1.01),
    "rows permuted": rows_permuted,
    "one row times 30": one_row_times_30,
    "NaN in one token": nan_in_one_token,
    "last token zeroed": last_token_zeroed,
}


def faulty(name, target, fault, dtype=torch.float32):
    model = architectures.make(name, dtype=dtype)
    with torch.no_grad():
        FAULTS[fault](model.get_submodule(target))
    return model


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_divergence_is_the_module_with_the_fault(family, fault, tmp_path):
    name, reference, noise = family
    targets = architectures.projections(name)
    target = targets[list(FAULTS).index(fault) % len(targets)]
    result = ls.compare(reference, recorded(tmp_path / "run", name, faulty(name, target, fault)), noise=noise)
    assert str(result.verdict) == "differs"
    assert result.first_divergence.name == target
    assert result.first_divergence.kind == ("nonfinite" if "NaN" in fault else "root")
    assert [row.name for row in result.rows if row.kind in ("root", "nonfinite")] == [target]
    after = result.rows[result.rows.index(result.first_divergence) + 1 :]
    assert {row.kind for row in after} <= {"same", "noise", "inherited"}
    if "scaled" not in fault:  # what a small factor leaves downstream may be below the noise
        assert any(row.kind == "inherited" for row in after)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_bf16_port_is_told_from_bf16_itself(family, fault, tmp_path):
    name, reference, noise = family
    target = architectures.projections(name)[0]
    model = faulty(name, target, fault, dtype=torch.bfloat16)
    result = ls.compare(reference, recorded(tmp_path / "run", name, model), noise=noise)
    assert result.first_divergence is not None
    assert result.first_divergence.name == target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_healthy_port_has_no_divergence(family, dtype, attention, tmp_path):
    name, reference, noise = family
    model = architectures.make(name, dtype=dtype, attention=attention)
    result = ls.compare(reference, recorded(tmp_path / "run", name, model), noise=noise)
    assert (str(result.verdict), result.first_divergence) == ("noise", None), result.verdict.because


@pytest.mark.parametrize("noisy", [True, False], ids=["with a noise run", "without one"])
def test_another_attention_kernel_is_no_divergence(family, noisy, tmp_path):
    name, reference, noise = family
    model = architectures.make(name, attention="sdpa")
    result = ls.compare(reference, recorded(tmp_path / "run", name, model), noise=noise if noisy else ())
    assert str(result.verdict) == ("same" if name == "mamba" else "noise")
    assert result.first_divergence is None


def test_a_run_compared_with_itself_is_exactly_zero(family):
    _, reference, noise = family
    result = ls.compare(reference, reference, noise=noise)
    assert str(result.verdict) == "same"
    assert {row.kind for row in result.rows} == {"same"}
    assert all(row.metrics.max_abs == 0 and row.metrics.relative_l2 == 0 for row in result.rows if row.metrics.count)


def test_a_healthy_half_precision_run_is_healthy_without_a_noise_run_too(family, tmp_path):
    name, reference, noise = family
    fp16 = recorded(tmp_path / "fp16", name, architectures.make(name, dtype=torch.float16))
    result = ls.compare(reference, noise, fp16)
    assert [str(against.verdict) for against in result] == ["noise", "noise"], [a.verdict.because for a in result]
    assert all("an estimate" in against.basis for against in result)


def test_with_inputs_recorded_two_faults_are_both_found(tmp_path):
    both = ["**:input", "**:output"]
    reference = recorded(tmp_path / "fp32", "llama", architectures.make("llama"), both)
    noise = recorded(tmp_path / "bf16", "llama", architectures.make("llama", dtype=torch.bfloat16), both)
    model = architectures.make("llama")
    first, second = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
    with torch.no_grad():
        for target in (first, second):
            model.get_submodule(target).weight.mul_(1.05)
    result = ls.compare(reference, recorded(tmp_path / "faulty", "llama", model, both), noise=noise)
    assert [row.name for row in result.rows if row.kind == "root"] == [first, second]
    assert "its input agrees" in result.first_divergence.because


def test_the_glue_between_modules_is_blamed_by_the_input_it_spoils(tmp_path):
    """The residual sum is made in no module's own output: the next module's input shows it first."""
    both = ["**:input", "**:output"]
    reference = recorded(tmp_path / "fp32", "llama", architectures.make("llama"), both)
    model = architectures.make("llama")
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_pre_hook(lambda module, args: (args[0] * 1.2,), prepend=True)
    result = ls.compare(reference, recorded(tmp_path / "faulty", "llama", model, both))
    assert str(result.first_divergence.point).startswith("model.layers.1.post_attention_layernorm:input")


def test_a_wrong_gradient_is_found_where_it_is_made(tmp_path):
    def run(folder, spoilt):
        model = architectures.make("llama")
        if spoilt:
            target = model.model.layers[1].mlp.down_proj
            target.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 1.3,))
        with ls.record(model, ["**:output", "**:grad_output", "**:grad_input"], to=folder, keep="tensor") as rec:
            model(**architectures.inputs("llama")).logits.square().mean().backward()
        return rec.run.address

    healthy, spoilt = run(tmp_path / "a", spoilt=False), run(tmp_path / "b", spoilt=True)
    assert str(ls.compare(healthy, run(tmp_path / "c", spoilt=False)).verdict) == "same"
    result = ls.compare(healthy, spoilt)
    assert result.first_divergence.point.side.startswith("grad")
    assert result.first_divergence.name == "model.layers.1.mlp.down_proj"


def test_a_neuron_dump_and_a_native_run_of_the_same_model_align(tmp_path):
    name = "llama"
    native = recorded(tmp_path / "native", name, architectures.make(name), ["model.layers.*", "model.embed_tokens"])
    ls.convert(native, tmp_path / "neuron", layout="neuron")
    result = ls.compare(native, tmp_path / "neuron")
    assert str(result.verdict) == "same"
    assert [row.method for row in result.rows] == ["normalised"] * 4
