"""Compile a model with taps in its graph.

scripted = compile(model, example_inputs, backend="torchscript", record_layer_outputs=True)
scripted(**inputs)
get_layer_hidden_states()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch

from layerscope.compile_taps.backends import Backend, Made, named
from layerscope.compile_taps.compiled_model import PRECISE, Compiled, SourceModel, weights_of
from layerscope.compile_taps.computed_numbers import checked, is_computed
from layerscope.compile_taps.survey import Survey, surveyed
from layerscope.compile_taps.tap_table import TapTable
from layerscope.compile_taps.tapped_model import Tapped, flattened
from layerscope.compile_taps.value_forms import opaque_parts, rebuilt, tensors_of
from layerscope.errors import LayerscopeError, Unsupported
from layerscope.log import log
from layerscope.patterns import Pattern
from layerscope.runtimes.observer_effect import NO_TAPS, SKIPPED, ObserverEffect, measures
from layerscope.runtimes.snapshot import restored

_ROUNDING = ("inductor", "aoti")


def compile(
    model: torch.nn.Module,
    example_inputs: object,
    *,
    backend: str | Callable[..., Any] = "inductor",
    record_layer_outputs: bool | str | Pattern | Iterable[int | str | Pattern] | None = None,
    dynamic: bool = True,
    precision_faithful: bool = False,
    observer: Literal["measure", "skip"] = "measure",
) -> Compiled:
    """Compile a model so that what its layers compute is among the outputs of the graph; the model is left as it is.

    `example_inputs` is a tuple (positional) or a dict (keyword arguments). `backend` is "torchscript", "inductor",
    "export", "aoti", "onnx", "neuron", torch.jit.trace, torch.compile, or a function (module, example_inputs) ->
    compiled. `record_layer_outputs` is True (the embedding, every decoder layer, the logits), the numbers of layers,
    patterns, or False; left out, the model's own `neuron_config` is asked, and True where it says nothing.

    `dynamic` leaves sizes free where the compiler can. The first call also runs the untapped graph once, to see what
    the taps change (`observer_effect`); `observer="skip"` does not. `precision_faithful` has Inductor round where the
    source does, so that the taps change nothing: slower, and to other bits than the plain compiled model's.
    """
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise Unsupported(
            f"a {type(model).__name__} cannot be compiled with taps; give the torch.nn.Module it was made from. "
            "A TorchScript module, an exported program or an .onnx file goes to record() as it is."
        )
    measure, chosen = measures(observer), named(backend)
    if precision_faithful and chosen.NAME not in _ROUNDING:
        raise Unsupported(
            f"precision_faithful=True is a setting of Inductor, and {chosen.NAME} has none like it; leave it out, or "
            f"compile with backend={' or '.join(map(repr, _ROUNDING))}."
        )
    record = _configured(model) if record_layer_outputs is None else record_layer_outputs
    survey = surveyed(model, example_inputs, record=record)
    if not chosen.LIVE:
        survey = _returnable(survey, model, chosen.NAME)
    made = _compiled(chosen, model, survey.tapped, survey, dynamic=dynamic, precise=precision_faithful)

    def untapped() -> Callable[..., Any]:
        plain = _compiled(chosen, model, Tapped(model, ()), survey, dynamic=dynamic, precise=precision_faithful)
        return _plainly(chosen, plain.artefact, survey)

    left_out = [] if chosen.LIVE else _left_out(survey.table)
    for each in (*made.notes, *left_out):
        log.warning("%s", each)
    unmeasured = _unmeasured(measure, survey) or made.effect
    return Compiled(
        chosen,
        made.artefact,
        survey.table.noting(*made.notes, *left_out, *([PRECISE] if precision_faithful else ())),
        classes=survey.classes,
        source=SourceModel(model, untapped, None if chosen.LIVE or unmeasured else weights_of(model)),
        observer_effect=unmeasured,
    )


def _compiled(
    backend: Backend, model: torch.nn.Module, tapped: Tapped, survey: Survey, *, dynamic: bool, precise: bool
) -> Made:
    output = survey.table.output
    if not backend.LIVE and is_computed(output):  # a tracer may have tensors where eager has numbers
        tapped.register_forward_hook(lambda *seen: (tensors_of(output, seen[-1][0]), seen[-1][1]))
    flat = flattened(tapped, survey.table.arguments)
    try:
        with restored(model):
            return backend.compile(flat, survey.example, dynamic=dynamic, precise=precise)
    except LayerscopeError:
        raise
    except Exception as error:
        raise Unsupported(
            f"{backend.NAME} cannot compile {type(model).__name__}, which runs as it is: {_root(error)} Try another "
            "backend, dynamic=False, or record the model uncompiled."
        ) from error


def _root(error: BaseException) -> str:
    """Return the first line of what was wrong at the bottom of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}."


def _plainly(backend: Backend, artefact: Any, survey: Survey) -> Callable[..., Any]:
    """Return what calls an untapped artefact as the model is called."""
    if backend.LIVE:
        return lambda *args, **kwargs: artefact(*args, **kwargs)[0]

    def call(*args: Any, **kwargs: Any) -> Any:
        made = backend.call(artefact, survey.table.arguments.tensors(args, kwargs))
        return rebuilt(survey.table.output, made, survey.classes)

    return call


def _returnable(survey: Survey, model: torch.nn.Module, backend: str) -> Survey:
    """Return what is known with an output that a graph of tensors can give; refuse where nothing is left of it."""
    table = survey.table
    if "opaque" in table.output:
        raise Unsupported(
            f"{type(model).__name__} returns a {table.output['opaque']}, which cannot be made again from the tensors "
            f"that {backend} gives; have it return tensors in tuples, lists, dicts, named tuples or dataclasses, or "
            "compile with backend='inductor'."
        )
    output = checked(model, table.arguments, survey.example, table.output)
    return survey._replace(table=replace(table, output=output))


def _left_out(table: TapTable) -> list[str]:
    kinds = dict.fromkeys(opaque_parts(table.output))
    return [f"the model returns a {kind}, which a compiled graph cannot: it is left out" for kind in kinds]


def _unmeasured(measure: bool, survey: Survey) -> ObserverEffect | None:
    if not survey.table.taps:
        return NO_TAPS
    return None if measure else SKIPPED


def _configured(model: torch.nn.Module) -> bool:
    """Return what the configuration of NxD Inference says, where the model has one; else True."""
    holders = (model, getattr(model, "config", None))
    configs = [config for holder in holders if (config := getattr(holder, "neuron_config", None)) is not None]
    said = [config.record_layer_outputs for config in configs if hasattr(config, "record_layer_outputs")]
    return bool(said[0]) if said else True
