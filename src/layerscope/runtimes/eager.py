"""Watch a plain PyTorch model through hooks that leave no trace.

    with watch(model, {"layers.3": {"input", "output"}}, sink):
        model(x)

The hooks return None, hold no state on the user's modules, stay silent in deep copies and forked children, and turn
into nothing when the model is pickled. Gradients are seen through hooks on the autograd graph rather than through
`register_full_backward_hook`, which passes tensors through an identity that forbids in-place operations.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr as _next_node
from torch.autograd.graph import Node, get_gradient_edge
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from layerscope.errors import Unsupported
from layerscope.patterns import Place
from layerscope.points import Leaf, Moment, Point, Side, unwrapped
from layerscope.runtimes.calls import Call, Local
from layerscope.runtimes.ops import OpWatch
from layerscope.runtimes.runtime import Wanted, Weights
from layerscope.runtimes.sink import Sink, Step
from layerscope.runtimes.values import argument_leaves, describe, leaves

__all__ = [
    "NAME",
    "Modules",
    "check",
    "compiled_parts",
    "is_compiled",
    "modules_of",
    "notes",
    "parameters",
    "points",
    "remark",
    "shared",
    "watch",
    "weights",
    "why_silent",
]

NAME = "eager"

# What a hook of ours becomes in a deep copy or a pickle: a call that takes anything and returns None, from the
# standard library, so that a checkpoint saved while recording loads where layerscope is not installed.
_SILENT = nullcontext().__exit__

# The model as it was given, where that is a wrapper and its name belongs to what it wraps.
_WRAPPER = "<wrapper>"

_tracing_state = torch._C._get_tracing_state
_graph_task = torch._C._current_graph_task_id
_GRADED: frozenset[Side] = frozenset(("grad_input", "grad_output"))
_NOWHERE = Step(Moment())  # where a repeated call belongs that nobody follows
_REGIONS = 1 << 14  # checkpointed regions that may wait for their backward pass


class Modules(NamedTuple):
    """The modules of a model by their unwrapped names, and the other names of shared ones."""

    by_name: dict[str, torch.nn.Module]
    shared: dict[str, str]


def modules_of(model: torch.nn.Module) -> Modules:
    """List a model's modules under names that wrappers have not touched.

    A wrapper and what it wraps end up with one name, which is then the wrapped module's. A module found again under
    another name is the same module: it keeps its first name, and the other one is listed in `shared`.
    """
    by_name: dict[str, torch.nn.Module] = {}
    shared: dict[str, str] = {}
    first_name: dict[int, str] = {}

    def walk(module: torch.nn.Module, raw: str, above: frozenset[int]) -> None:
        name = unwrapped(raw)
        known = first_name.get(id(module))
        if known is not None and known != name:
            shared[name] = known
        else:
            first_name[id(module)] = name
            by_name[name] = module
        if id(module) in above:  # a module that contains itself
            return
        for key, child in module._modules.items():
            if child is not None:
                walk(child, f"{raw}.{key}" if raw else key, above | {id(module)})

    walk(model, "", frozenset())
    return Modules(by_name, shared)


def points(model: torch.nn.Module) -> list[Place]:
    """Return the places of a model, shared modules under each of their names."""
    by_name, shared = modules_of(model)
    named = [*by_name.items(), *((other, by_name[first]) for other, first in shared.items())]
    return [Place(name, tuple(c.__name__ for c in type(module).__mro__[:-1])) for name, module in named]


def notes(model: torch.nn.Module) -> dict[str, Any]:
    """Return nothing: looking changes nothing here."""
    return {}


def remark(model: torch.nn.Module) -> str:
    """Return nothing: the points are the modules."""
    return ""


def shared(model: torch.nn.Module) -> dict[str, str]:
    """Map the other names of shared modules to their first."""
    return modules_of(model).shared


def parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters that have values by now."""
    return [parameter for parameter in model.parameters() if not is_lazy(parameter)]


