"""The promises every runtime keeps. A runtime's test file subclasses `Contract` and says how to make its model.

Same points, same values, output unchanged, nothing left behind, exceptions pass through; for inputs other than those
the model was compiled with, too. The oracle is the source model, whose layers the tests call themselves.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import layerscope as ls
from asserts import assert_same_bits, hooks_on
from layerscope.points import Point
from layerscope.runtimes import find
from seen import Seen


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Both(nn.Module):
    """Returns two tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x * 2


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = Both()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x)
        return a + b


class Named(nn.Module):
    """Returns a dict of tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.layer(x), "doubled": x * 2}


class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.named = Named()

    def forward(self, x: Tensor) -> Tensor:
        found = self.named(x)
        return found["hidden"] + found["doubled"]


class Attention(nn.Module):
    """Uses the weights that nn.MultiheadAttention returns beside its output."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attn(x, x, x, need_weights=True)
        assert weights is not None
        return out + weights.sum(-1, keepdim=True)


class Repeated(nn.Module):
    """Calls one layer three times, with something between."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x).relu()).relu())


class InPlace(nn.Sequential):
    """Changes in place what a layer returned."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))


class Given(NamedTuple):
    """What a runtime watches, the model it was made from, and inputs that it was made with."""

    watched: object
    source: nn.Module
    x: Tensor


class Prepared:
    """`prepare(model, x)` gives what is watched; its batch, and its length where it has one, are not to be fixed."""

    rtol = 0.0  # the runtime's own rounding, relative to the largest value; 0 for the same bits
    raises = "shapes cannot be multiplied"

    def prepare(self, model: nn.Module, x: Tensor) -> object:
        raise NotImplementedError

    def given(self, kind: type[nn.Module], *shape: int) -> Given:
        return _given(type(self), kind, shape or (5, 4))

    def seen(self, given: Given, wanted, *inputs: Tensor) -> Seen:
        sink = Seen()
        with find(given.watched).watch(given.watched, wanted, sink) as call, torch.no_grad():
            for x in inputs or (given.x,):
                call(x)
        assert sink.failures == []
        return sink

    def assert_equal(self, found: Tensor, expected: Tensor) -> None:
        if self.rtol:
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=0, atol=self.rtol * float(expected.detach().abs().max()))
        else:
            assert_same_bits(found, expected)

    def assert_among(self, expected: list[Tensor], found: list[Tensor]) -> None:
        """Every expected value is there; traced and exported modules may return them in another order."""
        assert len(found) >= len(expected)
        for value in expected:
            alike = [t for t in found if t.shape == value.shape]
            assert any(torch.allclose(t, value, rtol=0, atol=1e-6) for t in alike)


