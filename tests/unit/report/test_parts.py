"""Parts refuse what no renderer could draw."""

import pytest

from layerscope.report import Column, Data, Document, Fact, Facts, Notes, Profile, Sentence, Table


def test_a_row_of_another_length_than_the_columns_is_refused_and_named():
    with pytest.raises(ValueError, match=r"row 1 of table 'points' has 1 cells for 2 columns"):
        Table.of("points", [Column("a", "a"), Column("b", "b")], [(1, 2), (3,)])


def test_a_profile_needs_a_label_for_every_value():
    with pytest.raises(ValueError, match="1 labels for 2 values"):
        Profile("rms", "rms", ("a",), (1.0, 2.0))


def test_two_parts_of_one_key_are_refused_because_json_would_lose_one():
    facts = Facts("run", (Fact("a", 1),))
    with pytest.raises(ValueError, match="called run"):
        Document("t", (facts, facts))
    with pytest.raises(ValueError, match="called title"):
        Document("t", (Facts("title", ()),))
    with pytest.raises(ValueError, match="called run"):
        Document("t", (facts, Table.of("run", [], [])))


def test_tables_may_share_a_key():
    table = Table.of("points", [Column("a", "a")], [(1,)])
    assert Document("t", (table, table)).parts == (table, table)


def test_notes_show_ten_and_count_the_rest_but_never_one_alone():
    def notes(n: int) -> list[str]:
        return [s.text for s in Notes("missing", tuple(Sentence(str(i)) for i in range(n))).shown]

    assert notes(10)[-1] == "9"
    assert notes(11)[-1] == "10"
    assert notes(12)[-1] == "and 2 more"
    assert len(notes(12)) == 11


def test_parts_for_eyes_alone_need_no_key_of_their_own():
    facts = Facts("block", (Fact("a", 1),), "Title:", audience="page")
    line = Profile("error", "x", ("a",), (1.0,), audience="page")
    assert Document("t", (facts, facts, line, line)).parts == (facts, facts, line, line)
    with pytest.raises(ValueError, match="called rows"):
        Document("t", (Data("rows", []), Data("rows", [])))
