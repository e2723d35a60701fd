"""Sessions of ONNX Runtime: tensors in, tensors out, whatever their type; what cannot run is told."""

import pytest
import torch

from layerscope.errors import BadModel
from layerscope.runtimes.onnx.session import Session

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

NUMBERS = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.int64: "INT64",
           torch.bool: "BOOL"}  # fmt: skip


def saved(path, op, dtype, inputs=("x",)):
    kind = getattr(onnx.TensorProto, NUMBERS[dtype])
    taken = [onnx.helper.make_tensor_value_info(name, kind, ["n"]) for name in inputs]
    given = [onnx.helper.make_tensor_value_info("y", kind, ["m"])]
    graph = onnx.helper.make_graph([onnx.helper.make_node(op, inputs, ["y"])], "g", taken, given)
    opsets = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_kind_of_number_goes_in_and_out(tmp_path, dtype):
    session = Session(saved(tmp_path / "m.onnx", "Identity", dtype))
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert (session.inputs, session.outputs) == (["x"], ["y"])
    assert torch.equal(session.run({"x": x})["y"], x)


def test_an_input_may_be_a_view_and_require_a_gradient(tmp_path):
    session = Session(saved(tmp_path / "m.onnx", "Sub", torch.float32, ("a", "b")))
    a = torch.arange(6.0, requires_grad=True)[::2]
    assert torch.equal(session.run({"b": torch.ones(3), "a": a})["y"], torch.tensor([-1.0, 1.0, 3.0]))


def test_what_it_gave_is_not_changed_by_the_next_run(tmp_path):
    session = Session(saved(tmp_path / "m.onnx", "Neg", torch.float32))
    first = session.run({"x": torch.ones(1000)})["y"]
    for value in range(5):
        session.run({"x": torch.full((1000,), float(value))})
    assert torch.equal(first, -torch.ones(1000))


def test_another_graph_is_run_in_the_place_of_the_files(tmp_path):
    path = saved(tmp_path / "m.onnx", "Neg", torch.float32)
    graph = saved(tmp_path / "other.onnx", "Abs", torch.float32).read_bytes()
    assert torch.equal(Session(path, graph).run({"x": torch.ones(2)})["y"], torch.ones(2))
    assert torch.equal(Session(path).run({"x": torch.ones(2)})["y"], -torch.ones(2))


def test_it_has_the_threads_of_torch(tmp_path):
    session = Session(saved(tmp_path / "m.onnx", "Neg", torch.float32))
    assert session._session.get_session_options().intra_op_num_threads == torch.get_num_threads()


def test_what_cannot_run_is_told_with_its_name(tmp_path):
    path = saved(tmp_path / "odd.onnx", "NoSuchOperation", torch.float32)
    with pytest.raises(BadModel, match=r"odd\.onnx' cannot be run by ONNX Runtime: .*NoSuchOperation"):
        Session(path)
