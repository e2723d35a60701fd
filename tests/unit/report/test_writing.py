"""Numbers and names as every page writes them."""

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerscope.report.writing import aligned, bar, middle, number, percent, printable, shares, size, spark, write


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.000"),
        (-3.14159265, "-3.142"),
        (0.0001234567, "1.235e-4"),
        (0.001234567, "0.001235"),
        (9999.6, "10000"),
        (99994.4, "99994"),
        (99999.4, "1.000e5"),
        (123456.0, "1.235e5"),
        (0.99996, "1.000"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_four_digits_that_mean_something(value, written):
    assert number(value) == written


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_what_is_written_is_within_half_a_unit_of_the_fourth_digit(value):
    assert float(number(value)) == pytest.approx(value, rel=5.1e-4, abs=5e-324)


@given(st.floats(min_value=0, max_value=1))
def test_only_nothing_is_zero_percent_and_only_everything_is_a_hundred(share):
    assert (percent(share) == "0") == (share == 0)
    assert (percent(share) == "100%") == (share == 1)


def test_sizes_do_not_round_up_to_1024_of_a_unit():
    assert [size(n) for n in (1023, 1024, 1024 * 1024 - 1, 1 << 50)] == ["1023 B", "1.0 KiB", "1.0 MiB", "1.0 PiB"]


@pytest.mark.parametrize(
    ("value", "kind", "written"),
    [
        (None, "number", "-"),
        ("", "text", "-"),
        (True, "count", "yes"),
        (1234567, "count", "1,234,567"),
        (1234567, "number", "1.235e6"),
        (0.25, "percent", "25.0%"),
        (2048, "bytes", "2.0 KiB"),
        ((1, 2), "count", "1, 2"),
        (math.nan, "percent", "nan"),
    ],
)
def test_a_value_is_written_as_its_column_asks(value, kind, written):
    assert write(value, kind) == written


def test_points_stand_under_each_other():
    texts = aligned(["1.5", "-10.25", "nan", "7", ">=0.125", "1.000e-9"])
    points = {t.index(".") for t in texts if "." in t}
    assert len(points) == 1
    assert len({len(t) for t in texts}) == 1
    assert texts[3].rstrip().endswith("7")
    assert texts[3].index("7") == points.pop() - 1


@given(st.text())
def test_no_character_that_steers_a_terminal_or_hides_survives(text):
    written = printable(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in written)
    assert not any(c in "\u202e\u2066\u200b\ufeff\u200f" for c in written)


def test_control_characters_are_written_out_and_the_rest_is_kept():
    assert printable("a\x1b]0;evil\x07\x9b31m\n层\u202eb") == "a\\u001b]0;evil\\u0007\\u009b31m\\u000a层\\u202eb"


def test_names_are_shortened_in_the_middle_and_only_when_they_must():
    assert middle("model.layers.0", 14) == "model.layers.0"
    short = middle("model.layers.11.self_attn.q_proj", 20)
    assert len(short) == 20
    assert short.startswith("model.")
    assert short.endswith(".q_proj")
    assert [len(middle("abcdef", width)) for width in range(7)] == [0, 1, 2, 3, 4, 5, 6]


def test_bars_are_proportional_and_leave_a_mark_for_anything_above_nothing():
    assert [bar(s, 8) for s in (0.0, 0.25, 1.0, 2.0, math.nan)] == ["", "██", "█" * 8, "█" * 8, ""]
    assert bar(1e-30, 8) == "▏"
    assert bar(0.5, 8, ascii_only=True) == "####"


def test_shares_are_of_the_largest_finite_value():
    assert shares([1.0, 2.0, 4.0, math.inf, math.nan, 0.0, -1.0]) == [0.25, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert shares([1.0, 10.0, 100.0], log=True) == pytest.approx([0.1, 0.55, 1.0])
    assert shares([math.nan]) == [0.0]


def test_a_spark_shows_the_largest_of_each_share_and_marks_what_is_not_finite():
    assert spark([0.0, 1.0], 10) == "▁█"
    assert spark([5.0, 5.0, 5.0], 10) == "▁▁▁"
    assert spark([0.0, math.nan, 1.0], 10) == "▁!█"
    many = [0.0] * 1000
    many[500] = 1.0
    drawn = spark(many, 20)
    assert len(drawn) == 20
    assert drawn.count("█") == 1
    assert spark([-1e308, 1e308], 4) == "▁█"


def test_a_logarithmic_spark_gives_each_decade_its_step():
    assert spark([10.0**i for i in range(8)], 10, log=True) == "▁▂▃▄▅▆▇█"
    assert spark([1e-3, 1e-3], 10, log=True) == "▁▁"
    assert spark([0.0, -1.0, math.nan, None, 1.0, 100.0], 10, log=True) == "00! ▁█"
    assert spark([0.0, 0.0], 10, log=True) == "00"


def test_a_spark_over_a_span_keeps_to_it():
    assert spark([1.0, 2.0], 10, span=(0.0, 7.0)) == "▂▃"
    assert spark([-5.0, 50.0], 10, span=(0.0, 7.0)) == "▁█"


def test_gaps_do_not_hide_what_stands_beside_them():
    assert spark([None, 3.0, None, None, 1.0, None], 3) == "█ ▁"
    assert spark([None, None], 1) == " "


def test_a_mapping_is_written_as_its_pairs():
    assert write({"a": 1, "b\x1b": [0.5, None]}) == "a 1, b\\u001b 0.5000, -"
