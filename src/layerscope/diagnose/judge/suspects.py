"""From rows that are beyond their floor to the modules to blame.

    suspects = suspects_of(rows, passes)

A row blames the module whose code ran. Where that code used the weights of a module inside it without calling it, and
those differ, that one is to blame; where a whole block holds another block's weights, the block is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from layerscope.diagnose.judge.judging import judge
from layerscope.diagnose.judge.measuring import Measured
from layerscope.diagnose.judge.rows import Row
from layerscope.diagnose.replay.module_hooks import Key
from layerscope.diagnose.replay.passes import Passes
from layerscope.diagnose.replay.replay import Guidance, Guided, Place
from layerscope.diagnose.replay.sides import Lent, lent_weights
from layerscope.points import Leaf


@dataclass(frozen=True, slots=True)
class Suspect:
    """A module to blame: its name, the row that says so, and which module of the reference's it turned out to be.

    `swapped` is the block whose weights it holds.
    """

    name: str
    row: Row
    swapped: str | None = None

    @property
    def place(self) -> str:
        """The module whose output can be put right: the suspect, or the one that uses its weights."""
        return self.name if self.swapped is not None else self.row.judged.name


def missing_arguments(calls: Iterable[Key], guided: Guided, passes: Passes) -> frozenset[tuple[Key, Leaf]]:
    """Return where the arguments that these calls lack were dropped: at the outermost call that lacks that value."""
    return frozenset(_dropped(key, leaf, guided, passes) for key in calls for leaf in guided.missing[key])


def _dropped(key: Key, leaf: Leaf, guided: Guided, passes: Passes) -> tuple[Key, Leaf]:
    call = passes.captured.calls[key]
    above = passes.captured.calls.get(call.above) if call.above is not None else None
    for other in guided.missing.get(above.key, ()) if above is not None else ():
        if above is not None and above.inputs[other] is call.inputs[leaf]:
            return _dropped(above.key, other, guided, passes)
    return key, leaf


def suspects_of(rows: Sequence[Row], passes: Passes, order: Sequence[Place]) -> list[Suspect]:
    """Return one suspect for each module to blame, in the order in which the wrong values were made.

    What raises comes last, and is not to blame where a value of another shape was handed to it.
    """
    turn = {place: at for at, place in enumerate(order)}
    rows = sorted(rows, key=lambda row: turn.get(row.place, len(turn)) if row.place is not None else len(turn))
    shapeless = any(row.judged.guilty and row.measure is not None and not row.measure.shape for row in rows)
    found: dict[str, Suspect] = {}
    blocks: dict[str, str | None] = {}
    for row in rows:
        if not row.judged.guilty or (shapeless and row.place is None):
            continue
        block = next((b for b in blocks_of(row.judged.name) if _other(b, passes, blocks) is not None), None)
        if block is not None:
            judged = replace(row.judged, name=block, counterpart=passes.pairing.names[block], leaf=False)
            found.setdefault(block, Suspect(block, replace(row, judged=judged), blocks[block]))
            continue
        owners = _owners(row, passes)
        if owners == [row.judged.name] and _borrows(row, rows, passes):
            continue
        for name in owners:
            found.setdefault(name, Suspect(name, row))
    return list(found.values())


def _borrows(row: Row, rows: Sequence[Row], passes: Passes) -> bool:
    """Tell whether a parent's own code is wrong only for weights it takes from a module inside that is to blame itself.

    A head that is tied to an embedding may use its weight without a call. With the reference's weights there, the
    parent's own code must be right.
    """
    if row.judged.leaf or row.place is None or row.measure is None:
        return False
    prefix = f"{row.judged.name}." if row.judged.name else ""
    blamed = {r.judged.name for r in rows if r.judged.guilty and r.judged.name.startswith(prefix) and r.judged.name}
    lent = [
        Lent(theirs, key, tensor.detach().to(getattr(theirs, key).dtype))
        for name in blamed - {row.judged.name}
        for theirs in [passes.theirs.modules.by_name[passes.pairing.names[name]]]
        for key, tensor in _tensors(passes.ours.modules.by_name[name], recurse=False).items()
        if isinstance(getattr(theirs, key, None), torch.Tensor) and not _equal(tensor, getattr(theirs, key))
    ]
    if not lent:
        return False
    with lent_weights(lent):
        right = passes.candidate(Guidance(only=(row.place,))).measured.get(row.place)
    if right is None:
        return False
    floor = Measured(row.judged.floor or 0.0, scale=right.scale, worst=right.worst)
    return not judge(right, floor=floor, nudged=None, code="patched").guilty


def _owners(row: Row, passes: Passes) -> list[str]:
    """Name the modules inside whose weights were used without a call and differ, else the module itself."""
    name = row.judged.name
    called = {key[0] for key in passes.captured.calls}
    ours = passes.ours.modules.by_name
    theirs = passes.theirs.modules.by_name[passes.pairing.names[name]]
    if _differ(ours[name], theirs, recurse=False):
        return [name]
    prefix = f"{name}." if name else ""
    inner = [n for n in ours if n.startswith(prefix) and n != name and n not in called]
    found = []
    for other in inner:
        partner = _submodule(theirs, other.removeprefix(prefix))
        if partner is not None and _differ(ours[other], partner, recurse=False):
            found.append(other)
    return found or [name]


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _tensors(module: nn.Module, *, recurse: bool) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(recurse=recurse)), **dict(module.named_buffers(recurse=recurse))}


def _differ(ours: nn.Module, theirs: nn.Module, *, recurse: bool) -> bool:
    """Tell whether any weight is not the reference's, cast to its dtype."""
    mine, others = _tensors(ours, recurse=recurse), _tensors(theirs, recurse=recurse)
    return any(key in others and not _equal(tensor, others[key]) for key, tensor in mine.items())


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or type(theirs.data) is not torch.Tensor:
        return ours.shape == theirs.shape and type(theirs.data) is not torch.Tensor
    return torch.equal(ours.detach().to(device=theirs.device, dtype=theirs.dtype), theirs.detach())


_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")


def blocks_of(name: str) -> Iterator[str]:
    """Yield the numbered blocks that a module is in or is, outermost first: `layers.2` of `layers.2.mlp.up_proj`."""
    for match in _NUMBER.finditer(name):
        yield name[: match.end()]


def _other(block: str, passes: Passes, known: dict[str, str | None]) -> str | None:
    """Return the block of the reference whose weights the candidate's holds, when they are not its own."""
    if block not in known:
        known[block] = _find_other(block, passes)
    return known[block]


def _find_other(block: str, passes: Passes) -> str | None:
    ours = passes.ours.modules.by_name
    theirs = passes.theirs.modules.by_name.get(passes.pairing.names.get(block, ""))
    if theirs is None or block not in ours or not _tensors(ours[block], recurse=True):
        return None
    if _same(ours[block], theirs):
        return None
    start = block.rpartition(".")[0]
    siblings = [n for n in ours if n != block and n.rpartition(".")[0] == start and n.rpartition(".")[2].isdecimal()]
    return next((n for n in siblings if type(ours[n]) is type(ours[block]) and _same(ours[n], theirs)), None)


def _same(ours: nn.Module, theirs: nn.Module) -> bool:
    mine, others = _tensors(ours, recurse=True), _tensors(theirs, recurse=True)
    return mine.keys() == others.keys() and all(_equal(tensor, others[key]) for key, tensor in mine.items())
