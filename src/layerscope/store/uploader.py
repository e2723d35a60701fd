"""Put sealed segments elsewhere, each once and whole, under a claim in place of a lock.

    claim = put_claim(remote, 0, append=False)          # rank-00000/claim-00000, put where there is none
    uploader = Uploader(remote, spool, rank=0, claim=claim)
    uploader.put(0, records, size); uploader.merge(); uploader.put_manifest(manifest)

The highest claim owns a rank's folder, and a writer that sees a higher one stops. A segment's name has its writer's
claim in it, so that two writers never want the same name, and of two records the one with the higher claim counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from layerscope.errors import Damaged, NotARun, RunBusy, RunExists, Unsupported
from layerscope.store.address import (
    PARTIAL,
    SEALED,
    Address,
    LocalFolder,
    RemoteFolder,
    claim_name,
    claim_of,
    folder,
    rank_folder,
    segment,
    segment_of,
)
from layerscope.store.destination import exists
from layerscope.store.disk import opened, said_of
from layerscope.store.manifest import NAME, Manifest, now
from layerscope.store.merging import merge
from layerscope.store.rank_lock import RankLock
from layerscope.store.segment import Sealed

# In the spool: which claim its segments are put under.
CLAIM = "claim"
# So many small segments are merged, into one that is no larger than others.
TOGETHER = 64
_SMALL = (256 << 20) // TOGETHER
# What is compared of a segment that is there already: its table has a checksum of everything else.
_TAIL = 64 << 10


@final
class Uploader:
    """Puts one rank's segments from a spool; `segments` is what `run.json` says of those that are there.

    Each verb raises OSError when the other side cannot be reached, and can be called again; RunBusy when another
    writer has claimed the folder.
    """

    def __init__(
        self, remote: RemoteFolder, spool: LocalFolder, *, rank: int, claim: int, is_late: bool = False
    ) -> None:
        """`is_late` puts under a claim although there is a higher one: its records give way to those of the others."""
        self.segments: dict[str, list[int]] = {}
        self.small: list[int] = []  # put, and still in the spool
        self._remote, self._spool, self._rank, self._claim, self._is_late = remote, spool, rank, claim, is_late
        self._under = rank_folder(rank)
        self._lost_to: RunBusy | None = None

    def put(self, number: int, records: int, size: int) -> None:
        """Put a sealed segment of the spool, and remove it there unless it is small enough to be merged."""
        local, stem = self._local(number), segment(number, claim=self._claim)
        self._put(local, f"{stem}{SEALED}")
        self.segments[stem] = [records, size]
        if size < _SMALL:
            self.small.append(number)
        else:
            (self._spool.path / local).unlink()

    def merge(self) -> None:
        """Put the small segments as one, and delete them; a kill in between leaves both, which is harmless."""
        if len(self.small) < 2:
            return
        locals_ = [self._local(number) for number in self.small]
        stems = [segment(number, claim=self._claim) for number in self.small]
        stem = segment(self.small[0], last=self.small[-1], claim=self._claim)
        merged = f"merged{PARTIAL}"
        try:
            sources = [Sealed(self._spool, name) for name in locals_]
            says = list(merge(sources, self._spool.path, self._spool.path / merged, names=stems))
            self._put(merged, f"{stem}{SEALED}")
        finally:
            (self._spool.path / merged).unlink(missing_ok=True)
        self.small = []
        self.segments = {name: said for name, said in self.segments.items() if name not in stems} | {stem: says}
        for name in locals_:
            (self._spool.path / name).unlink()
        self._remote.remove([f"{self._under}/{each}{SEALED}" for each in stems])

    def put_manifest(self, manifest: Manifest) -> None:
        """Replace the rank's `run.json`; a rank other than 0 puts the run's where there is none yet."""
        self._names()
        data = replace(manifest, segments=self.segments).dumps().encode()
        self._remote.put(NAME if self._rank == 0 else f"{self._under}/{NAME}", data)
        if self._rank != 0:
            self._remote.put_new(NAME, data)

    def _local(self, number: int) -> str:
        return f"{self._under}/{segment(number)}{SEALED}"

    def _put(self, local: str, name: str) -> None:
        is_there = name in self._names()
        where = f"{self._under}/{name}"
        if is_there or not self._remote.put_file_new(where, self._spool.path / local):
            self._check_same(local, where)

    def _names(self) -> list[str]:
        """List what there is; raises RunBusy when another writer has claimed it since."""
        if self._lost_to is not None:
            raise self._lost_to
        self._remote.forget()
        names = self._remote.names(self._under)
        highest = max((claim for name in names if (claim := claim_of(name)) is not None), default=self._claim)
        if highest > self._claim and not self._is_late:
            self._lost_to = RunBusy(
                f"another writer has claimed {self._under} of {self._remote.address} since "
                f"({claim_name(highest)} over {claim_name(self._claim)}); this one has stopped"
            )
            raise self._lost_to
        return names

    def _check_same(self, local: str, name: str) -> None:
        """Refuse to take for ours what another writer has put; an answer that was lost leaves our own there."""
        self._remote.forget()
        size = self._spool.size(local)
        begin = max(0, size - _TAIL)
        same = self._remote.size(name) == size
        if not same or self._remote.read(name, offset=begin, length=_TAIL) != self._spool.read(local, offset=begin):
            raise OSError(f"{self._remote.address}/{name} is there already, and is not what {local} of the spool holds")


def put_claim(remote: RemoteFolder, rank: int, *, append: bool, claim: int | None = None) -> tuple[int, bytes]:
    """Claim a rank's folder with the next number, and return that and what the claim says.

    Raises RunExists where it is claimed and `append` is False. `claim` is one that a spool has already.
    """
    under = rank_folder(rank)
    claims = [found for name in remote.names(under) if (found := claim_of(name)) is not None]
    if claims and not append:
        raise RunExists(exists(remote.address))
    number = max(claims, default=-1) + 1 if claim is None else claim
    while True:
        about = {"claim": number, "address": remote.address, "host": socket.gethostname(), "pid": os.getpid()}
        data = json.dumps({**about, "since": now(), "token": os.urandom(8).hex()}).encode()
        name = f"{under}/{claim_name(number)}"
        if remote.put_new(name, data) or claim is not None or _reads(remote, name) == data:
            return number, data
        if not append:
            raise RunExists(exists(remote.address))
        number += 1


def _reads(remote: RemoteFolder, name: str) -> bytes:
    remote.forget()
    return bytes(remote.read(name))


def put_spool(spool: LocalFolder, to: Address, ranks: Sequence[int], *, keep: bool) -> None:
    """Put what of a recovered spool is not there yet, and remove the spool unless asked to keep it."""
    remote = folder(to)
    if not isinstance(remote, RemoteFolder):
        raise Unsupported(
            f"{to} is a folder of this machine; `--to` is where the run of the spool is, s3://... for one"
        )
    for rank in ranks:
        with RankLock(spool.path / rank_folder(rank)):
            _put_rank(spool, remote, rank, _claim_of_spool(spool, rank), merges=not keep)
    if not keep:
        shutil.rmtree(spool.path)


def _claim_of_spool(spool: LocalFolder, rank: int) -> int:
    try:
        return int(json.loads(spool.read(f"{rank_folder(rank)}/{CLAIM}"))["claim"])
    except FileNotFoundError:
        raise NotARun(
            f"{spool.address} is a run of its own and no spool: it was recorded here. Copy it as any folder"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{spool.address}/{rank_folder(rank)}/{CLAIM} does not say which claim it is ({error})") from None


def _put_rank(spool: LocalFolder, remote: RemoteFolder, rank: int, claim: int, *, merges: bool) -> None:
    under = rank_folder(rank)
    own = NAME if rank == 0 else f"{under}/{NAME}"
    manifest = replace(Manifest.loads(spool.read(own)), segments={})
    spool.put(own, manifest.dumps().encode())  # what is put is no longer looked for here
    remote.forget()
    claims = [found for name in remote.names(under) if (found := claim_of(name)) is not None]
    if claim not in claims:
        put_claim(remote, rank, append=True, claim=claim)
    is_late = max(claims, default=claim) > claim
    uploader = Uploader(remote, spool, rank=rank, claim=claim, is_late=is_late)
    there, _ = opened(remote, [rank])
    merged = {stem for one in there for stem in one.merged}
    for name in spool.names(under):
        each = segment_of(name)
        if each is not None and each.kind == SEALED and segment(each.number, claim=claim) not in merged:
            table = Sealed(spool, f"{under}/{name}")
            uploader.put(each.number, table.rows, table.size)
    if merges:  # with nothing damaged in it
        with contextlib.suppress(OSError):
            uploader.merge()
    if is_late:
        return
    remote.forget()
    there, _ = opened(remote, [rank])
    uploader.segments = said_of(there)
    if manifest.completeness.state == "recovered":
        records = sum(each.table.rows for each in there)
        manifest = replace(manifest, completeness=replace(manifest.completeness, records=records))
    uploader.put_manifest(manifest)
