from __future__ import annotations

import pytest

from layerscope.errors import BadText
from layerscope.rules import dead, exploding, nonfinite, parse_rule, saturated, stuck, vanishing

RULES = [
    nonfinite(),
    nonfinite(frames=3, action="stop"),
    exploding(limit=1e3, action="snapshot"),
    exploding(growth=2.5, window=4),
    vanishing(limit=1e-9, window=2),
    dead(window=7, limit=0.25),
    saturated(limit=0.99),
    stuck(limit=1e-7, action="stop"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rules_text_reads_back(rule):
    assert parse_rule(str(rule)) == rule


def test_only_what_is_not_usual_is_printed_and_blanks_do_not_matter():
    assert str(exploding()) == "exploding()"
    assert parse_rule("  exploding ( limit = 1e3 ,action=stop)  ") == exploding(limit=1000.0, action="stop")
    assert parse_rule("nonfinite") == nonfinite()


def test_rules_compare_by_their_settings_and_not_by_what_they_saw():
    assert exploding() == exploding()
    assert exploding() != exploding(limit=2.0)
    assert exploding() != vanishing()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("explodes", "there are nonfinite, exploding"),
        ("exploding(height=3)", "no setting height; it has action, growth, limit, window"),
        ("exploding(3)", "'3' is not setting=value"),
        ("exploding(limit=-1)", "a number above 0"),
        ("exploding(limit=many)", "is not a rule"),
        ("exploding(action=shout)", "warn, snapshot, stop"),
        ("exploding(limit=1", "is not a rule"),
        ("__import__('os')", "is not a rule"),
    ],
)
def test_what_is_not_a_rule_is_refused_with_what_is(text, said):
    with pytest.raises(BadText, match=said.replace("(", r"\(")):
        parse_rule(text)
