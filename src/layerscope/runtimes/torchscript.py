"""Watch a TorchScript module, traced or scripted, from its file alone.

    loaded = torch.jit.load("model.pt")
    with watch(loaded, {"layers.3": {"output"}}, sink):
        loaded(x)

The graphs of a copy that shares the weights are edited around each call of a submodule, and while the block lasts the
module's methods are the copy's. The module's own graphs, and its file, are not touched. A frozen module has no
submodules left: there, the operations are the points, under the names that their values kept.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from layerscope.errors import Unsupported
from layerscope.patterns import Place
from layerscope.points import Point, Side
from layerscope.runtimes import script_graphs as graphs
from layerscope.runtimes.archives.scripts import ENGINES, INTERPRETER
from layerscope.runtimes.archives.scripts import NAME as NAME
from layerscope.runtimes.forwards import Forwards, Redirected, RunningModule
from layerscope.runtimes.runtime import Wanted, Weights, no_notes, refuse_gradients
from layerscope.runtimes.script_graphs import Value
from layerscope.runtimes.sink import RuntimeSink

Script = Any  # a torch.jit.ScriptModule; its typed face is that of an nn.Module, its real one is not

notes = no_notes
_DEAD = "it returns None: tracing leaves out what nothing uses (a dead output), and a script may return nothing"


def points(model: Script) -> list[Place]:
    """Return the modules, with the class each was made from; of a frozen module, the values of its operations too."""
    modules = [Place(name, (module.original_name,)) for name, module in model.named_modules()]
    return modules + [Place(value.name, (value.op,)) for value in _frozen_values(model)]


def remark(model: Script) -> str:
    """Say that a frozen module's layers are gone, or that an engine's cannot be seen."""
    if engine := _engine(model):
        return f"It {engine}: nothing inside can be recorded, only its inputs and outputs."
    if not _frozen_values(model):
        return ""
    return (
        "Its layers were put into one graph by torch.jit.freeze, so its operations are the points, under the names "
        "that their values kept; for the layers, record the module before it is frozen, or compile it with "
        "layerscope.compile(..., record_layer_outputs=True)."
    )


def shared(model: Script) -> dict[str, str]:
    """Map a module without code to the one that has it on the same weights: tracing keeps one name of the two."""
    first: dict[tuple[int, ...], str] = {}
    other: dict[str, str] = {}
    for name, module in model.named_modules():
        own = tuple(tensor.data_ptr() for _, tensor in module.named_parameters(recurse=False))
        if own and module._c._method_names():
            first.setdefault(own, name)
        elif own in first:
            other[name] = first[own]
    return other


def parameters(model: Script) -> list[torch.Tensor]:
    """Return the parameters; a frozen module's are constants, and not among them."""
    return list(model.parameters())


def weights(model: Script) -> Weights:
    """Return each module's own parameters and buffers."""
    own = {name: _own(module) for name, module in model.named_modules()}
    return {name: tensors for name, tensors in own.items() if tensors}


def check(model: Script, wanted: Wanted, *, ops: bool) -> None:
    """Refuse gradients, and the inside of an engine."""
    refuse_gradients(wanted, INTERPRETER)
    if (ops or any(wanted)) and (engine := _engine(model)):
        raise Unsupported(
            f"this TorchScript module {engine}; compile it again with layerscope.compile(..., "
            "record_layer_outputs=True), which makes the layers outputs of it."
        )


@contextmanager
def watch(
    model: Script, wanted: Wanted, sink: RuntimeSink, *, ops: Callable[[str], str | None] | None = None
) -> Iterator[Script]:
    """Tell `sink` what passes the wanted sides of the wanted modules until the block ends."""
    forwards = Forwards(sink)
    copied = _copy(model)
    _ScriptTaps(forwards, copied, wanted, ops).add()
    assigned = _assigned(model, copied)
    before = {method: model.__dict__.get(method) for method in copied._c._method_names()}
    redirected = {
        method: Redirected(
            _recorded(forwards, model, copied, method, wanted.get("", ()) if method == "forward" else (), assigned),
            instead_of=own,
        )
        for method, own in before.items()
    }
    model.__dict__.update(redirected)
    try:
        yield model
    finally:
        for method, own in before.items():
            del model.__dict__[method]
            if own is not None:
                model.__dict__[method] = own


