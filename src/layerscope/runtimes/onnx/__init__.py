"""Watch an .onnx file in ONNX Runtime.

    model = OnnxModel.read("model.onnx")
    with watch(model, {"layers.3": {"output"}}, sink) as call:
        call(x)

The session runs a copy of the graph, in memory, with the values that are wanted among its outputs; their modules are
those the exporter wrote down (`graph.py`). The file is not touched; ONNX Runtime alone reads its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from layerscope.errors import BadModel
from layerscope.patterns import Place
from layerscope.points import Side
from layerscope.runtimes.archives.zip_archive import MEND
from layerscope.runtimes.forwards import Forwards
from layerscope.runtimes.graph_calls import places_of
from layerscope.runtimes.model_files import damage
from layerscope.runtimes.onnx.graph import OnnxGraph
from layerscope.runtimes.onnx.scales import dequantised, grid_of
from layerscope.runtimes.onnx.session import Session, library
from layerscope.runtimes.runtime import Wanted, Weights, nothing_shared, refuse_gradients
from layerscope.runtimes.sink import RuntimeSink
from layerscope.runtimes.values import argument_leaves

__all__ = [
    "NAME",
    "OnnxModel",
    "check",
    "notes",
    "parameters",
    "points",
    "remark",
    "shared",
    "watch",
    "weights",
    "why_silent",
]

NAME = "onnx"
shared = nothing_shared

_BEGINS = b"\x08"  # the version of the format, which comes first


class OnnxModel:
    """An .onnx file, read without its weights."""

    def __init__(self, path: Path, proto: Any) -> None:
        self.path = path
        self.proto = proto

    @classmethod
    def read(cls, path: Path) -> OnnxModel:
        """Read the graph of a file; weights beside it stay there."""
        onnx = library("onnx")
        try:
            proto = onnx.load(str(path), load_external_data=False)
        except Exception as error:
            raise BadModel(f"{str(path)!r} {_why_unread(path)}.") from error
        if not proto.graph.node:
            raise BadModel(f"{str(path)!r} {_why_unread(path, 'holds no operation')}.")
        if any(isinstance(text, bytes) for text in _texts(proto.graph)):
            raise BadModel(f"{str(path)!r} {_why_unread(path, 'has names that are not UTF-8')}.")
        return cls(path, proto)

    @cached_property
    def graph(self) -> OnnxGraph:
        """What the file tells of its modules."""
        return OnnxGraph.of(self.proto)

    def session(self, outputs: Iterable[str] = ()) -> tuple[Session, dict[str, str]]:
        """Return a session of the graph that gives `outputs` after the model's own, and what the quantised are worth.

        That is under a name of its own, for each value that a scale and a zero point belong to.
        """
        onnx = library("onnx")
        copied = onnx.ModelProto()
        copied.CopyFrom(self.proto)
        worth = dequantised(copied, outputs)
        own = {each.name for each in copied.graph.output} | worth.keys()
        copied.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs if name not in own)
        return Session(self.path, copied.SerializeToString()), worth


def _texts(graph: Any) -> Iterator[Any]:
    """Give every name and note of a graph; protobuf gives one that is not UTF-8 as bytes."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        yield value.name
    for node in graph.node:
        yield from (node.op_type, node.name, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
        for told in node.metadata_props:
            yield from (told.key, told.value)


def _why_unread(path: Path, otherwise: str = "ends too early, or is damaged") -> str:
    expected = "an ONNX model as torch.onnx.export writes it"
    return damage(path, expected, begins=(_BEGINS,)) or f"{otherwise}: it is not {expected}; {MEND}"


def points(model: OnnxModel) -> list[Place]:
    """Return the modules that the file tells of, with their classes where one computed something."""
    return places_of(model.graph.kinds)


def notes(model: OnnxModel) -> dict[str, Any]:
    """Say that the graph is quantised, and where its points have their names from, if not from the exporter."""
    said = {"quantised": grid_of(model.proto.graph), "names": _TOLD_BY[model.graph.told_by]}
    return {name: value for name, value in said.items() if value}


def remark(model: OnnxModel) -> str:
    """Say where the points have their names from, if not from the exporter."""
    told_by = _TOLD_BY[model.graph.told_by]
    return f"The file has no metadata of torch.onnx.export(dynamo=True): {told_by}. {_INSTEAD}" if told_by else ""


_TOLD_BY = {
    "metadata": "",
    "names": "its modules are read from the names of its nodes",
    "order": "its points are its operations, numbered in the order they run",
}
_INSTEAD = (
    "For the modules as they are in the source, give the file that was exported with it, or compile the model again "
    "with layerscope.compile(..., record_layer_outputs=True)."
)


def parameters(model: OnnxModel) -> list[torch.Tensor]:
    """Return tensors of the shapes and types of the initializers; their values stay in the file."""
    numpy_type = library("onnx").helper.tensor_dtype_to_np_dtype
    empty = [(tuple(each.dims), numpy_type(each.data_type)) for each in model.proto.graph.initializer]
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
    return [torch.zeros((), dtype=known[str(kind)]).expand(shape) for shape, kind in empty if str(kind) in known]


def weights(model: OnnxModel) -> Weights:
    """Return nothing: the exporter folds and transposes weights, so that they are not the source's."""
    return {}


def check(model: OnnxModel, wanted: Wanted, *, ops: bool) -> None:
    """Refuse gradients."""
    refuse_gradients(wanted, "in ONNX Runtime, which computes a forward alone")


@contextmanager
def watch(
    model: OnnxModel, wanted: Wanted, sink: RuntimeSink, *, ops: Callable[[str], str | None] | None = None
) -> Iterator[Callable[..., Any]]:
    """Tell `sink` what passes the wanted sides of the wanted modules until the block ends."""
    forwards = Forwards(sink)
    taps = sorted([*_module_taps(model.graph, wanted), *_op_taps(model.graph, ops)])
    given = [each.name for each in model.proto.graph.input]
    returned = [each.name for each in model.proto.graph.output]
    asked = dict.fromkeys(value for tap in taps for value in tap.values if value not in given)
    tapped, worth = model.session(asked)
    untapped: list[Session] = []

    def plain(*args: Any, **kwargs: Any) -> Any:
        if not untapped:
            untapped.append(model.session()[0])
        return _packed(list(untapped[0].run(_named(untapped[0].inputs, args, kwargs)).values()))

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = _named(tapped.inputs, args, kwargs)
        values = {**inputs, **tapped.run(inputs)}
        values |= {value: values[name] for value, name in worth.items() if value not in returned}
        for tap in taps:
            forwards.safely(tap.tell, forwards, values)
        return _packed([values[name] for name in returned])

    yield lambda *args, **kwargs: forwards.run(run, plain, wanted.get("", ()), args, kwargs)


def why_silent(model: OnnxModel, names: Iterable[str]) -> dict[str, str]:
    """Say why each of these modules was never seen to run, from what is left of it in the graph."""
    return {name: _why_silent(model.graph, name) for name in names}


def _why_silent(graph: OnnxGraph, name: str) -> str:
    user = graph.users.get(name)
    if graph.unclear.get(name) == 0:
        return (
            "its last operations cannot be told: quantising dropped their metadata; quantise in the format QDQ, which "
            "keeps it"
        )
    if name in graph.unclear:
        return (
            f"its calls cannot be told apart: the same runs {graph.unclear[name]} times in a row, which may be as many "
            "calls or one that loops, and the file does not say; record the program of torch.export (.pt2), which "
            'does, or layerscope.compile(..., backend="onnx", record_layer_outputs=True)'
        )
    if user is not None:
        return f"called functionally: {user or 'the model'} uses its weights without calling it"
    return (
        "not in the graph: it was folded into a constant, it computes nothing (an identity), "
        "or nothing used what it returned (a dead output)"
    )


@dataclass(frozen=True, slots=True, order=True)
class _OnnxTap:
    """One side of one call of a module or an operation: when it takes place, and the values it consists of."""

    at: tuple[int, int, int]  # the node it stands at, before or after it, how deep inside
    key: tuple[str, str]  # of the call
    side: Side
    values: tuple[str, ...]
    wanted: bool = True
    within: str | None = None  # of an operation

    def tell(self, forwards: Forwards, values: Mapping[str, torch.Tensor]) -> None:
        """Tell what is wanted of the call, by the values of a run."""
        found = tuple(values[value] for value in self.values)
        value = found[0] if self.side == "output" and len(found) == 1 else found
        forwards.tell_end(self.key, self.key[0], self.side, self.wanted, self.within, value)


def _module_taps(graph: OnnxGraph, wanted: Wanted) -> Iterator[_OnnxTap]:
    for name, sides in wanted.items():
        depth = name.count(".")
        for number, call in enumerate(graph.calls.get(name, ()) if name else ()):
            key = (name, str(number))
            takes, gives = "input" in sides, "output" in sides
            yield _OnnxTap((call.first, 0, depth), key, "input", tuple(call.inputs) if takes else (), takes)
            yield _OnnxTap((call.last, 1, -depth), key, "output", tuple(call.outputs) if gives else (), gives)


def _op_taps(graph: OnnxGraph, ops: Callable[[str], str | None] | None) -> Iterator[_OnnxTap]:
    for (op, fx), (within, call) in graph.ops.items() if ops is not None else ():
        name = ops(op) if ops is not None else None
        if name is not None:
            yield _OnnxTap((call.first, 0, 1 << 20), (name, fx), "input", tuple(call.inputs), within=within)
            yield _OnnxTap((call.last, 1, -(1 << 20)), (name, fx), "output", tuple(call.outputs), within=within)


def _named(inputs: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Give positional tensors the names of the graph's inputs, in order; those by keyword have theirs."""
    positional = [tensor for _, tensor in argument_leaves(args, {})]
    named = {name: value for name, value in kwargs.items() if value is not None}
    free = [name for name in inputs if name not in named]
    unknown = [name for name in named if name not in inputs]
    if unknown or len(positional) != len(free):
        raise TypeError(
            f"the ONNX graph takes {', '.join(inputs)}; given were {len(positional)} tensors by position"
            f"{' and ' + ', '.join(named) if named else ''}."
        )
    return {**dict(zip(free, positional, strict=True)), **named}


def _packed(values: list[torch.Tensor]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
