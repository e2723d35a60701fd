"""Watch a model that torch.compile runs: hooks are traced into its graph.

    compiled = torch.compile(model, fullgraph=True)
    with TorchCompile().watch(compiled, {"layers.3": {"output"}}, sink):
        compiled(x)

While the block lasts, calls of the model go to a second compilation of it, with the same backend and options, that also
gives back a copy of what each wanted module took and returned. It is made once for a set of modules and kept with the
first: to stop, or to record again, compiles nothing. The first call of a block is run in the first compilation as well,
to see what the hooks change in the output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from layerscope.errors import Unsupported
from layerscope.log import log
from layerscope.points import Leaf, Point, Side
from layerscope.runtimes import eager
from layerscope.runtimes.forwards import Forwards, Redirected
from layerscope.runtimes.observer_effect import NO_TAPS, NOT_CALLED, SKIPPED, Observer
from layerscope.runtimes.runtime import Wanted, refuse_gradients
from layerscope.runtimes.sink import RuntimeSink
from layerscope.runtimes.traced_hooks import TracedHook, TracedValues, alone

_SHARED_CODE = (
    "shared compiled code: the model breaks into several graphs, and what was compiled before the recording began "
    "is used again here; call torch._dynamo.reset() before the recording, or compile with fullgraph=True"
)
_ENDS: tuple[Side, ...] = ("input", "output")
_KEPT = "_layerscope_tapped"  # on the function that torch.compile made: it dies with the compiled model


class TorchCompile:
    """The verbs of a runtime for one recording of a model that torch.compile runs.

    `measure` has the first call run untapped as well; `precise` has the second compilation round where the source does.
    """

    NAME = "torch.compile"

    points = staticmethod(eager.points)
    remark = staticmethod(eager.remark)
    shared = staticmethod(eager.shared)
    parameters = staticmethod(eager.parameters)
    weights = staticmethod(eager.weights)

    def __init__(self, *, measure: bool = True, precise: bool = False) -> None:
        by = "the taps and precision_faithful=True" if precise else "the taps"
        self._observer = Observer(None if measure else SKIPPED, by=by)
        self._precise = precise

    def notes(self, model: torch.nn.Module) -> dict[str, Any]:
        """Say what the taps changed in the output of the first call."""
        said = {"observer_effect": str(self._observer.effect or NOT_CALLED)}
        return {**said, "precision_faithful": True} if self._precise else said

    def check(self, model: torch.nn.Module, wanted: Wanted, *, ops: bool) -> None:
        """Refuse gradients and operations, for compiled code has other ones or none, and rounding that is not ours."""
        inside = "inside a model that torch.compile runs, whose backward pass is one function"
        refuse_gradients(wanted, inside, on="the module before it is compiled")
        if ops:
            raise Unsupported(
                "operations are not seen inside a model that torch.compile runs, which fuses them; "
                "record them on the module before it is compiled."
            )
        if self._precise:
            _precise(_context(model, model.__dict__[_attribute(model)]))

    @contextmanager
    def watch(
        self,
        model: torch.nn.Module,
        wanted: Wanted,
        sink: RuntimeSink,
        *,
        ops: Callable[[str], str | None] | None = None,
    ) -> Iterator[torch.nn.Module]:
        """Tell `sink` what passes the wanted sides of the wanted modules until the block ends."""
        forwards = Forwards(sink)
        attribute = _attribute(model)
        plain = model.__dict__[attribute]

        def run(*args: Any, **kwargs: Any) -> Any:
            value, told = self._observer.run(tapped.run, tapped.untapped, args, kwargs, model=model)
            for hook, found in told:
                forwards.safely(_tell, forwards, hook, found)
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return forwards.run(run, tapped.plainly, wanted.get("", ()), args, kwargs)

        redirected = Redirected(call, instead_of=plain)
        inside = {name: frozenset(sides) for name, sides in wanted.items() if name}
        tapped = _tapped(model, plain, inside, precise=self._precise)
        if not inside:
            self._observer.effect = NO_TAPS
        model.__dict__[attribute] = redirected
        try:
            yield model
        finally:
            model.__dict__[attribute] = plain
            tapped.detach()

    def why_silent(self, model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
        """Say why each of these modules was never seen to run."""
        kept: dict[Any, TappedCompilation] = getattr(model.__dict__[_attribute(model)], _KEPT, {})
        if any(tapped.breaks for tapped in kept.values()):
            return dict.fromkeys(names, _SHARED_CODE)
        return eager.why_silent(model, names)


def _attribute(model: torch.nn.Module) -> str:
    """Return where a compiled model keeps the function that torch.compile made of it."""
    return "_compiled_call_impl" if model.__dict__.get("_compiled_call_impl") else "forward"


def _tapped(model: torch.nn.Module, plain: Any, wanted: Wanted, *, precise: bool) -> TappedCompilation:
    """Return the compilation with hooks at these places, made once for the life of the compiled model."""
    kept: dict[Any, TappedCompilation] = plain.__dict__.setdefault(_KEPT, {})
    key = (frozenset(wanted.items()), precise)
    if key not in kept:
        kept[key] = TappedCompilation(model, plain, wanted, precise=precise)
    return kept[key]


def _tell(forwards: Forwards, hook: TracedHook, found: list[tuple[Leaf, torch.Tensor]]) -> None:
    """Tell the sink what one hook copied."""
    name, side = hook.name, hook.side
    number = forwards.enter(name, name) if side == "input" else forwards.leave(name)
    if hook.wanted:
        if side == "output" and not found:
            forwards.sink.empty(Point(name), because="its output holds no tensor")
        # The next replay of a CUDA graph writes over what lies in its memory.
        safe = [(leaf, tensor.clone() if tensor.is_cuda else tensor) for leaf, tensor in found]
        forwards.tell_leaves(name, side, safe, call=number)


class TappedCompilation:
    """A second compilation of a model; its hooks are on the modules only while it is in use."""

    def __init__(self, model: torch.nn.Module, plain: Any, wanted: Wanted, *, precise: bool) -> None:
        by_name = eager.modules_of(model).by_name
        self.plain = plain
        self.breaks = False
        self._values = TracedValues()
        self._hooks = [
            (by_name[name], TracedHook(self._values, name, side, [()] if side in sides else []))
            for name, sides in wanted.items()
            for side in _ENDS
        ]
        self._attached = ExitStack()
        self._is_attached = False
        self._lock = threading.RLock()  # what is taken in two threads at once would be mixed up
        context = _context(model, plain)
        self._whole = getattr(context, "fullgraph", False)
        compiled = _precise(context) if precise else context
        self._call = compiled(_with_values(self._values, _call_of(model))) if wanted else None
        self._ran = False

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Run the model; return its value, and what the hooks copied."""
        if self._call is None:
            return self.plain(*args, **kwargs), []
        with self._lock:
            self._attach()
            if not self._ran:
                log.warning(
                    "a model that torch.compile runs is compiled once more, with what is recorded of %d modules in its "
                    "graph; later recordings of the same modules use it again",
                    len(self._hooks) // 2,
                )
            before = _breaks()
            try:
                with self._guarding():
                    value = self._call(*args, **kwargs)
                return value, self._values.told or []
            finally:
                self._values.told = None
                self._ran = True
                self.breaks = self.breaks or _breaks() > before

    def _guarding(self) -> AbstractContextManager[object]:
        """Have pieces of a graph that breaks notice whose hooks they were compiled with; a whole graph has its own."""
        if self._whole:
            return nullcontext()
        return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # type: ignore[no-any-return]

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without hooks, in its first compilation; that must not trace any."""
        with self._lock:
            self.detach()
            return self.plain(*args, **kwargs)

    def untapped(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without hooks, before the first run with them: it may be compiled here, in pieces."""
        with self._lock, self._guarding():
            return self.plainly(*args, **kwargs)

    def detach(self) -> None:
        """Take the hooks off the modules; what was compiled with them is kept."""
        with self._lock:
            self._attached.close()
            self._is_attached = False

    def _attach(self) -> None:
        if self._is_attached:
            return
        for module, hook in self._hooks:
            self._attached.callback(hook.on(module).remove)
        self._is_attached = True