def why_silent(model: Script, names: Iterable[str]) -> dict[str, str]:
    """Say why each of these modules was never seen to run, from what the code does with it."""
    modules = dict(model.named_modules())
    users = _users(model)
    return {name: _why_silent(modules.get(name), users.get(name)) for name in names}


def _why_silent(module: Script | None, user: str | None) -> str:
    if user is not None:
        return f"called functionally: {user or 'the model'} uses its weights without calling it"
    if module is not None and not any(map(graphs.is_call, module._c._method_names())):
        return "not in the code: tracing met no call of it, or nothing used what it returned (a dead output)"
    return "never called: no branch that calls it ran"


class _ScriptTaps:
    """Puts the probes that are wanted into the graphs of a module; modules of one type share their graphs.

    A graph knows its submodules by their attributes only, so the full name of a module is put together while it runs.
    """

    def __init__(
        self, forwards: Forwards, model: Script, wanted: Wanted, ops: Callable[[str], str | None] | None
    ) -> None:
        self.forwards = forwards
        self.model = model
        self.wanted = wanted
        self.ops = ops

    def add(self) -> None:
        """Go through every graph once."""
        modules = dict(self.model.named_modules())
        names: dict[str, list[str]] = {}
        for name, module in modules.items():
            names.setdefault(str(module._c._type()), []).append(name)
        for same in names.values():
            for graph in _graphs(modules[same[0]]):
                for node in list(graphs.nodes_of(graph)):
                    if node.kind() == "prim::CallMethod":
                        self._around_call(graph, node, same)
                    elif self.ops is not None:
                        self._around_op(graph, node)
        for value in _frozen_values(self.model):
            if value.name in self.wanted:
                self._around(_graphs(self.model)[0], value.node, value.name, self.wanted[value.name], op=False)

    def _around_call(self, graph: Any, node: Any, names: list[str]) -> None:
        module, *args = node.inputs()
        path, called = graphs.attribute_path(module, graph), graphs.is_call(node.s("name"))
        if path is None or not (path or called):
            return
        reached = [_joined(name, path) for name in names]
        if self.ops is None and not any(_leads(name, wanted) for name in reached for wanted in self.wanted):
            return
        sides = {side for name in reached for side in self.wanted.get(name, ()) if called}
        mixed = graphs.is_traced(node) and node.output().type().kind() == "TupleType"
        enter, leave = partial(self._enter, path, called), partial(self._leave, called, mixed)
        self._probe(graph, node, leave, node.output() if "output" in sides else None, after=True)
        self._probe(graph, node, enter, args if "input" in sides or mixed else None, after=False)

    def _around_op(self, graph: Any, node: Any) -> None:
        qualified = graphs.qualified_name(node)
        name = self.ops(qualified) if qualified is not None and self.ops is not None else None
        if name is not None:
            self._around(graph, node, name, ("input", "output"), op=True)

    def _around(self, graph: Any, node: Any, name: str, sides: Collection[Side], *, op: bool) -> None:
        before, after = (partial(self._end, name, op, side) for side in ("input", "output"))
        self._probe(graph, node, after, list(node.outputs()) if "output" in sides else None, after=True)
        self._probe(graph, node, before, graphs.tensors_of(node) if "input" in sides else None, after=False)

    def _probe(
        self, graph: Any, node: Any, probe: Callable[[Any], None], value: Sequence[Any] | Any, *, after: bool
    ) -> None:
        graphs.add_probe(graph, node, self.forwards.number, self.forwards.probe(probe), value, after=after)

    # While the model runs -----------------------------------------------------------------------

    def _enter(self, path: str, called: bool, args: Any) -> None:
        forwards = self.forwards
        name = _joined(forwards.within[-1].name, path)
        number = forwards.step.call(name) if called and forwards.step is not None else 0
        forwards.within.append(RunningModule(name, number, args or ()))
        if called and "input" in self.wanted.get(name, ()):
            forwards.tell(name, "input", args, call=number)

    def _leave(self, called: bool, mixed: bool, value: Any) -> None:
        name, number, given = self.forwards.within.pop()
        if mixed and value is not None:
            value = _without(given, value)
        if called and "output" in self.wanted.get(name, ()):
            if value is None:
                self.forwards.sink.empty(Point(name), because=_DEAD)
            else:
                self.forwards.tell(name, "output", value, call=number)

    def _end(self, name: str, op: bool, side: Side, values: Any) -> None:
        forwards = self.forwards
        value = values[0] if side == "output" and values is not None and len(values) == 1 else values
        within = forwards.within[-1].name if op else None
        forwards.tell_end((name, op), name, side, values is not None, within, value)


