"""Calls of modules in an ONNX graph, against graphs written by hand."""

from __future__ import annotations

from layerscope.runtimes.onnx.call_numbers import OnnxNode, call_numbers, merged

LIBRARY = {"act": "torch.nn.modules.activation.Tanh", "mine": "here.Mine"}


def node(path, fx, takes, *, op=None, named=None, weights=""):
    named = takes if named is None else named
    op = op or fx.partition("_")[0]
    return OnnxNode(
        ("", *path.split()),
        op,
        fx,
        "",
        frozenset(named.split()),
        frozenset(weights.split()),
        tuple(takes.split()),
        (fx,),
    )


def test_what_runs_between_parts_the_calls():
    graph = [node("mine", "sin", "x"), node("", "neg", "x"), node("mine", "sin_1", "neg")]
    assert call_numbers(graph, LIBRARY) == ({"mine": {0: 0, 2: 1}}, {})


def test_what_does_something_else_after_that_is_the_rest_of_the_same_call():
    graph = [node("mine", "sin", "x"), node("", "neg", "x"), node("mine", "cos", "sin")]
    assert call_numbers(graph, LIBRARY) == ({"mine": {0: 0, 2: 0}}, {})


def test_what_goes_on_with_what_became_of_its_result_is_another_call():
    graph = [node("mine", "sin", "x"), node("", "neg", "sin"), node("mine", "cos", "neg")]
    assert call_numbers(graph, LIBRARY) == ({"mine": {0: 0, 2: 1}}, {})


def test_the_same_in_a_row_is_as_many_calls_of_a_library_s_module_and_unclear_of_any_other():
    def graph(name):
        return [node(name, "tanh", "x"), node(name, "tanh_1", "tanh"), node(name, "tanh_2", "tanh_1")]

    assert call_numbers(graph("act"), LIBRARY) == ({"act": {0: 0, 1: 1, 2: 2}}, {})
    assert call_numbers(graph("mine"), LIBRARY) == ({}, {"mine": 3})


def test_what_runs_once_inside_makes_one_call_of_the_rest_too():
    graph = [
        node("mine", "linear", "x", weights="p_in"),
        node("mine", "linear_1", "linear", weights="p_w"),
        node("mine", "linear_2", "linear_1", weights="p_w"),
    ]
    assert call_numbers(graph, LIBRARY) == ({"mine": {0: 0, 1: 0, 2: 0}}, {})


def test_unless_it_stands_for_what_other_calls_computed_alike():
    graph = [
        node("mine", "linear", "memory", weights="p_k"),
        node("mine", "linear_1", "x", weights="p_q"),
        node("mine", "mul", "linear_1 linear"),
        node("mine", "linear_3", "mul", weights="p_q"),
        node("mine", "mul_1", "linear_3 linear", named="linear_3 linear_2"),
    ]
    makers = {each.fx: each for each in graph}
    assert merged("linear", graph[0], graph[4], makers)
    assert call_numbers(graph, LIBRARY) == ({}, {"mine": 2})
