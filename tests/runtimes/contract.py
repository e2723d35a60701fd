"""The promises every runtime keeps. A runtime's test file subclasses `Contract` and says how to make its model.

Same points, same values, output unchanged, nothing left behind, exceptions pass through.
"""

from __future__ import annotations

import pytest
import torch

from asserts import assert_no_hooks_left, assert_same_bits
from layerscope.points import Point
from layerscope.runtimes.sink import Seen


class Contract:
    """`prepare(model)` gives what is called; `watch(model, wanted, sink)` and `points(model)` are the runtime's."""

    def prepare(self, model):
        raise NotImplementedError

    def points(self, model):
        raise NotImplementedError

    def watch(self, model, wanted, sink):
        raise NotImplementedError

    def model(self):
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        return self.prepare(made), made, torch.randn(5, 4)

    def test_it_lists_the_modules_that_pytorch_lists(self):
        model, source, _ = self.model()
        assert [place.name for place in self.points(model)] == [name for name, _ in source.named_modules()]
        assert [place.types[0] for place in self.points(model)] == ["Sequential", "Linear", "ReLU", "Linear"]

    def test_it_sees_the_values_that_the_layers_compute(self):
        model, source, x = self.model()
        sink = Seen()
        with self.watch(model, {"0": {"output"}, "2": {"input", "output"}}, sink):
            model(x)
        first = source[0](x)
        expected = {
            Point("0", "output"): first,
            Point("2", "input", (0,)): first.relu(),
            Point("2", "output"): source[2](first.relu()),
        }
        assert [point for _, point, _ in sink.records] == list(expected)
        for _, point, tensor in sink.records:
            assert_same_bits(tensor, expected[point])

    def test_the_output_is_unchanged(self):
        model, _, x = self.model()
        plain = model(x)
        with self.watch(model, {"0": {"output", "input"}, "": {"output"}}, Seen()):
            watched = model(x)
        assert_same_bits(plain, watched)

    def test_each_forward_is_a_step(self):
        model, _, x = self.model()
        sink = Seen()
        with self.watch(model, {"0": {"output"}}, sink):
            model(x)
            model(x + 1)
        assert [moment.step for moment, _, _ in sink.records] == [0, 1]
        assert sink.forwards == [False, False]

    def test_nothing_is_left_behind(self):
        model, _, x = self.model()
        sink = Seen()
        with self.watch(model, {"0": {"output"}}, sink):
            model(x)
        before = len(sink.records)
        model(x)
        assert len(sink.records) == before == 1
        assert_no_hooks_left(model)

    def test_exceptions_pass_through(self):
        model, _, _ = self.model()
        sink = Seen()
        with (
            pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
            self.watch(model, {"0": {"output"}}, sink),
        ):
            model(torch.zeros(1, 3))
        assert sink.forwards == [True]
        assert_no_hooks_left(model)