def _with_values(values: TracedValues, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of its own that calls the model with an empty list for its hooks."""

    def tapped(*args: Any, **kwargs: Any) -> Any:
        values.told = []
        return call(*args, **kwargs)

    return alone(tapped)  # type: ignore[no-any-return]


def _call_of(model: torch.nn.Module) -> Callable[..., Any]:
    inner = model.__dict__["_modules"].get("_orig_mod")
    return model._call_impl if inner is None else inner.__call__


def _context(model: torch.nn.Module, plain: Any) -> Any:
    """Return what compiles a function as the model was compiled: same backend, same options."""
    context = model.__dict__.get("dynamo_ctx")
    if context is None:
        cells = dict(zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True))
        context = cells["self"].cell_contents if "self" in cells else None
    if not callable(context):
        raise Unsupported(
            f"this torch ({torch.__version__}) does not say how {type(model).__name__} was compiled; "
            "record the module before it is compiled."
        )
    return context


def _precise(context: Any) -> Any:
    """Return what compiles as `context` does, and rounds where the source does."""
    inductor: Any = context.callback
    while hasattr(inductor, "_torchdynamo_orig_backend"):
        inductor = inductor._torchdynamo_orig_backend
    if getattr(inductor, "compiler_name", "") != "inductor":
        raise Unsupported(
            "precision_faithful=True is a setting of Inductor, and this model is compiled by another backend; "
            "leave it out, or compile the model with torch.compile(model)."
        )
    options = {**inductor.config, "emulate_precision_casts": True}
    return torch.compile(fullgraph=getattr(context, "fullgraph", False), dynamic=inductor.dynamic, options=options)


def _breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())
