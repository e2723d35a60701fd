"""The TensorBoard sink, read back with TensorBoard's own reader."""

import io

import numpy as np
import pytest
import torch

from layerscope.errors import MissingExtra, Unsupported


@pytest.fixture
def read(tmp_path):
    """Read the event files of a folder."""

    def load(folder=tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"histograms": 0, "images": 0, "scalars": 0})
        events.Reload()
        return events

    return load


@pytest.fixture
def board():
    from layerscope.integrations.tensorboard import TensorBoard

    return TensorBoard


def test_scalars_are_those_of_the_values(board, read, frames, tmp_path):
    sink = board(tmp_path)
    for frame, _ in frames:
        sink.write(frame)
    sink.close()
    events = read()
    for text in ("blocks.0:output", "blocks.0:grad_output"):
        for word, of in {
            "mean": np.mean,
            "std": np.std,
            "absmax": lambda v: np.abs(v).max(),
            "l2": np.linalg.norm,
        }.items():
            points = events.Scalars(f"{word}/{text}")
            assert [p.step for p in points] == [0, 1, 2]
            assert [p.value for p in points] == pytest.approx([of(values[text]) for _, values in frames], rel=1e-5)
    assert [p.value for p in events.Scalars("nonfinite/head:output[0]")] == [2, 2, 2]
    assert "nonfinite/blocks.0:output" not in events.Tags()["scalars"]
    assert [p.value for p in events.Scalars("update_ratio/blocks.0.weight")] == pytest.approx([0.01, 0.02, 0.03])
    assert [p.value for p in events.Scalars("weight_rms/blocks.0.bias")] == [0.25] * 3
    assert "update_ratio/blocks.0.bias" not in events.Tags()["scalars"]


def test_histograms_count_the_values_as_numpy_does(board, read, frames, tmp_path):
    sink = board(tmp_path)
    for frame, _ in frames:
        sink.write(frame)
    sink.close()
    written = read().Histograms("histogram/blocks.0:output")
    assert [event.step for event in written] == [0, 1, 2]
    for event, (_, values) in zip(written, frames, strict=True):
        told, array = event.histogram_value, values["blocks.0:output"].reshape(-1)
        assert (told.min, told.max, told.num) == (array.min(), array.max(), array.size)
        assert told.sum == pytest.approx(array.sum(), abs=1e-4)
        assert told.sum_squares == pytest.approx((array**2).sum(), rel=1e-5)
        edges = [-np.inf, *told.bucket_limit]
        assert list(told.bucket) == np.histogram(array, edges)[0].tolist()
        assert 20 < len(told.bucket) < 200


def test_without_sketches_there_are_scalars_and_no_histograms(board, read, tmp_path):
    from layerscope.points import Moment, Point
    from layerscope.rules import Frame, Reading
    from layerscope.stats import summarize

    sink = board(tmp_path)
    sink.write(Frame(Moment(), (Reading(Point("a"), summarize(torch.ones(3), level="moments")),)))
    sink.close()
    tags = read().Tags()
    assert tags["histograms"] == []
    assert "mean/a:output" in tags["scalars"]


def test_attention_is_an_image_with_the_brightest_where_the_weight_is_largest(board, read, frames, tmp_path):
    from PIL import Image

    frame, _ = frames[0]
    sink = board(tmp_path)
    sink.write(frame)
    sink.close()
    (event,) = read().Images("attention/blocks.0.attn:output[1]")
    pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("L"))
    weights = frame.images["blocks.0.attn:output[1]"].numpy()
    times = 64 // 5  # a head of 4 x 5 is enlarged
    head, query, key = np.unravel_index(weights.argmax(), weights.shape)
    row, column = divmod(int(head), 2)
    at = (row * (4 * times + 2) + query * times, column * (5 * times + 2) + key * times)
    assert pixels.shape == (2 * 4 * times + 2, 2 * 5 * times + 2)
    assert pixels[at] == 255 == pixels.max()


def test_an_alarm_is_there_at_once(board, read, alarm, tmp_path):
    sink = board(tmp_path)
    sink.alarm(alarm)
    events = read()  # before the sink is closed
    (event,) = events.Tensors("alarm/exploding/text_summary")
    assert event.step == 2
    assert b"it grew tenfold in a step" in event.tensor_proto.string_val[0]
    sink.close()


def test_an_unknown_statistic_is_refused(board, tmp_path):
    with pytest.raises(Unsupported, match="no statistic is called 'average'; there are mean, std"):
        board(tmp_path, statistics=["average"])


def test_the_missing_library_is_named_with_its_install_line(board, without, tmp_path):
    without("torch.utils.tensorboard")
    without("tensorboard")
    with pytest.raises(MissingExtra, match=r"pip install 'layerscope\[tensorboard\]'"):
        board(tmp_path)


def test_a_watch_writes_what_it_saw(board, read, tmp_path):
    from layerscope.monitor import watch

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    means = []
    with watch(model, optimizer, taps="0", statistics="full", gradients=True, parameters=True, sinks=[board(tmp_path)]):
        for _ in range(4):
            x = torch.randn(5, 2)
            means.append((x.double() @ model[0].weight.double().T + model[0].bias.double()).mean().item())
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = read()
    assert [(p.step, p.value) for p in events.Scalars("mean/0:output")] == [
        (step, pytest.approx(mean, abs=1e-6)) for step, mean in enumerate(means)
    ]
    assert "l2/0:grad_output" in events.Tags()["scalars"]
    assert "histogram/0.weight:gradient" in events.Tags()["histograms"]


class Broken:
    def write(self, frame):
        raise OSError("the disk is full")

    alarm = write

    def close(self):
        raise OSError("the disk is full")


def test_a_sink_that_fails_is_said_once_and_training_goes_on(board, read, tmp_path, caplog):
    from layerscope.monitor import watch

    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, sinks=[Broken(), board(tmp_path)]):
        for _ in range(3):
            model(torch.randn(5, 2)).sum().backward()
            optimizer.step()
    assert sum("Broken" in record.message and "write" in record.message for record in caplog.records) == 1
    assert [p.step for p in read().Scalars("mean/0:output")] == [0, 1, 2]
