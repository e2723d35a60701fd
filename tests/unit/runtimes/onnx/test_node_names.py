"""Modules read from the names of nodes, else from the order of operations; sizes and scales are no tensors."""

from __future__ import annotations

import pytest

from layerscope.runtimes.onnx.node_names import read_names, read_order, values_aside, weights_of

onnx = pytest.importorskip("onnx")


def graph(*nodes, weights=()):
    """A graph of (operation, inputs, outputs, name)."""
    made = [onnx.helper.make_node(op, given.split(), gives.split(), name=name) for op, given, gives, name in nodes]
    held = [onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [2, 2], [0.0] * 4) for name in weights]
    return onnx.helper.make_graph(made, "g", [], [], held)


def modules(graph):
    return [node.modules[-1] if node.modules else None for node in read_names(graph, weights_of(graph)).nodes]


def test_a_second_call_is_told_by_its_number_and_a_module_of_that_name_by_its_weights():
    nodes = [
        ("MatMul", "x w", "a", "/layers.0/up/MatMul"),
        ("Add", "a layers.0.up.bias", "b", "/layers.0/up/Add"),
        ("MatMul", "b w", "c", "/layers.0/up_1/MatMul"),
        ("Relu", "c", "d", "/layers.0/Relu"),
    ]
    read = graph(*nodes, weights=["w", "layers.0.up.bias"])
    assert modules(read) == ["layers.0.up", "layers.0.up", "layers.0.up", "layers.0"]
    assert read_names(read, weights_of(read)).numbers["layers.0.up"] == {0: 0, 1: 0, 2: 1}
    own = graph(*nodes, weights=["w", "layers.0.up.bias", "layers.0.up_1.bias"])
    assert modules(own) == ["layers.0.up", "layers.0.up", "layers.0.up_1", "layers.0"]


def test_names_without_modules_tell_nothing():
    assert read_names(graph(("MatMul", "x w", "a", "MatMul_0")), {"w"}) is None


def test_operations_are_numbered_by_kind_with_the_bias_and_the_scale_of_a_product():
    plain = graph(
        ("MatMul", "x w", "a", ""),
        ("Add", "a b", "c", ""),
        ("Relu", "c", "d", ""),
        ("MatMul", "d w", "e", ""),
        weights=["w", "b"],
    )
    dynamic = graph(
        ("DynamicQuantizeLinear", "x", "q s z", ""),
        ("Mul", "s w_scale", "scales", ""),
        ("MatMulInteger", "q w z w_zero", "i", ""),
        ("Cast", "i", "f", ""),
        ("Mul", "f scales", "a", ""),
        ("Add", "a b", "c", ""),
        ("Relu", "c", "d", ""),
        weights=["w", "b", "w_scale", "w_zero"],
    )
    for of, expected in ((plain, 4), (dynamic, 7)):
        names = [node.modules[-1] for node in read_order(of, weights_of(of)).nodes if node.modules]
        assert dict.fromkeys(names[: expected - 1]).keys() >= {"MatMul0", "Relu0"}
        assert [name for name in names if name == "MatMul0"] == ["MatMul0"] * (2 if of is plain else 4)


def test_sizes_and_scales_are_no_tensors_and_what_is_made_of_weights_is_a_weight():
    of = graph(
        ("Shape", "x", "n", ""),
        ("Constant", "", "one", ""),
        ("Gather", "n one", "rows", ""),
        ("DequantizeLinear", "w s", "worth", ""),
        ("MatMul", "x worth", "y", ""),
        weights=["w", "s"],
    )
    weights = weights_of(of)
    assert weights == {"w", "s", "worth"}
    assert values_aside(of, weights) == {"n", "one", "rows"}
