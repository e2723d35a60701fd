"""Gradients of a module's inputs and outputs, seen on the autograd graph.

    flow = Flow(next_node(), sources(args, kwargs))                        # as a call begins
    follow_outputs(watcher, call, value)                                  # as it ends
    follow_inputs(watcher, call, value)

`register_full_backward_hook` would pass tensors through an identity that forbids in-place operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _get_sequence_nr as next_node
from torch.autograd.graph import Node, get_gradient_edge

from layerscope.points import Leaf, Point, Side
from layerscope.runtimes.eager.calls import RunningCall
from layerscope.runtimes.sink import Step
from layerscope.runtimes.values import argument_leaves, leaves

if TYPE_CHECKING:
    from layerscope.runtimes.eager.watcher import Watcher

_REGIONS = 1 << 14  # checkpointed regions that may wait for their backward pass


class Regions:
    """Calls made without gradients, which reentrant checkpointing will repeat with them.

    Nothing inside such a region makes a node, so autograd's next number stands still and names the region.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], list[tuple[Step, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def may_repeat(self, name: str, step: Step, number: int) -> None:
        """Remember a call made without gradients."""
        region = (name, next_node())
        calls = self._calls.get(region)
        if calls is None or calls[-1][0] is not step:
            if len(self._calls) >= _REGIONS:
                self._calls.pop(next(iter(self._calls)))
            self._calls[region] = calls = []
        calls.append((step, number))

    def repeats(self, name: str) -> tuple[Step, int] | None:
        """Find the call that a recomputation repeats; None when its own graph already leads back to it."""
        node = torch._C._current_autograd_node()
        region = (name, node._sequence_nr() + 1) if node is not None else (name, -1)
        calls = self._calls.get(region)
        if calls is None:
            return None
        if len(calls) == 1:
            self._calls.pop(region, None)
        return calls.pop(0)


def sources(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[tuple[Leaf, Node, int], ...]:
    """Return the place on the graph where the gradient of each input will flow to."""
    inputs = [(leaf, tensor) for leaf, tensor in argument_leaves(args, kwargs) if tensor.requires_grad]
    edges = [(leaf, get_gradient_edge(tensor)) for leaf, tensor in inputs]
    return tuple((leaf, edge.node, edge.output_nr) for leaf, edge in edges)


def follow_outputs(watcher: Watcher, call: RunningCall, value: object) -> None:
    """Watch the gradients of what a call returned."""
    for leaf, tensor in leaves(value):
        if tensor.requires_grad:
            tensor.register_hook(Gradient(watcher, call, "grad_output", leaf))  # type: ignore[no-untyped-call]


def follow_inputs(watcher: Watcher, call: RunningCall, value: object) -> None:
    """Watch the edges by which this module, and no other consumer, reaches its inputs.

    A tensor hook would see the sum over every consumer: the residual stream's, say. The module's own share flows
    along the edges that its forward added, so the graph is walked from the outputs back to the inputs.
    """
    assert call.flow is not None
    flows = {(id(node), nr): Inflow(watcher, call, leaf, node) for leaf, node, nr in call.flow.sources}
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
        if id(node) in known or node._sequence_nr() < call.flow.first_node:  # made before the call: not the module's
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


class Gradient:
    """A hook on one tensor of the graph; it holds the watcher weakly, for graphs outlive recordings."""

    def __init__(self, watcher: Watcher, call: RunningCall, side: Side, leaf: Leaf) -> None:
        self.step, self.number = call.step, call.number
        self.watcher = weakref.ref(watcher)
        self.point = Point(call.name, side, leaf)

    def __call__(self, gradient: torch.Tensor) -> None:
        """Tell the gradient that arrived."""
        try:
            watcher = self.watcher()
            if watcher is None or not watcher.live:
                return
            with watcher.local.ours:
                watcher.sink.seen(self.step, self.point, gradient, call=self.number)
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Say that the gradient is not recorded; the model's backward goes on."""
        watcher = self.watcher()
        if watcher is not None and watcher.live:
            with suppress(Exception):
                watcher.sink.failed(self.point, error)


class Inflow:
    """The gradient that flows into one input of one call, added up over the edges it arrives by."""

    def __init__(self, watcher: Watcher, call: RunningCall, leaf: Leaf, source: Node) -> None:
        self.tell = Gradient(watcher, call, "grad_input", leaf)
        self.source = source  # kept alive: its id is the key it is found by
        self.edges = 0
        self.arrived = 0
        self.total: torch.Tensor | None = None
        self.lost = False  # some of it could not be added

    def expect(self, node: Node, position: int) -> None:
        """Wait for what arrives at `position` of a node's inputs."""
        self.edges += 1

        def arrive(gradients: tuple[torch.Tensor | None, ...], _: object) -> None:
            self.arrive(gradients[position] if position < len(gradients) else None)

        node.register_hook(arrive)

    def arrive(self, gradient: torch.Tensor | None) -> None:
        """Add what arrived by one edge."""
        try:
            if self.arrived == 0:
                # Some edges may stay silent (autograd.grad of a part of the graph): what came is told at the end.
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self.done)
            self.arrived += 1
            if gradient is not None and not self.lost:
                with torch.no_grad():
                    self.total = gradient.detach() if self.total is None else _sum(self.total, gradient)
        except Exception as error:
            self.total, self.lost = None, True
            self.tell.failed(error)
        if self.arrived == self.edges:
            self.done()

    def done(self) -> None:
        """Tell the sum; a part of it is none."""
        total, self.total, self.arrived, self.lost = self.total, None, 0, False
        if total is not None:
            self.tell(total)


def _sum(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Add two gradients, of which one may be sparse: a sparse tensor takes no dense one."""
    return gradient + total if total.is_sparse and not gradient.is_sparse else total + gradient