def weights(model: torch.nn.Module) -> Weights:
    """Return each module's own parameters and buffers; those of lazy modules may have no values yet."""
    own = {
        name: [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, module in modules_of(model).by_name.items()
    }
    return {name: tensors for name, tensors in own.items() if tensors}


def check(model: torch.nn.Module, wanted: Wanted, *, ops: bool) -> None:
    """Refuse to watch operations beside compiled modules."""
    compiled = compiled_parts(model) if ops else []
    if compiled:
        raise Unsupported(
            f"operations cannot be watched beside compiled modules ({', '.join(compiled[:3])}): the watch keeps "
            "torch.compile from running them; record the model before it is compiled."
        )


@contextmanager
def watch(
    model: torch.nn.Module,
    wanted: Wanted,
    sink: Sink,
    *,
    ops: Callable[[str], str | None] | None = None,
) -> Iterator[torch.nn.Module]:
    """Tell `sink` what passes the wanted sides of the wanted modules until the block ends.

    `ops` maps an operation's qualified name to the name to record it under, or None to let it pass. Operations are
    watched on the thread that enters the block, inside the model's forward.
    """
    by_name, _ = modules_of(model)
    watcher = _Watcher(sink)
    places = {name: frozenset(sides) for name, sides in wanted.items()}
    # An operation is placed by the innermost module under way, a forward begins with the outermost.
    company = list(by_name) if ops is not None else [above for name in wanted for above in _above(name)]
    places |= {name: frozenset() for name in company if name in by_name and name not in places}
    root = next((name for name, module in by_name.items() if module is model), None)
    with ExitStack() as stack:
        stack.callback(watcher.close)
        if root is None:  # the model itself is a wrapper, and carries no name of its own
            _attach(stack, watcher, model, _WRAPPER, frozenset())
        else:
            places.setdefault(root, frozenset())
        for name, sides in places.items():
            _attach(stack, watcher, by_name[name], name, sides)
        if ops is not None:
            stack.enter_context(OpWatch(ops, watcher.local, sink))
        yield model


def compiled_parts(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile runs: hooks inside them do not fire."""
    return [name or "." for name, module in modules_of(model).by_name.items() if is_compiled(module)]


def is_compiled(module: torch.nn.Module | None) -> bool:
    """Tell whether torch.compile runs this module: hooks that come later do not fire inside it."""
    return bool(getattr(module, "_compiled_call_impl", None)) or type(module).__module__.startswith("torch._dynamo")


def why_silent(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Say why each of these modules never ran, as far as the model's structure tells."""
    by_name = modules_of(model).by_name
    return {name: _why_silent(by_name, name, model) for name in names}


def _why_silent(by_name: Mapping[str, torch.nn.Module], name: str, model: torch.nn.Module) -> str:
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        above = by_name.get(".".join(parts[:depth]))
        if above is not model and is_compiled(above):
            return "compiled before the tap: hooks do not fire inside a compiled module"
    parent = by_name.get(".".join(parts[:-1]))
    if isinstance(parent, torch.nn.MultiheadAttention) and parts[-1] == "out_proj":
        return "called functionally: MultiheadAttention uses out_proj's weights without calling it"
    if isinstance(by_name[name], (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)):
        return f"never called: a {type(by_name[name]).__name__} only holds other modules"
    return "never called"


class _Watcher:
    """The state that all hooks of one `watch` share."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.local = Local()
        self.live = True
        self.regions: dict[tuple[str, int], list[tuple[Step, int]]] = {}
        _at_fork()
        _WATCHERS.add(self)

    def close(self) -> None:
        self.live = False

    def enter(self, hook: _Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, local = hook.name, self.local
        repeated = _graph_task() >= 0
        follow = hook.graded and torch.is_grad_enabled()
        if repeated:
            origin = self._repeats(name) if hook.graded else None
            step, number = origin or (_NOWHERE, 0)
            follow = follow and origin is not None
        else:
            outer = local.innermost()
            step = outer.step if outer is not None else self.sink.begin()
            number = step.call(name)
            if hook.graded and not follow:
                self._may_repeat(name, step, number)
        call = Call(name, step, number, repeated, follow, sys.exc_info()[1], sys._getframe(2))
        local.calls.append(call)
        if step.idle:
            return
        sides = hook.sides
        if follow:
            call.first_node = _next_node()
            if "grad_input" in sides:
                for leaf, tensor in argument_leaves(args, kwargs):
                    if tensor.requires_grad:
                        edge = get_gradient_edge(tensor)
                        call.sources.append((leaf, edge.node, edge.output_nr))
        if "input" in sides and not repeated:
            self._deliver(step, hook, "input", number, argument_leaves(args, kwargs), args or None)

    def exit(self, hook: _Hook, value: object) -> None:
        name, sides, local = hook.name, hook.sides, self.local
        call = local.finished(name)
        if call is None:
            return  # another hook raised before ours could see the call begin
        failed = value is None and sys.exc_info()[1] is not call.exception
        step = call.step
        if not (step.idle or failed):
            if call.repeated and sides:
                self.sink.recomputed(name)
            elif "output" in sides:
                self._deliver(step, hook, "output", call.number, leaves(value), value)
            if call.follow and "grad_output" in sides:
                self._follow_outputs(call, value)
            if call.sources:
                self._follow_inputs(call, value)
        if not local.calls and not call.repeated:
            self.sink.end(step, failed=failed)

    def _deliver(
        self, step: Step, hook: _Hook, side: Side, number: int, found: list[tuple[Leaf, torch.Tensor]], value: object
    ) -> None:
        if not found:
            self.sink.empty(Point(hook.name, side), because=f"its {side} holds no tensor: {describe(value)}")
        self.local.looking = True
        try:
            for leaf, tensor in found:
                point = hook.points.get(leaf) or hook.points.setdefault(leaf, Point(hook.name, side, leaf))
                self.sink.seen(step, point, tensor, call=number)
            if step.whole is not None:
                step.whole(step, Point(hook.name, side), value, number)
        finally:
            self.local.looking = False

    def _may_repeat(self, name: str, step: Step, number: int) -> None:
        """Remember a call made without gradients: reentrant checkpointing will repeat it with them.

        Nothing inside such a region makes a node, so autograd's next number stands still and names the region.
        """
        region = _next_node()
        calls = self.regions.get((name, region))
        if calls is None or calls[-1][0] is not step:
            if len(self.regions) >= _REGIONS:
                self.regions.pop(next(iter(self.regions)))
            self.regions[name, region] = calls = []
        calls.append((step, number))

    def _repeats(self, name: str) -> tuple[Step, int] | None:
        """Find the call that a recomputation repeats; None when its own graph already leads back to it."""
        node = torch._C._current_autograd_node()
        calls = self.regions.get((name, node._sequence_nr() + 1)) if node is not None else None
        return calls.pop(0) if calls else None

    def _follow_outputs(self, call: Call, value: object) -> None:
        for leaf, tensor in leaves(value):
            if tensor.requires_grad:
                tensor.register_hook(_Gradient(self, call, Point(call.name, "grad_output", leaf)))  # type: ignore[no-untyped-call]

    def _follow_inputs(self, call: Call, value: object) -> None:
        """Watch the edges by which this module, and no other consumer, reaches its inputs.

        A tensor hook would see the sum over every consumer: the residual stream's, say. The module's own share flows
        along the edges that its forward added, so the graph is walked from the outputs back to the inputs.
        """
        flows = {(id(node), nr): _Inflow(self, call, leaf, node) for leaf, node, nr in call.sources}
        pending: list[Node] = []
        for _, tensor in leaves(value):
            if tensor.requires_grad:
                edge = get_gradient_edge(tensor)
                passed = flows.get((id(edge.node), edge.output_nr))
                if passed is not None:  # the input itself comes out again
                    tensor.register_hook(passed.tell)  # type: ignore[no-untyped-call]
                else:
                    pending.append(edge.node)
        known: dict[int, Node] = {}
        while pending:
            node = pending.pop()
            if id(node) in known or node._sequence_nr() < call.first_node:  # made before the call: not the module's
                continue
            known[id(node)] = node
            for position, (following, nr) in enumerate(node.next_functions):
                if following is None:
                    continue
                flow = flows.get((id(following), nr))
                if flow is not None:
                    flow.expect(node, position)
                else:
                    pending.append(following)


class _Hook:
    """A hook on one module: inert in copies, pickles and forked children, and never raising."""

    def __init__(self, watcher: _Watcher, module: torch.nn.Module, name: str, sides: frozenset[Side]) -> None:
        self.watcher = watcher
        self.module = module
        self.name = name
        self.sides = sides
        self.graded = not sides.isdisjoint(_GRADED)
        self.points: dict[Leaf, Point] = {}  # of the side that the hook sees, as they come

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _SILENT

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def mine(self, module: torch.nn.Module) -> bool:
        """Whether this is our module in our process, really running: a tracer's or compiler's pass is not."""
        if is_compiling() or _tracing_state() is not None:
            return False
        return module is self.module and self.watcher.live


class _Enter(_Hook):
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mine(module):
            try:
                self.watcher.enter(self, args, kwargs)
            except Exception as error:
                self.watcher.sink.failed(Point(self.name, "input"), error)


class _Exit(_Hook):
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: object) -> None:
        if self.mine(module):
            try:
                self.watcher.exit(self, value)
            except Exception as error:
                self.watcher.sink.failed(Point(self.name), error)


class _Gradient:
    """A hook on one tensor of the graph; it holds the watcher weakly, for graphs outlive recordings."""

    def __init__(self, watcher: _Watcher, call: Call, point: Point) -> None:
        self.watcher = weakref.ref(watcher)
        self.step = call.step
        self.number = call.number
        self.point = point

    def __call__(self, gradient: torch.Tensor) -> None:
        watcher = self.watcher()
        if watcher is None or not watcher.live:
            return
        watcher.local.looking = True
        try:
            watcher.sink.seen(self.step, self.point, gradient, call=self.number)
        except Exception as error:
            watcher.sink.failed(self.point, error)
        finally:
            watcher.local.looking = False


class _Inflow:
    """The gradient that flows into one input of one call, added up over the edges it arrives by."""

    def __init__(self, watcher: _Watcher, call: Call, leaf: Leaf, source: Node) -> None:
        self.tell = _Gradient(watcher, call, Point(call.name, "grad_input", leaf))
        self.source = source  # kept alive: its id is the key it is found by
        self.edges = 0
        self.arrived = 0
        self.total: torch.Tensor | None = None

    def expect(self, node: Node, position: int) -> None:
        self.edges += 1

        def arrive(gradients: tuple[torch.Tensor | None, ...], _: object) -> None:
            self._arrive(gradients[position] if position < len(gradients) else None)

        node.register_hook(arrive)

    def _arrive(self, gradient: torch.Tensor | None) -> None:
        if self.arrived == 0:
            # Some edges may stay silent (autograd.grad of a part of the graph): what came is told at the end.
            torch.autograd.Variable._execution_engine.queue_callback(self._tell)
        self.arrived += 1
        if gradient is not None:
            with torch.no_grad():
                self.total = gradient.detach() if self.total is None else self.total + gradient
        if self.arrived == self.edges:
            self._tell()

    def _tell(self) -> None:
        total, self.total, self.arrived = self.total, None, 0
        if total is not None:
            self.tell(total)


_WATCHERS: weakref.WeakSet[_Watcher] = weakref.WeakSet()


@cache
def _at_fork() -> None:
    """Arrange, once, that watching ends in a forked child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for watcher in list(_WATCHERS):
        watcher.close()


def _attach(stack: ExitStack, watcher: _Watcher, module: torch.nn.Module, name: str, sides: frozenset[Side]) -> None:
    before = _Enter(watcher, module, name, sides)
    after = _Exit(watcher, module, name, sides)
    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)


def _above(name: str) -> list[str]:
    """Return the names of the modules that contain a module, the whole model first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))] if name else []
