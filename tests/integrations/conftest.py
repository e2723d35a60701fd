"""A model that remembers what it was given: the oracle of what a framework did with its batches."""

import pytest
import torch


class Remembering(torch.nn.Module):
    """`seen` passes the samples' numbers on as they are; `calls` has those of every forward, and whether it trained."""

    def __init__(self):
        super().__init__()
        self.seen = torch.nn.Identity()
        self.lin = torch.nn.Linear(1, 1)
        self.calls = []

    def forward(self, x, labels=None):
        self.calls.append((self.training, x.detach().clone()))
        loss = self.lin(self.seen(x)).square().mean() * 1e-6
        return {"loss": loss, "logits": x}

    @property
    def trained(self):
        """What was trained on, in order."""
        return [x for training, x in self.calls if training]


@pytest.fixture
def model():
    return Remembering()


@pytest.fixture
def samples():
    """Ten samples, told apart by their numbers."""
    return [torch.tensor([float(i)]) for i in range(10)]


@pytest.fixture
def full(tmp_path):
    """Make a Monitor of every batch of some epochs: `full(model, epochs, layer="seen")`."""
    from layerscope.monitor import Monitor

    def make(model, epochs, *, layer="seen", to="out"):
        return Monitor(model, {layer: {"record_type": "epoch_full"}}, epochs, tmp_path / to)

    return make


@pytest.fixture
def recorded():
    """Read what a Monitor recorded: {(epoch, batch): tensor}, every call of it one entry."""

    def read(monitor):
        found = {}
        for entry in monitor.run.records():
            key = (entry.moment.epoch, entry.moment.batch)
            assert key not in found, f"{key} was recorded twice"
            found[key] = entry.tensor()
        return found

    return read


@pytest.fixture
def assert_samples_noted():
    """Check that every record's note has the numbers of the samples that went through it."""

    def check(monitor, count):
        entries = list(monitor.run.records())
        assert len(entries) == count
        for entry in entries:
            assert entry.note == {"sample_indices": [int(x) for x in entry.tensor().flatten()]}

    return check


@pytest.fixture
def assert_same():
    def check(found, expected):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert torch.equal(found[key], value), key

    return check


@pytest.fixture
def frames():
    """Three frames of known values, and the values: [(frame, {point: array})]."""
    from layerscope.points import Moment, Point
    from layerscope.rules import Frame, ParameterReading, Reading
    from layerscope.stats import summarize

    def make(step):
        rng = torch.Generator().manual_seed(step)
        values = {
            "blocks.0:output": torch.randn(64, 8, generator=rng) * (step + 1),
            "blocks.0:grad_output": torch.randn(64, 8, generator=rng) * 1e-3,
            "head:output[0]": torch.tensor([1.0, float("nan"), 3.0, float("inf")]),
        }
        gradient = torch.randn(8, generator=rng)
        frame = Frame(
            Moment(epoch=step // 2, step=step, batch=step % 2),
            tuple(Reading(Point.parse(text), summarize(tensor)) for text, tensor in values.items()),
            (
                ParameterReading("blocks.0.weight", 0.5, summarize(gradient), 0.01 * (step + 1)),
                ParameterReading("blocks.0.bias", 0.25),
            ),
            {"blocks.0.attn:output[1]": torch.rand(3, 4, 5, generator=rng)},
        )
        return frame, {text: tensor.double().numpy() for text, tensor in values.items()}

    return [make(step) for step in range(3)]


@pytest.fixture
def alarm():
    from layerscope.points import Moment, Point
    from layerscope.rules import Alarm

    return Alarm("exploding", Point("blocks.0"), Moment(epoch=1, step=2), 1e9, 1e4, "it grew tenfold in a step")


@pytest.fixture
def without(monkeypatch):
    """Have a library be missing: `without("wandb")`."""
    import sys

    def hide(name):
        for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.setitem(sys.modules, name, None)

    return hide
