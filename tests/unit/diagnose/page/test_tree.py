"""The judged modules as lines: what agrees is folded, what does not is never."""

import pytest

from layerscope.diagnose.finding import KINDS, Judged
from layerscope.diagnose.page.document import AGREEING, BY_WEIGHT, lines_of


def rows(**kinds):
    return [Judged(name.replace("_", "."), 0, None, kind, "", ratio=1.0) for name, kind in kinds.items()]


def drawn(judged):
    return [(line.depth, line.text, line.row.kind, line.modules) for line in lines_of(judged)]


def test_a_list_of_layers_is_never_called_and_has_no_line():
    assert drawn(rows(m="same", m_layers_0="root", m_layers_1="noise")) == [
        (0, "m", "same", 1),
        (1, "layers.0", "root", 1),
        (1, "layers.1", "noise", 1),
    ]


def test_what_agrees_all_the_way_down_is_one_line_with_the_worst_of_its_verdicts():
    assert drawn(rows(m="same", m_a="same", m_a_b="noise", m_a_c="same", m_z="root")) == [
        (0, "m", "same", 1),
        (1, "a", "noise", 3),
        (1, "z", "root", 1),
    ]


def test_neighbours_that_agree_are_one_line_when_they_are_three():
    assert drawn(rows(m="same", m_a="same", m_b="same", m_z="root", m_c="same", m_d="noise", m_e="same")) == [
        (0, "m", "same", 1),
        (1, "a", "same", 1),
        (1, "b", "same", 1),
        (1, "z", "root", 1),
        (1, "c … e", "noise", 3),
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in AGREEING])
def test_what_does_not_agree_is_never_folded(kind):
    names = {f"m_{i}_x": "same" for i in range(9)} | {"m_4_x": kind, "m_4_x_deep_in": kind}
    assert [line.row.name for line in lines_of(rows(m="same", **names)) if line.row.kind == kind] == [
        "m.4.x",
        "m.4.x.deep.in",
    ]


def test_of_several_calls_the_worst_stands_for_the_module():
    calls = [Judged("a", i, None, kind, "", ratio=r) for i, (kind, r) in enumerate([("same", 0.0), ("root", 9.0)])]
    (line,) = lines_of(calls)
    assert (line.row.kind, line.row.call, line.row.ratio) == ("root", 1, 9.0)


def test_rows_of_a_parent_may_come_after_its_children():
    assert [line.text for line in lines_of(rows(m_a="root", m="same"))] == ["m", "a"]


def test_every_kind_has_its_weight():
    assert set(BY_WEIGHT) == set(KINDS)
