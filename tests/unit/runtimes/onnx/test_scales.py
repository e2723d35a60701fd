"""A quantised value is worth what its scale and zero point say, wherever in the graph they stand."""

from __future__ import annotations

import numpy as np
import pytest

from layerscope.runtimes.onnx.scales import dequantised, grid_of, quantised_values_alone

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

FLOAT, BYTES = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8


def model(*nodes, gives):
    numbers = {"s": ((), FLOAT, [0.5]), "z": ((), BYTES, [10]), "t": ((), FLOAT, [2.0]), "y": ((), BYTES, [3])}
    held = [onnx.helper.make_tensor(name, kind, shape, values) for name, (shape, kind, values) in numbers.items()]
    made = [onnx.helper.make_node(op, given.split(), out.split()) for op, given, out in nodes]
    takes = [onnx.helper.make_tensor_value_info("x", FLOAT, [4])]
    graph = onnx.helper.make_graph(made, "g", takes, [onnx.helper.make_tensor_value_info(gives, FLOAT, None)], held)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)


X = np.array([-4.0, 0.0, 3.0, 100.0], np.float32)


def run(proto, name):
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([name], {"x": X})[0]


def test_a_value_is_read_by_the_scale_of_what_makes_it_or_of_what_takes_it():
    proto = model(
        ("QuantizeLinear", "x s z", "q"),
        ("Identity", "q", "same"),
        ("DequantizeLinear", "same s z", "out"),
        gives="out",
    )
    names = dequantised(proto, ["q", "same", "x"])
    assert names.keys() == {"q", "same"}
    for value in names.values():
        np.testing.assert_array_equal(run(proto, value), np.clip(np.round(X / 0.5) + 10, 0, 255) * 0.5 - 5)


def test_a_scale_that_the_graph_computes_is_read_as_well():
    proto = model(
        ("DynamicQuantizeLinear", "x", "q scale zero"), ("DequantizeLinear", "q scale zero", "out"), gives="out"
    )
    np.testing.assert_allclose(run(proto, dequantised(proto, ["q"])["q"]), X, atol=0.3)


def test_reading_a_value_is_no_operation_and_weights_stay():
    nodes = [
        ("QuantizeLinear", "x s z", "q"),
        ("DequantizeLinear", "q s z", "f"),
        ("DequantizeLinear", "z s", "w"),
        ("Add", "f w", "out"),
    ]
    graph = quantised_values_alone(model(*nodes, gives="out").graph)
    assert [(node.op_type, list(node.input)) for node in graph.node if node.op_type == "Add"] == [("Add", ["q", "w"])]
    assert [node.output[0] for node in graph.node] == ["q", "w", "out"]


def test_a_graph_that_computes_on_quantised_values_says_so():
    assert grid_of(model(("QuantizeLinear", "x s z", "q"), ("DequantizeLinear", "q s z", "o"), gives="o").graph)
    assert not grid_of(model(("Relu", "x", "o"), gives="o").graph)
