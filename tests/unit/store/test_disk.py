"""disk.py, opening.py: opening and reading what is on disk."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import struct
import threading
import warnings
import zlib
from functools import partial
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch

from asserts import left_open
from layerscope.errors import Damaged, LayerscopeError, NewerFormat, NotARun
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, Writer, open_run
from layerscope.store.address import LocalFolder
from layerscope.store.dtypes import STORED
from layerscope.store.journal import frame, row_frame
from layerscope.store.segment import ROOM, Sealed, Sealing


@pytest.fixture
def path(tmp_path, write):
    """Four records in two sealed segments."""
    values = [np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * n for n in range(4)]
    write(tmp_path / "run", [(f"p{n}", Moment(step=n), v) for n, v in enumerate(values)], segment_tensors=2).close()
    return tmp_path / "run"


def value(n: int) -> list:
    return (np.arange(6).reshape(3, 2) + 10 * n).tolist()


def table(path: Path, name: str, number: int = 0) -> int:
    """Return where a column begins in a sealed segment."""
    raw = (path / f"rank-00000/segment-0000{number}.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return 8 + length + json.loads(raw[8 : 8 + length])[f"table.{name}"]["data_offsets"][0]


def forged(path: Path, **changes) -> None:
    """Put a journal with a right checksum and one wrong row in place of the first segment: what an enemy could do."""
    folder = path / "rank-00000"
    sealed = Sealed(LocalFolder(path), "rank-00000/segment-00000.safetensors")
    rows = [sealed.columns().row(at) for at in range(2)]
    rows[0] = rows[0]._replace(**changes)
    schema = frame(b"forgeddd", 1, b'{"format":"layerscope","version":2,"rank":0,"run":"666f726765646464"}')
    frames = [row_frame(b"forgeddd", row)[0] for row in rows]
    (folder / "segment-00000.journal").write_bytes(b"".join([schema, *frames]))
    (folder / "segment-00000.safetensors").rename(folder / "segment-00000.partial")


# Opening ----------------------------------------------------------------------------------------


def test_a_path_a_text_and_a_file_address_open_the_same_run(path):
    for address in (path, str(path), f"file://{path}"):
        assert open_run(address).tensor("p1").tolist() == value(1)


@pytest.mark.parametrize("kind", ["absent", "empty", "file", "other", "foreign json", "foreign folder"])
def test_what_is_not_a_run_is_refused_with_what_was_found(tmp_path, kind):
    place = tmp_path / "x"
    if kind == "file":
        place.write_text("hello")
    elif kind != "absent":
        place.mkdir()
    if kind == "other":
        (place / "a.txt").touch()
    elif kind == "foreign json":
        (place / "run.json").write_text('{"format": "theirs", "version": 1}')
    elif kind == "foreign folder":
        (place / "rank-00000").mkdir()
    with pytest.raises(NotARun, match=r"is not a run: .*A run is a folder with run.json and rank-00000 in it"):
        open_run(place)


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        (3, NewerFormat, "written by format 3; this layerscope reads up to 2"),
        (1, NotARun, "never released; record it again"),
    ],
)
def test_another_format_is_refused(path, version, error, words):
    (path / "run.json").write_text(json.dumps({"format": "layerscope", "version": version}))
    with pytest.raises(error, match=words):
        open_run(path)


@pytest.mark.parametrize("text", [None, b"", b"{", b"\x00" * 100, b'{"format": "other"}', b"[" * 99999])
def test_a_manifest_that_does_not_read_costs_only_itself(path, text):
    (path / "run.json").unlink()
    if text is not None:
        (path / "run.json").write_bytes(text)
    run = open_run(path)
    assert (run.state, run.complete) == ("unknown", False)
    assert "run.json" in run.notes[0]
    assert run.tensor("p3").tolist() == value(3)


def test_a_manifest_of_gigabytes_is_not_read(path, monkeypatch):
    monkeypatch.setattr("layerscope.store.disk._LARGEST_MANIFEST", 100)
    run = open_run(path)
    assert run.state == "unknown"
    assert run.tensor("p3").tolist() == value(3)


def test_a_rank_whose_own_manifest_is_missing_is_unknown(tmp_path, write):
    for rank in (0, 1):
        write(tmp_path / "run", [("a", Moment(rank=rank), np.ones(1))], rank=rank).close()
    assert open_run(tmp_path / "run").state == "complete"
    (tmp_path / "run/rank-00001/run.json").unlink()
    run = open_run(tmp_path / "run")
    assert (run.state, len(run)) == ("unknown", 2)


def test_it_says_what_it_is_and_travels_by_its_address(path):
    run = open_run(path)
    assert repr(run) == f"Run({str(path)!r}, 4 records, complete)"
    assert pickle.loads(pickle.dumps(run)).tensor("p1").tolist() == value(1)
    assert copy.copy(run).address == run.address


# Tensors ----------------------------------------------------------------------------------------


def test_every_dtype_comes_back_bit_for_bit_also_from_the_stock_reader(tmp_path):
    from safetensors import safe_open

    raw = np.random.default_rng(0).integers(0, 256, 16 * 6, dtype=np.uint8)
    writer = Writer(tmp_path / "run", Manifest())
    expected = {}
    for number, (name, how) in enumerate(STORED.items()):
        data = (raw % 2 if name == "bool" else raw)[: how.itemsize * 6]
        expected[name] = (number, data)
        writer.write(Point(name), Moment(), blob=Blob(name, (2, 3), data.nbytes, lambda data=data: data))
    writer.close()
    run = open_run(tmp_path / "run")
    with safe_open(tmp_path / "run/rank-00000/segment-00000.safetensors", "pt") as file:
        for name, (number, data) in expected.items():
            tensor = run.tensor(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, name), (2, 3))
            assert tensor.view(torch.uint8).numpy().tobytes() == data.tobytes()
            stock = file.get_tensor(f"{number:08d}")
            assert stock.contiguous().view(torch.uint8).numpy().tobytes() == data.tobytes()
            if name not in ("complex128", "complex32"):
                assert stock.dtype == tensor.dtype


def test_a_large_sealed_tensor_is_a_view_of_the_file_and_writing_into_it_changes_neither_file_nor_run(tmp_path, write):
    values = np.arange(1 << 19, dtype=np.float32)
    write(tmp_path / "run", [("p", Moment(), values)]).close()
    run = open_run(tmp_path / "run")
    tensor = run.tensor("p")
    segment = str(tmp_path / "run/rank-00000/segment-00000.safetensors")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(segment)]
    ranges = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in mapped]
    assert any(begin <= tensor.data_ptr() < end for begin, end in ranges)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor += 100
    assert run.tensor("p").tolist() == values.tolist()
    assert open_run(tmp_path / "run").tensor("p").tolist() == values.tolist()


@pytest.mark.parametrize("why", ["may be cut", "no mapping is left"])
def test_a_large_tensor_is_read_where_a_mapping_is_not_safe_or_not_to_be_had(tmp_path, write, monkeypatch, why):
    values = np.arange(1 << 19, dtype=np.float32)
    write(tmp_path / "run", [("p", Moment(), values)]).close()
    segment = tmp_path / "run/rank-00000/segment-00000.safetensors"
    if why == "may be cut":
        segment.chmod(0o666)
    else:
        refused = RuntimeError("unable to mmap 2162688 bytes from file: Cannot allocate memory (12)")
        monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *a: (_ for _ in ()).throw(refused))
    run = open_run(tmp_path / "run")
    tensor = run.tensor("p")
    os.truncate(segment, 0)
    assert torch.equal(tensor, torch.from_numpy(values))
    with pytest.raises(Damaged):
        run.tensor("p")


def test_small_tensors_take_no_mapping_each(path, monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *a: pytest.fail("a small tensor was mapped"))
    tensor = open_run(path).tensor("p1")
    tensor += 100
    assert open_run(path).tensor("p1").tolist() == value(1)


def test_tensors_outlive_the_run_and_its_files(path):
    run = open_run(path)
    tensor = run.tensor("p1")
    del run
    shutil.rmtree(path)
    assert tensor.tolist() == value(1)


def test_many_tensors_hold_no_file_open(path):
    run = open_run(path)
    opened = left_open()
    kept = [run.tensor(f"p{n % 4}") for n in range(200)]
    assert opened()[1] == []
    assert len(kept) == 200


def test_a_tensor_at_an_odd_address_is_copied_to_a_good_one(tmp_path, write):
    odd = np.arange(3, dtype=np.uint8)
    records = [("odd", Moment(), odd), ("x", Moment(), np.arange(4.0)), ("y", Moment(), np.arange(4) * 1j)]
    write(tmp_path / "run", records).close()
    run = open_run(tmp_path / "run")
    assert run.tensor("x").data_ptr() % 8 == 0
    assert run.tensor("x").tolist() == [0, 1, 2, 3]
    assert run.tensor("y").tolist() == [0, 1j, 2j, 3j]
    assert run.tensor("x", rows=slice(2, 4)).tolist() == [2, 3]


def test_a_run_that_is_being_written_is_read_without_mapping(tmp_path, write, monkeypatch):
    writer = write(tmp_path / "run", [("a", Moment(step=n), np.full(3, n, np.int64)) for n in range(3)])
    writer.flush()
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *a: pytest.fail("a partial segment was mapped"))
    run = open_run(tmp_path / "run")
    assert [run.tensor("a", step=n).tolist() for n in range(3)] == [[n] * 3 for n in range(3)]
    assert run.tensor("a", step=2, rows=slice(1, 3)).tolist() == [2, 2]
    tensor = run.tensor("a", step=1)
    tensor += 1
    assert run.tensor("a", step=1).tolist() == [1] * 3
    monkeypatch.undo()
    writer.close()
    assert run.tensor("a", step=2).tolist() == [2] * 3  # sealed meanwhile


def test_an_empty_journal_that_its_writer_removes_between_two_looks_is_no_damage(path, monkeypatch):
    listed, ghosts = LocalFolder.names, ["segment-00009.journal"]

    def names(self, under=""):
        return sorted([*listed(self, under), *([ghosts.pop()] if under and ghosts else [])])

    run = open_run(path)
    monkeypatch.setattr(LocalFolder, "names", names)
    run.refresh()
    assert not ghosts
    assert run.damaged == []
    assert len(run) == 4


def test_pages_of_a_journal_from_before_and_after_a_write_are_no_damage(tmp_path, write, monkeypatch):
    writer = write(tmp_path / "run", [("a", Moment(step=n), np.full(3, n, np.int64)) for n in range(30)])
    writer.flush()
    right, torn = LocalFolder.read, [1]

    def read(self, name, **stretch):
        data = bytearray(right(self, name, **stretch))
        if name.endswith(".journal") and torn:
            torn.clear()
            data[1000:2000] = bytes(1000)
        return data

    monkeypatch.setattr(LocalFolder, "read", read)
    run = open_run(tmp_path / "run")
    assert not torn
    assert run.damaged == []
    assert len(run) == 30
    writer.close()


def test_refreshing_shows_what_came_since(tmp_path, write):
    writer = write(tmp_path / "run", [("a", Moment(), np.ones(1))])
    writer.flush()
    run = open_run(tmp_path / "run")
    writer.write(Point("b"), Moment())
    writer.close()
    assert (len(run), run.state) == (1, "recording")
    run.refresh()
    assert (len(run), run.state) == (2, "complete")


def test_refreshing_reads_of_an_open_journal_only_what_came_since(tmp_path, write, monkeypatch):
    writer = write(tmp_path / "run", [(f"p{n}", Moment(step=n), np.full(3, n)) for n in range(200)])
    writer.flush()
    run = open_run(tmp_path / "run")
    read = []
    reads = LocalFolder.read
    monkeypatch.setattr(
        LocalFolder, "read", lambda *args, **how: read.append((args[1], reads(*args, **how))) or read[-1][1]
    )
    for n in range(200, 230):
        writer.write(Point(f"p{n % 7}"), Moment(step=n), note={"n": n})
        writer.flush()
        run.refresh()
        assert [entry.moment.step for entry in run.records()] == list(range(n + 1))
    journaled = [len(data.rstrip(b"\0")) for name, data in read if name.endswith(".journal")]
    assert len(journaled) == 30
    assert max(journaled) < 400  # and not the frames of two hundred records
    assert run.tensor("p150").tolist() == [150] * 3
    writer.close()
    run.refresh()
    assert (len(run), run.complete) == (230, True)


def test_a_journal_that_was_taken_back_is_read_from_its_beginning(tmp_path, write):
    writer = write(tmp_path / "live", [("a", Moment(step=n), np.full(3, n)) for n in range(6)])
    writer.flush()
    journal = "rank-00000/segment-00000.journal"
    shutil.copytree(tmp_path / "live", tmp_path / "run")
    writer.close()
    whole = (tmp_path / "run" / journal).read_bytes().rstrip(b"\0")
    frames = [at for at in range(len(whole)) if whole.startswith(whole[:8], at)]
    run = open_run(tmp_path / "run")
    assert len(run) == 6
    (tmp_path / "run" / journal).write_bytes(whole[: frames[4]])
    run.refresh()
    assert [entry.moment.step for entry in run.records()] == [0, 1, 2]
    (tmp_path / "run" / journal).write_bytes(whole)
    run.refresh()
    assert [entry.moment.step for entry in run.records()] == list(range(6))
    assert run.damaged == []


def test_threads_share_a_run(path):
    run, wrong = open_run(path), []

    def read() -> None:
        for n in range(100):
            if run.tensor(f"p{n % 4}").tolist() != value(n % 4):
                wrong.append(n)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_too(path):
    run = open_run(path)
    assert len(run) == 4
    pid = os.fork()
    if pid == 0:
        os._exit(0 if run.tensor("p1").tolist() == value(1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run.tensor("p2").tolist() == value(2)


# Damage -----------------------------------------------------------------------------------------


def test_a_flipped_bit_is_damage_of_that_tensor_only(path, wrong):
    wrong(path / "rank-00000/segment-00000.safetensors", ROOM + 24 + 5)
    run = open_run(path)
    with pytest.raises(
        Damaged, match=r"p1:output at step=1 .* in .*segment-00000.*: its bytes are not what was written"
    ):
        run.tensor("p1")
    with pytest.raises(Damaged):
        run.tensor("p1", rows=slice(0, 1))
    assert [run.tensor(f"p{n}").tolist() for n in (0, 2, 3)] == [value(n) for n in (0, 2, 3)]


def test_a_flipped_bit_in_a_header_harms_nothing_here_and_is_named(path, wrong):
    for at in (3, 20, 40, 200):
        wrong(path / "rank-00000/segment-00000.safetensors", at)
    run = open_run(path)
    assert [run.tensor(f"p{n}").tolist() for n in range(4)] == [value(n) for n in range(4)]
    assert ["header is not what was written" in d.reason for d in run.damaged] == [True]


def test_a_footer_that_is_damaged_costs_no_record(path, wrong):
    segment = path / "rank-00000/segment-00000.safetensors"
    for at in (segment.stat().st_size - 40, segment.stat().st_size - 1):
        wrong(segment, at)
        run = open_run(path)
        assert [run.tensor(f"p{n}").tolist() for n in range(4)] == [value(n) for n in range(4)]
        assert ["footer cannot be read" in d.reason for d in run.damaged] == [True]
        wrong(segment, at)


def test_a_damaged_column_costs_the_record_it_hit(path, wrong):
    wrong(path / "rank-00000/segment-00000.safetensors", table(path, "offset") + 5)
    run = open_run(path)
    assert run.tensor("p0").tolist() == value(0)
    with pytest.raises(Damaged, match=r"record 1 of .*segment-00000.* is not what was written"):
        run.tensor("p1")
    assert [d.reason for d in run.damaged] == [
        "its column offset is damaged",
        "record 1: its row is not what was written",
    ]


def test_a_segment_that_needs_what_this_version_does_not_know_is_refused(tmp_path, write, monkeypatch):
    monkeypatch.setattr("layerscope.store.appender.Sealing", partial(Sealing, needs=["placement"]))
    write(tmp_path / "run", [("p", Moment(), np.ones(2))]).close()
    run = open_run(tmp_path / "run")
    assert len(run) == 0
    assert "needs placement, which this layerscope does not know: upgrade it" in run.damaged[0].reason
    monkeypatch.setattr("layerscope.store.segment._KNOWN_NEEDS", {"placement"})
    assert open_run(tmp_path / "run").complete


def test_rows_are_checked_once_and_then_only_read(path, wrong):
    run = open_run(path)
    assert run.tensor("p1", rows=slice(0, 1)).tolist() == value(1)[:1]
    wrong(path / "rank-00000/segment-00000.safetensors", ROOM + 24 + 23)
    assert run.tensor("p1", rows=slice(0, 1)).tolist() == value(1)[:1]
    with pytest.raises(Damaged):
        run.tensor("p1")
    with pytest.raises(Damaged):
        open_run(path).tensor("p1", rows=slice(0, 1))


def test_a_segment_that_is_gone_or_short_is_damage_and_the_others_read(path):
    os.truncate(path / "rank-00000/segment-00000.safetensors", ROOM + 30)
    run = open_run(path)
    assert [d.file for d in run.damaged] == ["rank-00000/segment-00000.safetensors"]
    assert (run.complete, run.state) == (False, "damaged")
    assert [note.split()[0] for note in run.notes] == ["rank-00000/segment-00000.safetensors"]
    assert run.tensor("p3").tolist() == value(3)
    with pytest.raises(LayerscopeError):
        run.tensor("p0")
    (path / "rank-00000/segment-00001.safetensors").unlink()
    assert [d.reason for d in open_run(path).damaged][1:] == ["it is not there, and held 2 records"]


def test_a_segment_that_goes_while_the_run_is_open_is_damage_of_its_tensors(path):
    run = open_run(path)
    entries = list(run.records())
    (path / "rank-00000/segment-00001.safetensors").unlink()
    assert entries[0].tensor().tolist() == value(0)
    with pytest.raises(Damaged, match=r"neither .*segment-00001.safetensors nor .*segment-00001.partial"):
        entries[2].tensor()


def test_ranks_that_record_side_by_side_miss_each_other_and_those_that_do_not_record_are_not_missed(tmp_path):
    for name, ranks in (("all", (0, 1)), ("some", (0, 3))):
        writers = [Writer(tmp_path / name, Manifest(), rank=rank) for rank in ranks]
        for rank, writer in zip(ranks, writers, strict=True):
            writer.write(Point("a"), Moment(rank=rank), summary=summarize(np.ones(2)))
            writer.close()
        assert open_run(tmp_path / name).complete
        shutil.rmtree(tmp_path / name / f"rank-{ranks[1]:05d}")
    assert open_run(tmp_path / "some").complete
    run = open_run(tmp_path / "all")
    assert not run.complete
    assert [d.reason for d in run.damaged] == ["2 ranks recorded, and rank-00001 is not there"]


def test_a_whole_rank_that_is_gone_is_missed_where_the_run_says_how_many_recorded(tmp_path, write):
    for ranks in (None, 2):
        at = tmp_path / f"run{ranks}"
        for rank in (0, 1):
            write(at, [("a", Moment(rank=rank), np.ones(1))], rank=rank, manifest=Manifest(ranks=ranks)).close()
        assert open_run(at).complete
        shutil.rmtree(at / "rank-00001")
    run = open_run(tmp_path / "run2")
    assert not run.complete
    assert [d.reason for d in run.damaged] == ["2 ranks recorded, and rank-00001 is not there"]


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 2**62},
        {"offset": 0},
        {"offset": 8},
        {"length": 2**62},
        {"shape": (2**62, 2**62), "length": 2**62},
        {"shape": (2**40,), "length": 2**42},
        {"shape": (6, 2**62, 2**62, 0)},
        {"shape": (1,) * 300},
        {"dtype": "qint8"},
        {"dtype": "../../x"},
        {"dtype": "float64"},
        {"crc32c": 0},
        {"bytes_of": 2**63, "offset": 2**64 - 1},
    ],
)
def test_hostile_numbers_are_one_sentence_and_no_allocation(path, changes):
    forged(path, **changes)
    run = open_run(path)
    for rows in (None, slice(0, 1)):
        with pytest.raises(LayerscopeError):
            run.tensor("p0", rows=rows)
    assert run.tensor("p1").tolist() == value(1)


def test_the_forgery_itself_is_right_when_nothing_is_changed(path):
    forged(path)
    assert open_run(path).tensor("p0").tolist() == value(0)


def test_a_record_of_an_unknown_dtype_is_listed_and_refused_when_read(path):
    forged(path, dtype="float6_e3m2")
    run = open_run(path)
    with pytest.raises(LayerscopeError, match="cannot hold dtype 'float6_e3m2'"):
        run.tensor("p0")
    assert [e.dtype for e in run.records()] == ["float6_e3m2", "float32", "float32", "float32"]


@pytest.mark.parametrize("point", ["a[[[", "op:", ":"])
def test_a_row_that_names_no_point_is_damage(path, point):
    forged(path, point=point)
    run = open_run(path)
    assert [e.point.name for e in run.records()] == ["p1", "p2", "p3"]
    assert any("does not say what a record must" in damage.reason for damage in run.damaged)


def test_a_note_that_is_none_is_damage(path):
    forged(path, note=b"[1")
    with pytest.raises(Damaged, match="its note does not read back"):
        next(open_run(path).records("p0")).note  # noqa: B018


def test_links_out_of_the_run_are_not_made_from_names(path):
    forged(path, point="../../../etc/passwd:output")
    assert open_run(path).tensor("../../../etc/passwd").tolist() == value(0)


def test_damage_that_shows_in_reading_is_remembered(path, wrong):
    wrong(path / "rank-00000/segment-00000.safetensors", ROOM + 24 + 5)
    run = open_run(path)
    with pytest.raises(Damaged):
        run.tensor("p1")
    [damage] = run.damaged
    assert (damage.file, damage.point) == ("rank-00000/segment-00000.safetensors", "p1:output")
    assert (run.complete, run.state) == (False, "damaged")


def test_a_whole_run_has_no_damage(path):
    run = open_run(path)
    assert (run.damaged, run.notes, run.complete, run.state) == ([], [], True, "complete")


def test_summaries_leave_out_only_what_is_damaged_and_say_why(path, wrong):
    assert "damaged" not in open_run(path).summaries().columns
    wrong(path / "rank-00000/segment-00000.safetensors", ROOM + 24 + 5)
    rows = open_run(path).summaries()
    assert [(row["point"], row["step"]) for row in rows] == [(f"p{n}:output", n) for n in range(4)]
    assert [row["mean"] for row in rows] == [2.5, None, 22.5, 32.5]
    assert [row["damaged"] is None for row in rows] == [True, False, True, True]
    assert "checksum" in rows[1]["damaged"]


# Pieces -----------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path, write):
    """One record of 5000 numbers, sealed."""
    values = np.arange(5000, dtype=np.float32)
    write(tmp_path / "large", [("p", Moment(), values.reshape(50, 100))]).close()
    return tmp_path / "large", values


@pytest.mark.parametrize("items", [1, 7, 4999, 5000, 10**12])
def test_pieces_are_the_tensor_cut_flat(large, items):
    path, values = large
    pieces = list(next(open_run(path).records("p")).pieces(items))
    assert all(piece.numel() == items for piece in pieces[:-1])
    assert torch.cat(pieces).tolist() == values.tolist()


def test_pieces_that_are_held_stay_as_they_were_and_others_share_memory(large):
    path, values = large
    entry = next(open_run(path).records("p"))
    held = list(entry.pieces(100))
    views = [piece[10:20].numpy() for piece in entry.pieces(100)]
    assert torch.cat(held).tolist() == values.tolist()
    assert [view.tolist() for view in views] == values.reshape(50, 100)[:, 10:20].tolist()
    assert len({piece.data_ptr() for piece in entry.pieces(100)}) < 4


@pytest.mark.parametrize("dtype", STORED)
def test_pieces_have_the_recorded_dtype(tmp_path, dtype):
    kind = getattr(torch, dtype)
    raw = np.arange(48 * kind.itemsize, dtype=np.uint8) % 2
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(Point("p"), Moment(), blob=Blob(dtype, (6, 8), raw.nbytes, lambda: raw))
    writer.close()
    run = open_run(tmp_path / "run")
    pieces = list(next(run.records("p")).pieces(20))
    assert [(piece.dtype, piece.numel()) for piece in pieces] == [(kind, 20), (kind, 20), (kind, 8)]
    assert b"".join(piece.view(torch.uint8).numpy().tobytes() for piece in pieces) == raw.tobytes()


def test_pieces_of_a_segment_still_being_written_are_read(tmp_path, write):
    values = np.arange(300, dtype=np.float32)
    writer = write(tmp_path / "run", [("p", Moment(), values)])
    writer.flush()
    entry = next(open_run(tmp_path / "run").records("p"))
    assert list((tmp_path / "run/rank-00000").glob("*.partial"))
    assert torch.cat(list(entry.pieces(64))).tolist() == values.tolist()
    writer.close()
    assert torch.cat(list(entry.pieces(64))).tolist() == values.tolist()


def test_pieces_of_a_remote_run_are_fetched(write):
    values = np.arange(300, dtype=np.float32)
    write("memory://pieces/run", [("p", Moment(), values)]).close()
    entry = next(open_run("memory://pieces/run").records("p"))
    assert torch.cat(list(entry.pieces(64))).tolist() == values.tolist()


def test_a_wrong_bit_is_told_after_the_last_piece_at_the_latest(large, wrong):
    path, _ = large
    wrong(path / "rank-00000/segment-00000.safetensors", ROOM + 700)
    run = open_run(path)
    with pytest.raises(Damaged, match="not what was written"):
        list(next(run.records("p")).pieces(64))
    assert run.damaged[0].point == "p:output"


def test_a_segment_that_is_cut_or_gone_has_no_pieces(large):
    path, _ = large
    entry = next(open_run(path).records("p"))
    segment = path / "rank-00000/segment-00000.safetensors"
    pieces = entry.pieces(64)
    next(pieces)
    os.truncate(segment, ROOM + 900)
    with pytest.raises(Damaged, match="ends before its bytes do"):
        list(pieces)
    with pytest.raises(Damaged, match="are not inside"):
        next(entry.pieces(64))
    segment.unlink()
    with pytest.raises(Damaged, match="there is neither"):
        next(entry.pieces(64))


def test_giving_up_half_way_closes_the_file(large):
    path, _ = large
    entry = next(open_run(path).records("p"))
    opened = left_open()
    for _ in entry.pieces(64):
        break
    assert opened()[1] == []


# Files that somebody else put there --------------------------------------------------------------

SEGMENT = "rank-00000/segment-00001.safetensors"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("run.json", SEGMENT) for kind in ("link", "dangling", "fifo", "folder")),
        *(("rank-00000", kind) for kind in ("link", "dangling")),
    ],
)
def test_a_run_is_not_read_through_links_and_a_pipe_does_not_hang(tmp_path, path, name, kind):
    place, elsewhere = path / name, tmp_path / "elsewhere"
    place.rename(elsewhere)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(elsewhere if kind == "link" else tmp_path / "absent")
    before = sorted(tmp_path.rglob("*"))
    run = open_run(path)
    assert not run.complete
    assert run.damaged or run.notes
    wanted = {"run.json": {0, 1, 2, 3}, "rank-00000": set()}.get(name, {0, 1})
    assert {entry.moment.step for entry in run.records()} == wanted
    for entry in run.records():
        assert entry.tensor().tolist() == value(entry.moment.step)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_may_have_hard_links_and_be_a_link_itself(tmp_path, path):
    os.link(path / "rank-00000/segment-00000.safetensors", tmp_path / "second name")
    (tmp_path / "link").symlink_to(path)
    run = open_run(tmp_path / "link")
    assert run.complete
    assert run.tensor("p1").tolist() == value(1)


def test_a_record_beyond_what_its_columns_say_is_refused_before_anything_is_allocated(path):
    """A footer with a right checksum that speaks of a thousand billion records of one number each."""
    segment = path / "rank-00000/segment-00000.safetensors"
    raw = segment.read_bytes()
    length, _, header = struct.unpack("<QII", raw[-24:-8])
    about = json.loads(zlib.decompress(raw[-24 - length : -24]))
    for changes in (
        {"records": 10**12},
        {"records": -1},
        {"records": "many"},
        {"needs": 5},
        {"points": ["a[[["]},
        {"shapes": [["x"]]},
        {"losses": [3]},
        {"columns": {}},
        {"columns": about["columns"] | {"step": ["U1", [2], 0, 2, 0]}},
        {"columns": about["columns"] | {"step": ["U8", [-2], 0, -2, 0]}},
        {"columns": about["columns"] | {"step": ["U8", [2], -70_000, -69_998, 0]}},
        {"columns": about["columns"] | {"step": ["U8", [2**70], 0, 2**70, 0]}},
    ):
        footer = zlib.compress(json.dumps(about | changes).encode())
        trailer = struct.pack("<QII", len(footer), google_crc32c.value(footer), header) + raw[-8:]
        segment.write_bytes(raw[: -24 - length] + footer + trailer)
        run = open_run(path)
        assert run.damaged
        assert run.tensor("p3").tolist() == value(3)
