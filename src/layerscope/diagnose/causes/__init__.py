"""Why a module's result differs: detectors, strongest evidence first, each a function that returns a cause or None.

cause_of(case).because      # "its weight is the reference's times 1.050"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from layerscope.diagnose.causes.cause import KINDS, Case, Cause, Kind, ResultPair
from layerscope.diagnose.causes.error_patterns import (
    confined,
    displaced,
    in_another_order,
    left_out,
    on_a_bound,
    on_a_grid,
    rounded_to,
    scaled,
    shifted,
    some_scaled,
    some_zeroed,
)
from layerscope.diagnose.causes.failures import nonfinite, other_integers, other_shape, raised, random
from layerscope.diagnose.causes.settings import differing_configuration, differing_settings, other_class, other_function
from layerscope.diagnose.causes.weights import differing_weights, quantised_weights

__all__ = ["KINDS", "Case", "Cause", "Kind", "cause_of"]


def _operations(case: Case) -> Cause | None:
    """The first operation of its own code that differs on equal inputs."""
    if not case.operations:
        return None
    first = case.operations[0]
    evidence = {"operation": first.name, "what": first.what, "index": first.index, "count": len(case.operations)}
    return Cause("operation", first.because, evidence)


# What the modules are and what they did, before any pattern in the values is sought.
_CERTAIN: tuple[Callable[[Case], Cause | None], ...] = (
    raised,
    differing_weights,
    nonfinite,
    other_integers,
    other_shape,
    random,
    differing_settings,
    other_function,
)
_PATTERNS: tuple[Callable[[Case, ResultPair], Cause | None], ...] = (
    left_out,
    some_zeroed,
    on_a_bound,
    on_a_grid,
    rounded_to,
    scaled,
    displaced,
    in_another_order,
    some_scaled,
    shifted,
)
# An operation tells where, a pattern what; grids and configurations differ in many a module that is not to blame.
_REST: tuple[Callable[[Case], Cause | None], ...] = (_operations, quantised_weights, differing_configuration)


def cause_of(case: Case) -> Cause:
    """Return the cause that the evidence shows, or `unknown`; a detector that fails is named there, and passed over."""
    failed: dict[str, str] = {}
    for detector in _detectors(case):
        try:
            found = detector()
        except Exception as error:  # a tensor subclass, a device out of memory: no reason to lose the finding
            failed[detector.func.__name__] = f"{type(error).__name__}: {error}"
            continue
        if found is not None:
            return found
    return Cause("unknown", "no known cause", {"failed": failed} if failed else {})


def _detectors(case: Case) -> Iterator[partial[Cause | None]]:
    """Yield what is to be asked, in the order of asking."""
    yield from (partial(detector, case) for detector in _CERTAIN)
    values = ResultPair.of(case)
    if values is not None and values.differ:
        yield from (partial(pattern, case, values) for pattern in _PATTERNS)
    yield from (partial(detector, case) for detector in _REST)
    if values is not None and values.differ:
        yield partial(confined, case, values)
    yield partial(other_class, case)
