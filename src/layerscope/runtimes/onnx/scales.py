"""What a quantised tensor of an ONNX graph is worth: its scale and zero point stand in the graph.

names = dequantised(proto, ["linear_quantized"])      # adds a node that reads each, and gives its output
names["linear_quantized"]
grid_of(proto.graph)                                  # in words, or nothing
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from layerscope.runtimes.onnx.session import library

_VALUES = "layerscope/values/"
# Where a quantised operation is told the scale of what it gives; the others have one input.
_OUTPUT_SCALE = {"QLinearConv": 6, "QLinearMatMul": 6, "QLinearAdd": 6, "QLinearMul": 6, "QGemm": 7, "QLinearConcat": 0}
_UNARY = 3
PRODUCTS = (
    *("QLinearMatMul", "QLinearConv", "QGemm", "MatMulInteger", "ConvInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "MatMulNBits"),
)


class _Scale(NamedTuple):
    scale: str
    zero_point: str
    told_by: Any


def dequantised(proto: Any, values: Iterable[str]) -> dict[str, str]:
    """Add a node that reads each of `values` that is quantised, and return the names of what they give."""
    found: dict[str, str] = {}
    known = _scales(proto.graph)
    for value in values:
        if value not in known:
            continue
        scale, zero_point, told_by = known[value]
        found[value] = f"{_VALUES}{value}"
        node = proto.graph.node.add(op_type="DequantizeLinear", output=[found[value]])
        node.input.extend([value, scale, zero_point] if zero_point else [value, scale])
        if told_by.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.domain = told_by.domain  # 16 bits are Microsoft's own in older files
            node.attribute.extend(each for each in told_by.attribute if each.name in ("axis", "block_size"))
        proto.graph.output.append(library("onnx").ValueInfoProto(name=found[value]))
    return found


def quantised_values_alone(graph: Any) -> Any:
    """Return a graph in which what takes a quantised value takes it as it is: reading one is no operation."""
    read = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    weights = {each.name for each in graph.initializer}
    read = {value: quantised for value, quantised in read.items() if quantised not in weights}
    if not read:
        return graph
    other = type(graph)()
    other.CopyFrom(graph)
    del other.node[:]
    other.node.extend(node for node in graph.node if node.output[0] not in read)
    for node in other.node:
        node.input[:] = [read.get(value, value) for value in node.input]
    for each in other.output:
        each.name = read.get(each.name, each.name)
    return other


def grid_of(graph: Any) -> str:
    """Say in words that a graph computes on quantised values; else nothing."""
    quantised = (*PRODUCTS, "QuantizeLinear", "DynamicQuantizeLinear")
    return "quantised operations of ONNX" if any(node.op_type in quantised for node in graph.node) else ""


def _scales(graph: Any) -> dict[str, _Scale]:
    """Return the scale of each quantised value: as what makes it says, else as its users do."""
    found: dict[str, _Scale] = {}
    for node in graph.node:
        if node.op_type == "DynamicQuantizeLinear":
            found[node.output[0]] = _Scale(node.output[1], node.output[2], node)
        elif node.op_type == "QuantizeLinear":
            found[node.output[0]] = _at(node, 1)
        elif node.op_type.startswith("QLinear") or node.op_type == "QGemm":
            found[node.output[0]] = _at(node, _OUTPUT_SCALE.get(node.op_type, _UNARY))
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            found.setdefault(node.input[0], _at(node, 1))
        elif node.op_type.startswith("QLinear"):
            for at in range(2 if node.op_type == "QLinearConcat" else 0, len(node.input) - 2, 3):
                found.setdefault(node.input[at], _at(node, at + 1))
    return found


def _at(node: Any, at: int) -> _Scale:
    given = [*node.input, ""]
    return _Scale(given[at], given[at + 1], node)
