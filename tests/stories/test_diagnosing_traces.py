"""A diagnosis runs two models many times with their insides replaced, and leaves neither changed, whatever happens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import architectures
import layerscope as ls
import planted
from layerscope.errors import BadModel
from planted import Case

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
FAULTS = (
    "scaled-1.05-weights",
    "saturated-input",
    "grid-int4-forward",
    "attention-scale-subclass",
    "residual-missing",
    "swapped-modules",
    "nan-output",
    "dropout-module",
    "gradient-hook",
)


def bits(tensor):
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def state(model):
    """Everything a diagnosis could have changed of a model, as plain values."""
    kept = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kept[name] = {
            "class": type(module),
            "attributes": sorted(vars(module)),
            "values": {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)},
            "training": module.training,
            "forward": getattr(vars(module).get("forward"), "__func__", None),
            "children": [(k, id(v)) for k, v in module.named_children()],
            "hooks": [(kind, list(getattr(module, kind).items())) for kind in HOOKS],
            "parameters": [
                (k, id(p), p.data_ptr(), p.requires_grad, bits(p), id(p.grad), bits(p.grad))
                for k, p in module.named_parameters(recurse=False)
            ],
            "buffers": [(k, id(b), bits(b)) for k, b in module.named_buffers(recurse=False)],
        }
    return kept


def surroundings():
    return {
        "torch": torch.random.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "global hooks": [len(getattr(nn.modules.module, f"_global_{kind}_hooks")) for kind in ("forward", "backward")],
    }


def assert_untouched(reference, candidate, inputs, *, raises=None, **how):
    before = state(reference), state(candidate), surroundings()
    if raises is None:
        ls.diagnose(reference, candidate, inputs, **how)
    else:
        with pytest.raises(raises):
            ls.diagnose(reference, candidate, inputs, **how)
    after = state(reference), state(candidate), surroundings()
    assert after == before


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", architectures.EVERY)
def test_a_healthy_pair_is_left_as_it_was(model, dtype, backward):
    candidate = architectures.make(model, dtype=planted.DTYPES[dtype])
    assert_untouched(architectures.make(model), candidate, architectures.inputs(model), backward=backward)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_candidate_is_left_as_it_was_with_its_fault(fault):
    candidate, _ = planted.planted(Case("llama", "bf16", fault))
    backward = planted.BY_NAME[fault].backward
    assert_untouched(architectures.make("llama"), candidate, architectures.inputs("llama"), backward=backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_models_in_the_middle_of_training_are_left_there(backward):
    """Dropout on, BatchNorm with a history, gradients of the last step, frozen parameters."""
    pair = []
    for _ in range(2):
        model = architectures.make("convnet").train()
        model(**architectures.inputs("convnet")).sum().backward()
        model.stem.requires_grad_(False)
        model.blocks[0].eval()
        pair.append(model)
    assert all(p.grad is not None for p in pair[0].parameters())
    assert_untouched(*pair, architectures.inputs("convnet"), backward=backward)


def fails(error):
    def hook(*args):
        raise error

    return hook


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError("no kernel"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_reference_that_raises_is_told_about_and_both_are_left_as_they_were(error, backward):
    reference = architectures.make("llama")
    reference.model.layers[1].mlp.register_forward_hook(fails(error))
    raised = BadModel if isinstance(error, Exception) else KeyboardInterrupt
    assert_untouched(
        reference, architectures.make("llama"), architectures.inputs("llama"), raises=raised, backward=backward
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_candidate_that_raises_leaves_both_as_they_were(backward):
    candidate = architectures.make("llama")
    candidate.model.layers[1].mlp.register_forward_hook(fails(RuntimeError("no kernel")))
    assert_untouched(architectures.make("llama"), candidate, architectures.inputs("llama"), backward=backward)


def test_an_interrupt_in_the_candidate_passes_through_and_leaves_both_as_they_were():
    candidate = architectures.make("llama")
    candidate.model.layers[1].mlp.register_forward_hook(fails(KeyboardInterrupt()))
    assert_untouched(architectures.make("llama"), candidate, architectures.inputs("llama"), raises=KeyboardInterrupt)


def test_a_gradient_that_raises_leaves_both_as_they_were():
    candidate = architectures.make("llama")
    candidate.model.layers[1].mlp.register_full_backward_hook(fails(RuntimeError("no kernel")))
    assert_untouched(architectures.make("llama"), candidate, architectures.inputs("llama"), backward=True)


def test_a_cache_in_the_inputs_is_as_long_as_before():
    tokens = architectures.inputs("llama")["input_ids"]
    model = architectures.make("llama")
    with torch.no_grad():
        cache = model(tokens[:, :10], past_key_values=transformers.DynamicCache(config=model.config)).past_key_values
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    candidate = architectures.make("llama")
    with torch.no_grad():
        candidate.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    inputs = {"input_ids": tokens[:, 10:14], "past_key_values": cache}
    assert ls.diagnose(model, architectures.make("llama"), inputs).root is None
    assert ls.diagnose(model, candidate, inputs).root == "model.layers.1.mlp.up_proj"
    assert cache.get_seq_length() == 10
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


# Inputs -----------------------------------------------------------------------------------------


class Scaling(nn.Module):
    """Changes its input in place, as some models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x, shift=None):
        x.mul_(2)
        return self.two(torch.relu(self.one(x))) + (0 if shift is None else shift)


@pytest.mark.parametrize(
    "inputs",
    [torch.randn(3, 8), (torch.randn(3, 8),), (torch.randn(3, 8), torch.ones(8)), {"x": torch.randn(3, 8)}],
    ids=["one tensor", "one argument", "arguments", "keywords"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_inputs_come_in_three_forms_are_cast_and_are_untouched(inputs, dtype):
    tensors = (
        [inputs] if isinstance(inputs, torch.Tensor) else list(inputs.values() if isinstance(inputs, dict) else inputs)
    )
    before = [bits(tensor) for tensor in tensors]
    candidate = Scaling()
    with torch.no_grad():
        candidate.two.weight.mul_(1.05)
    assert ls.diagnose(Scaling(), Scaling().to(dtype), inputs).root is None
    assert ls.diagnose(Scaling(), candidate.to(dtype), inputs).root == "two"
    assert [bits(tensor) for tensor in tensors] == before
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in tensors)