class Contract(Prepared):
    """The promises: a runtime keeps all of them; another way into the same one may borrow a few."""

    def test_it_lists_the_modules_that_pytorch_lists(self):
        given = self.given(Plain)
        places = find(given.watched).points(given.watched)
        assert [place.name for place in places] == [name for name, _ in given.source.named_modules()]
        assert [place.types[0] for place in places] == ["Plain", "Linear", "ReLU", "Linear"]

    def test_it_sees_the_values_that_the_layers_compute(self):
        given = self.given(Plain)
        first = given.source[0](given.x)
        expected = {
            Point("0", "output"): first,
            Point("2", "input", (0,)): first.relu(),
            Point("2", "output"): given.source[2](first.relu()),
        }
        sink = self.seen(given, {"0": {"output"}, "2": {"input", "output"}})
        assert [point for _, point, _ in sink.records] == list(expected)
        for _, point, tensor in sink.records:
            self.assert_equal(tensor, expected[point])

    def test_the_whole_model_is_a_point(self):
        given = self.given(Plain)
        sink = self.seen(given, {"": {"input", "output"}})
        assert [str(point) for _, point, _ in sink.records] == [".:input[0]", ".:output"]
        assert_same_bits(sink.records[0][2], given.x)
        self.assert_equal(sink.records[1][2], given.source(given.x))

    def test_the_output_is_unchanged(self):
        given = self.given(Plain)
        outputs = []
        for wanted in ({}, {"0": {"output", "input"}, "1": {"output"}, "": {"output"}}):
            with find(given.watched).watch(given.watched, wanted, Seen()) as call, torch.no_grad():
                outputs.append(call(given.x))
        assert_same_bits(*outputs)

    def test_values_are_those_of_each_input_and_not_of_the_one_it_was_made_with(self):
        given = self.given(Plain)
        inputs = [given.x, given.x * -3 + 1]
        sink = self.seen(given, {"0": {"output"}, "2": {"output"}}, *inputs)
        expected = [value for x in inputs for value in (given.source[0](x), given.source(x))]
        assert len(sink.records) == 4
        for (_, _, tensor), value in zip(sink.records, expected, strict=True):
            self.assert_equal(tensor, value)

    @pytest.mark.parametrize("shape", [(2, 3, 4), (3, 7, 4)])
    def test_batch_and_length_may_change(self, shape):
        given = self.given(Attention, 2, 5, 4)
        x = torch.randn(shape)
        out, weights = given.source.attn(x, x, x)
        sink = self.seen(given, {"attn": {"output"}}, x)
        self.assert_among([out, weights], [tensor for _, _, tensor in sink.records])

    def test_each_forward_is_a_step(self):
        given = self.given(Plain)
        sink = self.seen(given, {"0": {"output"}}, given.x, given.x + 1)
        assert [moment.step for moment, _, _ in sink.records] == [0, 1]
        assert sink.forwards == [False, False]

    def test_k_calls_are_k_records(self):
        given = self.given(Repeated)
        layer, x = given.source.layer, given.x
        expected = [layer(x), layer(layer(x).relu()), given.source(x)]
        sink = self.seen(given, {"layer": {"output"}})
        assert [moment.call for moment, _, _ in sink.records] == [0, 1, 2]
        for (_, _, tensor), value in zip(sink.records, expected, strict=True):
            self.assert_equal(tensor, value)

    def test_a_value_is_seen_before_it_is_changed_in_place(self):
        given = self.given(InPlace)
        sink = self.seen(given, {"0": {"output"}, "1": {"output"}})
        before = given.source[0](given.x)
        assert bool((before < 0).any())
        self.assert_equal(sink.records[0][2], before)
        self.assert_equal(sink.records[1][2], before.relu())

    @pytest.mark.parametrize(("kind", "name"), [(Tuples, "both"), (Dicts, "named")])
    def test_every_tensor_of_a_nested_output_is_seen(self, kind, name):
        given = self.given(kind)
        value = given.source.get_submodule(name)(given.x)
        sink = self.seen(given, {name: {"output"}})
        expected = list(value.values()) if isinstance(value, dict) else list(value)
        self.assert_among(expected, [tensor for _, _, tensor in sink.records])

    def test_nothing_is_left_behind(self):
        given = self.given(Plain)
        sink = self.seen(given, {"0": {"output"}})
        with find(given.watched).watch(given.watched, {}, Seen()) as call:
            call(given.x)
        assert len(sink.records) == 1
        assert hooks_on(given.source) == 0
        if isinstance(given.watched, nn.Module):
            given.watched(given.x)
            assert len(sink.records) == 1

    def test_exceptions_pass_through(self):
        given = self.given(Plain)
        sink = Seen()
        runtime = find(given.watched)
        with (
            pytest.raises(Exception, match=self.raises),
            runtime.watch(given.watched, {"0": {"output"}}, sink) as call,
        ):
            call(torch.zeros(1, 3))
        assert sink.forwards == [True]
        assert len(self.seen(given, {"0": {"output"}}).records) == 1

    def test_a_recording_is_complete_and_names_its_runtime(self, tmp_path):
        given = self.given(Plain)
        with ls.record(given.watched, ["0", "2:input,output"], to=tmp_path / "run") as rec, torch.no_grad():
            out = rec.model(given.x)
        self.assert_equal(rec["2"], out)
        assert rec.missing == []
        run = ls.open_run(tmp_path / "run")
        assert run.manifest.runtime == find(given.watched).NAME
        assert [str(point) for point in run.points] == ["0:output", "2:input[0]", "2:output"]

    def test_a_module_used_without_a_call_is_missing_with_the_reason(self):
        given = self.given(Attention, 2, 5, 4)
        with ls.record(given.watched, ["attn", "attn.out_proj"]) as rec, torch.no_grad():
            rec.model(given.x)
        [missing] = rec.missing
        assert missing.point == "attn.out_proj:output"
        assert missing.reason.startswith("called functionally: ")
        with (
            pytest.raises(RuntimeError, match="called functionally"),
            ls.record(given.watched, ["attn", "attn.out_proj"], on_error="raise") as rec,
            torch.no_grad(),
        ):
            rec.model(given.x)

    def test_forwards_that_are_not_due_pass_untouched(self):
        given = self.given(Plain)
        with ls.record(given.watched, "0", when="steps(1)") as rec, torch.no_grad():
            outputs = [rec.model(given.x) for _ in range(3)]
        assert [moment.step for moment in rec.run.moments] == [1]
        for out in outputs:
            self.assert_equal(out, given.source(given.x))


@functools.cache
def _given(contract: type[Prepared], kind: type[nn.Module], shape: tuple[int, ...]) -> Given:
    torch.manual_seed(0)
    source = kind().eval()
    x = torch.randn(shape)
    return Given(contract().prepare(source, x), source, x)
