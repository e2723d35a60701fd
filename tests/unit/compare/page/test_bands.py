"""Bands say the published words, read back, and refuse what could not be meant."""

import math

import pytest

from compared import metrics
from layerscope.compare.page.bands import PUBLISHED, Band, Bands
from layerscope.errors import BadText


@pytest.mark.parametrize(
    ("mse", "word"),
    [
        (0.0, "very close"),
        (9.9e-5, "very close"),
        (1e-4, "good"),
        (9e-4, "good"),
        (1e-3, "fair"),
        (1e-2, "large"),
        (math.inf, "large"),
        (math.nan, "undefined"),
    ],
)
def test_the_published_levels_of_mse(mse, word):
    assert PUBLISHED.word("mse", mse) == word


@pytest.mark.parametrize(
    ("correlation", "word"),
    [
        (1.0, "nearly perfect"),
        (0.9999, "excellent"),
        (0.9991, "excellent"),
        (0.999, "good"),
        (0.99, "attention"),
        (-1.0, "attention"),
        (math.nan, "undefined"),
    ],
)
def test_the_published_levels_of_correlation(correlation, word):
    assert PUBLISHED.word("correlation", correlation) == word


def test_every_band_and_all_of_them_read_back():
    for band in PUBLISHED:
        assert Band.parse(str(band)) == band
    assert Bands.parse(str(PUBLISHED)) == PUBLISHED
    odd = Band("sqnr", "so-so, really", ">", math.inf)
    assert Band.parse(str(odd)) == odd


def test_bands_of_one_measure_replace_the_published_ones_and_leave_the_others():
    mine = PUBLISHED | Bands.parse("mse < 1e-6: fine; mse: off  # ours")
    assert mine.word("mse", 1e-5) == "off"
    assert mine.word("correlation", 1.0) == "nearly perfect"
    assert mine.measures == ["correlation", "mse"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "say nothing"),
        ("# nothing", "say nothing"),
        ("mse", "is not a band"),
        ("mse < : x", "is not a band"),
        ("mse < tiny: x", "'tiny'.*is not a number"),
        ("mse < nan: x; mse: y", "limit that is a number"),
        ("mean < 1: x; mean: y", "'mean' is not a measure.*relative_l2"),
        ("mse < 1: x", "the last band of mse"),
        ("mse: y; mse < 1: x", "the last band of mse"),
        ("mse < 1: x; mse > 2: y; mse: z", "both ways"),
        ("mse < 1: x; mse < 0.1: y; mse: z", "not in order"),
        ("cosine > 0.9: x; cosine > 0.99: y; cosine: z", "not in order"),
        ("mse < 1: x; mse: x", "the same word"),
        ("mse < 1: undefined; mse: x", "'undefined' cannot be"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_named(text, says):
    with pytest.raises(BadText, match=says):
        Bands.parse(text)


def test_a_level_means_that_band_or_a_worse_one():
    fair = metrics(mse=5e-3, correlation=0.9995)
    assert PUBLISHED.at_or_beyond("fair", fair) == ["mse"]
    assert PUBLISHED.at_or_beyond("very-close", fair) == ["mse"]
    assert PUBLISHED.at_or_beyond("large", fair) == []
    assert PUBLISHED.at_or_beyond("good", fair) == ["mse"]
    assert PUBLISHED.at_or_beyond("correlation:excellent", fair) == ["correlation"]
    assert PUBLISHED.at_or_beyond("correlation:good", fair) == []
    with pytest.raises(BadText, match="no band is called 'bad'; there is mse: very close, good, fair, large"):
        PUBLISHED.at_or_beyond("bad", fair)


def test_undefined_is_worse_than_any_band_unless_both_sides_are_equal():
    alike = metrics(mse=0.0, correlation=math.nan, equal=8)
    assert PUBLISHED.at_or_beyond("attention", alike) == []
    collapsed = metrics(mse=1e-9, correlation=math.nan, equal=0)
    assert PUBLISHED.at_or_beyond("attention", collapsed) == ["correlation"]
    assert PUBLISHED.at_or_beyond("large", collapsed) == []
    assert PUBLISHED.at_or_beyond("large", metrics(mse=1e-9, nan=1)) == ["mse"]
