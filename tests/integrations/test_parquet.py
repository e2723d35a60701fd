"""The Parquet sink, read back with pandas."""

import math

import numpy as np
import pytest

from layerscope.errors import MissingExtra, RunExists
from layerscope.integrations.parquet import Parquet


def read(folder):
    import pandas as pd

    return pd.read_parquet(folder)


def test_a_row_for_each_point_and_step(frames, tmp_path):
    sink = Parquet(tmp_path / "rows.parquet")
    for frame, _ in frames:
        sink.write(frame)
    sink.close()
    table = read(tmp_path / "rows.parquet")
    assert len(table) == 3 * (3 + 2)
    for frame, values in frames:
        for text, array in values.items():
            (row,) = table[(table.step == frame.moment.step) & (table.point == text)].to_dict("records")
            finite = array[np.isfinite(array)]
            assert (row["epoch"], row["batch"]) == (frame.moment.epoch, frame.moment.batch)
            assert (row["count"], row["finite"], row["nan"]) == (array.size, finite.size, np.isnan(array).sum())
            assert row["mean"] == pytest.approx(finite.mean(), rel=1e-5)
            assert row["l2"] == pytest.approx(np.linalg.norm(finite), rel=1e-5)
            assert row["shape"] == "x".join(map(str, array.shape))
    parameter = table[table.side == "parameter"]
    assert parameter.name.tolist() == ["blocks.0.weight", "blocks.0.bias"] * 3
    assert parameter.update_ratio.dropna().tolist() == [0.01, 0.02, 0.03]
    assert math.isnan(parameter[parameter.name == "blocks.0.bias"]["mean"].iloc[0])


def test_it_is_read_while_it_grows(frames, tmp_path):
    sink = Parquet(tmp_path, seconds=0)
    for n, (frame, _) in enumerate(frames, start=1):
        sink.write(frame)
        assert sorted(set(read(tmp_path).step)) == list(range(n))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000-000000.parquet"]  # one file, written anew


def test_what_was_not_written_yet_is_what_a_crash_takes(frames, tmp_path):
    sink = Parquet(tmp_path, seconds=3600)
    sink.write(frames[0][0])
    sink.flush()
    sink.write(frames[1][0])
    assert set(read(tmp_path).step) == {0}
    sink.close()
    assert set(read(tmp_path).step) == {0, 1}


def test_a_full_file_is_followed_by_another(frames, tmp_path):
    sink = Parquet(tmp_path, seconds=3600, rows=8)
    for frame, _ in frames * 2:
        sink.write(frame)
    sink.close()
    assert len(list(tmp_path.glob("rank-00000-*.parquet"))) == 3
    assert len(read(tmp_path)) == 6 * 5


def test_an_alarm_is_there_at_once(frames, alarm, tmp_path):
    sink = Parquet(tmp_path, seconds=3600)
    sink.write(frames[0][0])
    sink.alarm(alarm)
    table = read(tmp_path)
    (row,) = table[table.alarm.notna()].to_dict("records")
    assert (row["alarm"], row["point"], row["step"], row["value"]) == ("exploding", "blocks.0:output", 2, 1e9)
    assert row["because"] == "it grew tenfold in a step"
    assert len(table) == 6


def test_a_folder_with_rows_is_refused_unless_asked_to_go_on(frames, tmp_path):
    first = Parquet(tmp_path)
    first.write(frames[0][0])
    first.close()
    with pytest.raises(RunExists, match="has rows already"):
        Parquet(tmp_path)
    again = Parquet(tmp_path, append=True)
    again.write(frames[1][0])
    again.close()
    assert set(read(tmp_path).step) == {0, 1}


def test_ranks_write_side_by_side(frames, tmp_path, monkeypatch):
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        sink = Parquet(tmp_path)
        sink.write(frames[0][0])
        sink.close()
    assert len(read(tmp_path)) == 2 * 5


def test_the_missing_library_is_named_with_its_install_line(without, tmp_path):
    without("pyarrow")
    with pytest.raises(MissingExtra, match=r"pip install 'layerscope\[parquet\]'"):
        Parquet(tmp_path)


def test_rows_that_the_disk_refused_come_with_the_next_and_memory_does_not_fill(frames, tmp_path):
    folder = tmp_path / "rows.parquet"
    sink = Parquet(folder, seconds=0, rows=20)
    folder.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            sink.write(frames[0][0])
    (tmp_path / "away").rename(folder)
    sink.close()
    assert len(read(folder)) == 10
    sink = Parquet(folder, seconds=0, rows=20, append=True)
    folder.rename(tmp_path / "away")
    for _ in range(50):
        with pytest.raises(OSError, match="No such file"):
            sink.write(frames[0][0])
        assert sum(batch.num_rows for batch in sink._batches) < 20
    (tmp_path / "away").rename(folder)
    sink.write(frames[1][0])
    sink.close()
    assert 15 <= len(read(folder)) < 30
