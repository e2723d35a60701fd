"""Orders are found, verified, and called what they are."""

from __future__ import annotations

import pytest
import torch

from layerscope.diagnose.causes.orders import described, nearest_order, order_of

ROWS = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
PLAIN = torch.arange(12)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([1, 0, *range(2, 12)], "with 0 and 1 exchanged"),
        (PLAIN.flip(0), "in reverse order"),
        (PLAIN.roll(1), "rolled by 1"),
        (PLAIN.roll(-2), "rolled by -2"),
        (PLAIN.view(3, 4).T.flatten(), "interleaved, as of 3 blocks read one value at a time"),
        (PLAIN.view(3, 4)[[2, 1, 0]].flatten(), "in another order of blocks of 4"),
        (PLAIN.view(3, 2, 2).transpose(1, 2).flatten(), "within blocks of 4, as the other rotary layout"),
        ([3, 0, 2, 1, *range(4, 12)], "in another order (3 of 12 stand elsewhere)"),
    ],
)
def test_the_order_is_found_and_named(places, words):
    places = torch.as_tensor(places)
    order = order_of(ROWS, ROWS[places].to(torch.bfloat16), axis=0)
    assert order.places == tuple(places.tolist())
    assert order.because.endswith(words)


def test_the_same_order_is_no_order():
    assert order_of(ROWS, ROWS.clone(), axis=0) is None
    assert described(PLAIN) is None


def test_the_same_sums_are_no_order():
    assert order_of(ROWS, ROWS + torch.linspace(0, 1, 5), axis=0) is None
    assert order_of(ROWS, 1.001 * ROWS.flip(0), axis=0) is None


def test_columns_have_an_order_too():
    assert order_of(ROWS, ROWS.flip(1), axis=1).because == "in reverse order"


def test_the_nearest_slices_are_matched_through_noise():
    places = PLAIN.roll(3)
    noisy = ROWS[places] + 0.05 * torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    assert nearest_order(ROWS, noisy, axis=0).tolist() == places.tolist()
    assert nearest_order(ROWS, ROWS[:1].expand(12, 5), axis=0) is None
