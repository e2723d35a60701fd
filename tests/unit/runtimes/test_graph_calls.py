"""Inputs and outputs of modules in a flat graph, against graphs written by hand."""

from __future__ import annotations

from layerscope.runtimes.graph_calls import ScopedNode, module_calls, places_of


def node(path, inputs, outputs, passes=None):
    calls = tuple((name, "0") if "@" not in name else tuple(name.split("@")) for name in path.split())
    return ScopedNode(calls, tuple(inputs.split()), tuple(outputs.split()), passes)


def sides(nodes, name, *, returned="y"):
    return [(call.inputs, call.outputs) for call in module_calls(nodes, returned={returned})[name]]


def test_what_is_used_outside_is_an_output_and_what_comes_from_outside_an_input():
    graph = [node("a", "x", "h"), node("a", "h", "g"), node("b", "g x", "y")]
    assert sides(graph, "a") == [(["x"], ["g"])]
    assert sides(graph, "b") == [(["g", "x"], ["y"])]


def test_what_nobody_uses_is_the_output_of_the_innermost_module_alone():
    graph = [node("a a.b", "x", "h"), node("a a.b", "x", "dead"), node("a", "h", "y")]
    assert sides(graph, "a.b") == [(["x"], ["h", "dead"])]
    assert sides(graph, "a") == [(["x"], ["y"])]


def test_what_nobody_uses_and_comes_of_no_input_is_not_an_output():
    graph = [node("a", "", "positions"), node("a", "positions", "mask"), node("a", "x", "y")]
    assert sides(graph, "a") == [(["x"], ["y"])]


def test_an_input_that_is_passed_on_is_an_output_only_where_there_is_no_other():
    cast = [node("norm", "x", "cast", "x"), node("norm", "cast", "h"), node("", "cast h", "y")]
    assert sides(cast, "norm") == [(["x"], ["h"])]
    off = [node("dropout", "x", "same", "x"), node("", "same", "y")]
    assert sides(off, "dropout") == [(["x"], ["same"])]


def test_calls_of_one_module_are_told_apart_by_their_key():
    graph = [node("a@0", "x", "h"), node("", "h", "g"), node("a@1", "g", "y")]
    assert sides(graph, "a") == [(["x"], ["h"]), (["g"], ["y"])]


def test_a_module_that_holds_others_and_computes_nothing_is_a_list_of_them():
    places = places_of({"": "Net", "layers.0": "Block", "layers.1": "Block", "gone": ""})
    assert [(place.name, place.types) for place in places] == [
        ("", ("Net",)),
        ("layers", ("ModuleList",)),
        ("layers.0", ("Block",)),
        ("layers.1", ("Block",)),
        ("gone", ()),
    ]