def _without(given: tuple[object, ...], value: tuple[object, ...]) -> object:
    """Take out of what a traced module gives back its own inputs, which others use; the source never returned them."""
    own = tuple(each for each in value if not any(each is other for other in given)) or value
    return own[0] if len(own) == 1 else own


def _recorded(
    forwards: Forwards,
    model: Script,
    copied: Script,
    method: str,
    root: Collection[Side],
    assigned: list[tuple[Any, Any, str]],
) -> Callable[..., Any]:
    plain, tapped = model._c._get_method(method), copied._c._get_method(method)

    def run(*args: Any, **kwargs: Any) -> Any:
        value = tapped(*args, **kwargs)
        for own, theirs, attribute in assigned:
            own.setattr(attribute, theirs.getattr(attribute))
        return value

    return lambda *args, **kwargs: forwards.run(run, plain, root, args, kwargs)


def _copy(model: Script) -> Script:
    """Return a module of the same code that has not run yet, on the same weights.

    Code that has run is kept compiled, and would go on as it was whatever is put into its graph.
    """
    with graphs.quiet_jit():
        copied = torch.jit.load(io.BytesIO(model.save_to_buffer()))  # type: ignore[no-untyped-call]
    for mine, theirs in zip(copied.modules(), model.modules(), strict=True):
        for name, tensor in _own(theirs):
            mine._c.setattr(name, tensor)
    return copied


def _assigned(model: Script, copied: Script) -> list[tuple[Any, Any, str]]:
    """Find the attributes that the code assigns: what a run of the copy makes of them belongs to the module."""
    found = []
    own, theirs = dict(model.named_modules()), dict(copied.named_modules())
    for name, module in theirs.items():
        for graph in _graphs(module):
            for node in graphs.nodes_of(graph):
                path = graphs.attribute_path(next(node.inputs()), graph) if node.kind() == "prim::SetAttr" else None
                if path is not None:
                    at = _joined(name, path)
                    found.append((own[at]._c, theirs[at]._c, node.s("name")))
    return found


def _users(model: Script) -> dict[str, str]:
    """Find the modules whose weights another one's code reads, and whose code that is."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for graph in _graphs(module):
            for node in graphs.nodes_of(graph):
                if node.kind() == "prim::GetAttr" and str(node.output().type()) == "Tensor":
                    path = graphs.attribute_path(next(node.inputs()), graph)
                    if path:
                        found.setdefault(_joined(name, path), name)
    return found


def _frozen_values(model: Script) -> list[Value]:
    """List the values of a module that `torch.jit.freeze` has made one graph of: no submodules, constant weights."""
    if any(True for _ in model.children()) or any(True for _ in model.parameters()) or not _graphs(model):
        return []
    return graphs.values_of(model._c._get_method("forward").graph)


def _graphs(module: Script) -> list[Any]:
    return [module._c._get_method(method).graph for method in module._c._method_names()]


def _engine(model: Script) -> str:
    """Say which engine the module hands its inputs to; nothing where there is none."""
    kinds = {node.kind() for module in model.modules() for graph in _graphs(module) for node in graphs.nodes_of(graph)}
    engine = next((kind for kind in sorted(kinds) if kind.split("::")[0] in ENGINES), None)
    if engine is None:
        return ""
    return f"hands its inputs to {ENGINES[engine.split('::')[0]]} ({engine}), machine code without layers"


def _own(module: Script) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name and path else name or path


def _leads(name: str, wanted: str) -> bool:
    """Tell whether a wanted module is `name`, or inside it."""
    return name == wanted or not name or wanted.startswith(f"{name}.")
