"""Where a dump may lie, and which of its modes is meant.

    place = Place(files, file=None, mode="2-1")
    place.choose(["fp32", "2-1"])       # '2-1'; an error lists them where the choice is not one

A layout's `recognise(place)` looks at the names, and says None when they are not its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerscope.errors import Ambiguous, NotARun
from layerscope.store.address import Folder


@dataclass(frozen=True, slots=True)
class DumpPlace:
    """A folder, or the one `file` of it that was named; and the mode that was asked for, if any."""

    files: Folder
    file: str | None = None
    mode: str | None = None

    @property
    def address(self) -> str:
        """What was named, without the mode."""
        return self.files.address if self.file is None else f"{self.files.address}/{self.file}"

    @property
    def names(self) -> list[str]:
        """What lies in the folder, sorted; nothing where one file was named."""
        return [] if self.file is not None else self.files.names()

    def choose(self, modes: Sequence[str]) -> str:
        """Return the mode that is meant among those there are; raises where that is none or several."""
        if self.mode is not None and self.mode in modes:
            return self.mode
        listed = ", ".join(modes)
        if self.mode is not None:
            raise NotARun(f"{self.address} has no mode {self.mode!r}; it has {listed}")
        if len(modes) > 1:
            raise Ambiguous(
                f"{self.address} holds {len(modes)} modes: {listed}; "
                f"choose one, as {self.address}:{modes[0]} or mode={modes[0]!r}"
            )
        return modes[0]

    def found(self) -> str:
        """Say in a few words what lies there."""
        return self.files.found() if self.file is None else "that is a file"
