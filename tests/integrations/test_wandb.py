"""The W&B sink, offline: what is in the file that `wandb sync` would send."""

import json
import struct

import pytest

from layerscope.errors import MissingExtra

BLOCK = 32768


def records(path):
    """Read a .wandb file: LevelDB's log format behind a header of seven bytes, with W&B's own messages inside."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, part = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def history(folder):
    """Return the rows that were logged, in order; the process that writes them is done when it has gone."""
    import wandb

    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                *above, key = item.nested_key or [item.key]
                within = row
                for word in above:
                    within = within.setdefault(word, {})
                within[key] = json.loads(item.value_json)
            rows.append(row)
    return rows


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No network, and nothing outside the test's folder."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    import wandb

    yield wandb
    wandb.teardown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb.*")
def test_a_run_of_its_own_has_a_row_for_each_frame(offline, frames, alarm, tmp_path):
    from layerscope.integrations.wandb import WandB

    sink = WandB(project="layerscope", dir=tmp_path)
    for frame, _ in frames:
        sink.write(frame)
    sink.alarm(alarm)
    sink.close()
    rows = history(tmp_path)
    assert [row["layerscope/step"] for row in rows] == [0, 1, 2, 2]
    for row, (frame, values) in zip(rows, frames, strict=False):
        array = values["blocks.0:output"]
        assert row["mean/blocks.0:output"] == pytest.approx(array.mean(), rel=1e-5)
        assert row["update_ratio/blocks.0.weight"] == frame.parameters[0].update_ratio
        histogram = row["histogram/blocks.0:output"]
        assert histogram["_type"] == "histogram"
        assert sum(histogram["values"]) == array.size
        assert len(histogram["bins"]) == len(histogram["values"]) + 1
        image = row["attention/blocks.0.attn:output[1]"]
        assert image["_type"] == "image-file"
        (folder,) = tmp_path.glob("wandb/offline-run-*/files")
        assert (folder / image["path"]).is_file()
    assert rows[3]["alarm/exploding"] == 1e9


def test_in_the_callers_run_frames_travel_with_the_callers_rows(offline, frames, tmp_path):
    from layerscope.integrations.wandb import WandB

    run = offline.init(project="layerscope", dir=tmp_path)
    sink = WandB(run=run, histograms=False)
    for frame, _ in frames:
        sink.write(frame)
        run.log({"loss": 1.0}, step=10 * frame.moment.step)
    sink.close()
    assert not run._is_finished
    run.log({"loss": 2.0}, step=30)
    run.finish()
    rows = history(tmp_path)
    assert [row["loss"] for row in rows] == [1.0, 1.0, 1.0, 2.0]
    assert [row["_step"] for row in rows] == [0, 10, 20, 30]
    assert {row["layerscope/step"] for row in rows if "layerscope/step" in row} <= {0, 1, 2}
    assert "mean/blocks.0:output" in rows[0]


def test_settings_beside_a_run_are_refused(offline):
    from layerscope.integrations.wandb import WandB

    with pytest.raises(ValueError, match="run= is a run already; project would be those of another one"):
        WandB(run=object(), project="other")


def test_the_missing_library_is_named_with_its_install_line(without):
    from layerscope.integrations.wandb import WandB

    without("wandb")
    with pytest.raises(MissingExtra, match=r"pip install 'layerscope\[wandb\]'"):
        WandB()
