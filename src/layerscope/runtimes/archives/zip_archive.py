"""The zip archives in which torch keeps models, read strictly and without torch.

    archive = Archive(path)
    archive.read("models/model.json", most=64 << 20)

torch reads such an archive with a parser of its own, which takes another member than Python's does where two have one
name, and does not tell `A` from `a`. What two readers could take for two things is refused; names stay keys.
"""

from __future__ import annotations

import errno
import struct
import zipfile
import zlib
from pathlib import Path

from layerscope.errors import BadModel

EXPECTED = "a zip archive as torch.jit.save and torch.export.save write it"
MEND = "copy it from where it is whole, or save the model again"
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError)  # what a damaged archive raises,
_LOST = (*BROKEN, struct.error, OverflowError)  # and one that was damaged with care

_MOST_MEMBERS = 1 << 17
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive:
    """One archive: the names of its members without the folder that holds them all, and the bytes of those asked for.

    Raises BadModel for what is damaged, ambiguous, or larger than a model's description is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                listed = archive.infolist()
        except _LOST as error:
            raise self.damaged() from error
        if len(listed) > _MOST_MEMBERS:
            raise self.refused(f"has {len(listed)} members")
        self._members: dict[str, zipfile.ZipInfo] = {}
        seen: set[str] = set()
        for info in listed:
            if info.filename.casefold() in seen:
                raise self.refused(f"has two members called {info.filename[:99]!r}, of which readers take either")
            seen.add(info.filename.casefold())
            if info.flag_bits & 1 or info.compress_type not in _PLAIN:
                raise self.refused(f"holds {info.filename[:200]!r} encrypted, or compressed in a way torch has not")
            self._members[info.filename] = info
        tops = {name.partition("/")[0] for name in self._members if "/" in name}
        self.top = f"{tops.pop()}/" if len(tops) == 1 and all("/" in name for name in self._members) else ""

    @property
    def names(self) -> list[str]:
        """Return the names of the members, in the order of the archive."""
        return [name.removeprefix(self.top) for name in self._members]

    def read(self, name: str, *, most: int) -> bytes:
        """Return the bytes of a member; one that is larger than `most` is refused before it is unpacked."""
        info = self._members[self.top + name]
        if info.file_size > most:
            raise self.refused(f"states {info.file_size} bytes for {name[:200]!r}, where {most} are more than enough")
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(info) as member:
                content = member.read(most + 1)
        except (*_LOST, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the beginning of the file
                raise
            raise self.damaged() from error
        if len(content) != info.file_size:
            raise self.damaged()
        return content

    def damaged(self) -> BadModel:
        """Return the error for an archive that is not whole."""
        return BadModel(f"{str(self.path)!r} is damaged, no longer {EXPECTED}; {MEND}.")

    def refused(self, why: str) -> BadModel:
        """Return the error for an archive that says what torch never writes."""
        return BadModel(f"{str(self.path)!r} {why}: that is not {EXPECTED}; {MEND}.")
