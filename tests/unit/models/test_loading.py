"""MODEL in its forms, and what is said of everything that is none."""

import sys
import textwrap

import pytest
import torch

from layerscope.errors import BadModel
from layerscope.models import BUILT_IN, DEFAULT_PROMPT, load_model


@pytest.fixture
def write(tmp_path):
    """Write a file under a name no other test imports, and give its address."""

    def write(body: str, function: str = "make", name: str = "") -> str:
        name = name or f"model_{abs(hash((str(tmp_path), body)))}"
        path = tmp_path / f"{name}.py"
        path.write_text("import torch\n" + textwrap.dedent(body))
        return f"{path}:{function}"

    return write


def only(loaded, **how):
    (inputs,) = loaded.batches(**how)
    return inputs


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_runs_on_the_default_prompt(name):
    loaded = load_model(name)
    inputs = only(loaded)
    assert inputs.args[0].tolist() == [list(DEFAULT_PROMPT.encode())]
    assert loaded.model(*inputs.args, **inputs.kwargs).isfinite().all()


def test_a_function_in_a_file_returns_a_model(write):
    loaded = load_model(write("def make():\n    return torch.nn.Linear(2, 3)"))
    assert isinstance(loaded.model, torch.nn.Linear)
    assert only(loaded, prompt="ab").args[0].tolist() == [[97, 98]]


def test_a_function_may_return_its_inputs_too(write):
    loaded = load_model(write("def make():\n    return torch.nn.Linear(2, 3), {'input': torch.ones(1, 2)}"))
    assert only(loaded).kwargs["input"].tolist() == [[1.0, 1.0]]


def test_several_inputs_are_several_forwards(write):
    loaded = load_model(write("def make():\n    return torch.nn.ReLU(), [torch.ones(1), torch.zeros(1)]"))
    assert [i.args[0].item() for i in loaded.batches()] == [1.0, 0.0]


def test_a_class_or_a_ready_model_will_do(write):
    assert isinstance(load_model(write("class Net(torch.nn.Module): pass", "Net")).model, torch.nn.Module)
    assert isinstance(load_model(write("net = torch.nn.ReLU()", "net")).model, torch.nn.ReLU)


def test_a_function_in_a_package_on_the_current_path(tmp_path, monkeypatch):
    (tmp_path / "some_package_of_mine").mkdir()
    (tmp_path / "some_package_of_mine" / "nets.py").write_text("import torch\ndef make(): return torch.nn.ReLU()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert isinstance(load_model("some_package_of_mine.nets:make").model, torch.nn.ReLU)


def test_a_model_file_imports_its_neighbours(write, tmp_path):
    (tmp_path / "neighbour_of_the_model.py").write_text("WIDTH = 5\n")
    address = write("from neighbour_of_the_model import WIDTH\ndef make(): return torch.nn.Linear(1, WIDTH)")
    assert load_model(address).model.out_features == 5


def test_the_seed_decides_what_the_function_and_its_inputs_draw(write):
    address = write("def make():\n    return torch.nn.Linear(2, 2)\ndef inputs():\n    return torch.rand(3)")
    weights = [load_model(address, seed=s).model.weight for s in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    drawn = [only(load_model(address, seed=3), inputs=address.replace("make", "inputs")).args[0] for _ in range(2)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("body", "function", "said"),
    [
        ("def make(): return 3", "make", r"returned a int; it should return a torch\.nn\.Module, or \(model, inputs\)"),
        ("def make(): pass", "make", "returned None"),
        ("def make(): return 1, 2, 3", "make", r"returned a tuple of \(int, int, int\)"),
        ("def make(): raise KeyError('weights')", "make", "raised KeyError: 'weights'"),
        ("def make(: pass", "make", "failed to import with SyntaxError"),
        ("import nothing_like_this", "make", "failed to import with ModuleNotFoundError"),
        ("def mkae(): pass", "make", "there is no 'make' in .*nearest: mkae"),
        ("def make(size): pass", "make", "raised TypeError"),
        ("import sys\ndef make(): sys.exit(3)", "make", "raised SystemExit: 3"),
        ("import sys\nsys.exit(0)", "make", "failed to import with SystemExit: 0"),
    ],
)
def test_what_goes_wrong_in_the_users_file_is_one_sentence(write, body, function, said):
    with pytest.raises(BadModel, match=said) as caught:
        load_model(write(body, function))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tiny-transfomer", "did you mean tiny-transformer?"),
        ("nonsense", "is not a model layerscope can find; A MODEL is a built-in name"),
        ("missing.py:make", "there is no file 'missing.py'"),
        ("no_such_package.x:make", "there is no module 'no_such_package'"),
        ("", "A MODEL is"),
        ("x\0y", "A MODEL is"),
        ("a" * 5000, "A MODEL is"),
    ],
)
def test_what_is_no_model_is_answered_with_the_forms_that_are(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadModel, match=said):
        load_model(text)


def test_folders_and_files_that_are_not_models_are_told_apart(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "net.onnx").write_bytes(b"")
    for name, said in (
        ("empty", "without a config.json"),
        ("run", "is a run, not a model"),
        ("net.onnx", "is empty, not an ONNX model"),
    ):
        with pytest.raises(BadModel, match=said):
            load_model(str(tmp_path / name))


def test_a_model_without_inputs_asks_for_them(write):
    loaded = load_model(write("def make(): return torch.nn.ReLU()"))
    with pytest.raises(BadModel, match=r"came without inputs; return \(model, inputs\)"):
        loaded.batches()


def test_two_ways_of_saying_the_inputs_are_one_too_many():
    with pytest.raises(BadModel, match="give one of them"):
        load_model("tiny-transformer").batches(inputs="x.npz", prompt="hi")
