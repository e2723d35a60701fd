"""run.py: opening and reading what is on disk."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import threading
import warnings
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch

from asserts import left_open
from layerscope.errors import Damaged, LayerscopeError, NewerFormat, NotARun
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run
from layerscope.store.dtypes import STORED
from layerscope.store.segment import ROOM


@pytest.fixture
def path(tmp_path, write):
    """Four records in two sealed segments."""
    values = [np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * n for n in range(4)]
    write(tmp_path / "run", [(f"p{n}", Moment(step=n), v) for n, v in enumerate(values)], segment_tensors=2).close()
    return tmp_path / "run"


def value(n: int) -> list:
    return (np.arange(6).reshape(3, 2) + 10 * n).tolist()


def forged(path: Path, **changes) -> None:
    """Change the first record's line, and give it a right checksum again: what an enemy could do."""
    journal = path / "rank-00000/journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    facts = {k: v for k, v in json.loads(lines[1]).items() if k != "check"} | changes
    body = json.dumps(facts, separators=(",", ":"))[:-1].encode()
    lines[1] = body + b',"check":"%08x"}\n' % google_crc32c.value(body)
    journal.write_bytes(b"".join(lines))


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
    with pytest.raises(NotARun, match=r"is not a run: .*A run is a folder with run.json and rank-00000/journal"):
        open_run(place)


def test_a_newer_format_is_refused(path):
    value = json.loads((path / "run.json").read_text()) | {"version": 2}
    (path / "run.json").write_text(json.dumps(value))
    with pytest.raises(NewerFormat, match="written by format 2; this layerscope reads up to 1"):
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
    monkeypatch.setattr("layerscope.store.run._LARGEST_MANIFEST", 100)
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


def test_a_sealed_tensor_is_a_view_of_the_file_and_writing_into_it_changes_neither_file_nor_run(path):
    run = open_run(path)
    tensor = run.tensor("p1")
    segment = str(path / "rank-00000/segment-00000.safetensors")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(segment)]
    ranges = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in mapped]
    assert any(begin <= tensor.data_ptr() < end for begin, end in ranges)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor += 100
    assert run.tensor("p1").tolist() == value(1)
    assert open_run(path).tensor("p1").tolist() == value(1)


def test_tensors_outlive_the_run_and_its_files(path):
    run = open_run(path)
    tensor = run.tensor("p1")
    run.close()
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


def test_refreshing_shows_what_came_since(tmp_path, write):
    writer = write(tmp_path / "run", [("a", Moment(), np.ones(1))])
    writer.flush()
    run = open_run(tmp_path / "run")
    writer.write(Point("b"), Moment())
    writer.close()
    assert (len(run), run.state) == (1, "recording")
    run.refresh()
    assert (len(run), run.state) == (2, "complete")


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
    with pytest.raises(Damaged, match=r"p1:output at step=1 .* in .*segment-00000.* are not what was written"):
        run.tensor("p1")
    with pytest.raises(Damaged):
        run.tensor("p1", rows=slice(0, 1))
    assert [run.tensor(f"p{n}").tolist() for n in (0, 2, 3)] == [value(n) for n in (0, 2, 3)]


def test_a_flipped_bit_in_a_header_harms_nothing_here(path, wrong):
    for at in (3, 20, 40, 200):
        wrong(path / "rank-00000/segment-00000.safetensors", at)
    run = open_run(path)
    assert [run.tensor(f"p{n}").tolist() for n in range(4)] == [value(n) for n in range(4)]


def test_rows_are_checked_once_and_then_only_read(path, wrong):
    run = open_run(path)
    assert run.tensor("p1", rows=slice(0, 1)).tolist() == value(1)[:1]
    wrong(path / "rank-00000/segment-00000.safetensors", ROOM + 24 + 23)
    assert run.tensor("p1", rows=slice(0, 1)).tolist() == value(1)[:1]
    with pytest.raises(Damaged):
        run.tensor("p1")
    with pytest.raises(Damaged):
        open_run(path).tensor("p1", rows=slice(0, 1))


def test_a_segment_that_is_gone_or_short_is_damage_of_its_tensors(path):
    os.truncate(path / "rank-00000/segment-00000.safetensors", ROOM + 30)
    (path / "rank-00000/segment-00001.safetensors").unlink()
    run = open_run(path)
    files = [f"rank-00000/segment-0000{n}.safetensors" for n in (0, 1, 1)]
    assert [(d.point, d.file) for d in run.damaged] == list(
        zip(["p1:output", "p2:output", "p3:output"], files, strict=True)
    )
    assert (run.complete, run.state) == (False, "damaged")
    assert [note.split()[0] for note in run.notes] == files[:2]
    assert run.tensor("p0").tolist() == value(0)
    with pytest.raises(Damaged, match="which has 65566"):
        run.tensor("p1")
    with pytest.raises(Damaged, match=r"neither .*segment-00001.safetensors nor .*segment-00001.partial"):
        run.tensor("p2")


def test_a_damaged_line_is_listed_and_costs_its_record_only(path, wrong):
    journal = path / "rank-00000/journal"
    wrong(journal, journal.read_bytes().index(b'"record":1') + 12)
    run = open_run(path)
    assert [e.point.name for e in run.records()] == ["p0", "p2", "p3"]
    [damage] = run.damaged
    assert (damage.file, run.complete) == ("rank-00000/journal", False)
    assert "checksum differs" in damage.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 2**62},
        {"offset": 0},
        {"offset": 8},
        {"length": 2**62},
        {"shape": [2**62, 2**62], "length": 2**62},
        {"shape": [2**40], "length": 2**42},
        {"shape": [6, 2**62, 2**62, 0]},
        {"segment": 10**15},
        {"segment": 77},
        {"crc32c": "-1"},
        {"dtype": "qint8"},
        {"dtype": "../../x"},
        {"dtype": "float64"},
        {"crc32c": "ffffffffffffffff"},
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


def test_a_summary_that_does_not_read_back_is_damage(path):
    forged(path, summary={"mean": 5})
    with pytest.raises(Damaged, match="its summary does not read back"):
        open_run(path).summary("p0")


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


def test_a_journal_that_was_cut_between_two_lines_or_is_gone_is_damage(path):
    journal = path / "rank-00000/journal"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    run = open_run(path)
    assert (run.complete, len(run)) == (False, 3)
    assert "speaks of 4 records, and the journals hold 3" in run.damaged[0].reason
    journal.unlink()
    assert not open_run(path).complete


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
