"""What a model says of itself before it runs: the places where tensors can be seen, and how large they are.

    Listing.of(model)              # of a live one, by its runtime
    read_export(path)              # of a file, without loading it (`archives/`)

A TorchScript or .pt2 file is a program: to load one runs what its author put there, to list one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from layerscope.patterns import Place
from layerscope.runtimes.runtime import Runtime, Wanted

_MOST_TEXT = 64 << 20

Own = Mapping[str, Mapping[object, int]]  # the sizes of each module's own parameters, by what tells tensors apart


class Listing(NamedTuple):
    """The places of a model, in the words of the runtime that can record it."""

    runtime: str
    places: list[Place]
    shared: Mapping[str, str]
    sizes: Mapping[str, int]
    """The parameters of each module with those inside it, each once; empty where the weights are not known."""
    total: int
    refuse: Callable[[Wanted, bool], None]
    """Raises Unsupported for sides, or operations, that cannot be recorded."""
    remark: str = ""

    @classmethod
    def of(cls, runtime: Runtime, model: Any) -> Listing:
        """Ask a runtime of a live model."""
        found, shared, weights = runtime.points(model), runtime.shared(model), runtime.weights(model)
        parameters = runtime.parameters(model)
        known = set(map(id, parameters))
        own: dict[str, dict[object, int]] = {
            name: {id(tensor): tensor.numel() for _, tensor in weights.get(first, ()) if id(tensor) in known}
            for name, first in {**{name: name for name in weights}, **shared}.items()
        }
        return cls(
            runtime.NAME,
            found,
            shared,
            inside(own, found) if weights else {},
            sum(parameter.numel() for parameter in parameters),
            lambda wanted, ops: runtime.check(model, wanted, ops=ops),
            runtime.remark(model),
        )


def sane(names: Iterable[str]) -> list[str]:
    """Return the names of modules; raises ValueError where they and the names of all that holds them are no model's."""
    known = list(names)
    if sum((name.count(".") + 1) * (len(name) + 1) for name in known) > _MOST_TEXT:
        raise ValueError("names of modules that no model has")
    return known


def inside(own: Own, places: Iterable[Place]) -> dict[str, int]:
    """Count the parameters of each module with those of the modules inside it, each once."""
    within: dict[str, dict[object, int]] = {place.name: {} for place in places}
    for name, sizes in own.items():
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            within.setdefault(".".join(parts[:depth]), {}).update(sizes)
    return {name: sum(sizes.values()) for name, sizes in within.items()}
