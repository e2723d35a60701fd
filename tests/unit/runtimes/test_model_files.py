"""Files of models, told apart by what is in them."""

from __future__ import annotations

import re
import zipfile

import pytest
import torch

import zoo
from layerscope.runtimes import find
from layerscope.runtimes.model_files import is_file, kind_of, opened


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    model, args = zoo.plain()
    for name in ("script.pt", "script.jit"):
        torch.jit.save(torch.jit.trace(model, args), folder / name)
    torch.export.save(torch.export.export(model, args), folder / "program.pt2")
    torch.save(model.state_dict(), folder / "weights.pt")
    with zipfile.ZipFile(folder / "aoti.pt2", "w") as archive:  # as torch 2.13 lays a package out
        archive.writestr("aoti/data/aotinductor/model/abc.wrapper.so", b"\x7fELF")
        archive.writestr("aoti/archive_format", b"pt2")
    for name in ("model.neff", "model.engine", "model.ort", "torn.pt"):
        (folder / name).write_bytes(b"\x00" * 64)
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("script.pt", "torchscript"),
        ("script.jit", "torchscript"),
        ("program.pt2", "export"),
        ("aoti.pt2", "aoti"),
        ("model.neff", "neff"),
        ("model.engine", "tensorrt"),
        ("weights.pt", None),
        ("torn.pt", None),
        ("nowhere.pt", None),
    ],
)
def test_a_file_is_what_it_holds(files, name, kind):
    assert kind_of(files / name) == kind
    assert is_file(str(files / name)) == (kind is not None)


def test_the_suffix_does_not_decide_between_script_and_export(files, tmp_path):
    (tmp_path / "program.pt").write_bytes((files / "program.pt2").read_bytes())
    assert isinstance(opened(tmp_path / "program.pt"), torch.export.ExportedProgram)


def test_a_folder_that_a_compiled_model_was_saved_to_is_known_and_not_opened_here(tmp_path):
    assert kind_of(tmp_path) is None
    (tmp_path / "taps.json").write_text("{}")
    assert kind_of(tmp_path) == "compiled"
    assert is_file(str(tmp_path))
    with pytest.raises(TypeError, match=r"record what layerscope\.load_compiled\(folder\) returns"):
        opened(tmp_path)


def test_machine_code_that_was_saved_with_its_table_is_told_from_its_folder(files, tmp_path):
    (tmp_path / "model.aoti.pt2").write_bytes((files / "aoti.pt2").read_bytes())
    (tmp_path / "taps.json").write_text("{}")
    with pytest.raises(TypeError, match="is an AOTInductor package; the taps in it are known to its folder: give that"):
        opened(tmp_path / "model.aoti.pt2")


def test_what_is_no_path_comes_back_as_it_is():
    model, _ = zoo.plain()
    assert opened(model) is model


@pytest.mark.parametrize(
    ("name", "what"),
    [("aoti.pt2", "an AOTInductor package"), ("model.neff", "a Neuron NEFF"), ("model.engine", "a TensorRT engine")],
)
def test_machine_code_is_refused_with_the_way_that_works(files, name, what):
    with pytest.raises(TypeError, match=rf"is {what}, machine code.*layerscope\.compile\(\.\.\., record_layer_outputs"):
        opened(files / name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("weights.pt", "weights alone are not a model"),
        ("torn.pt", "is not a zip archive as torch.jit.save"),
        ("nowhere.pt", "not a file that is there"),
        ("script.txt", "not a file of a model layerscope knows"),
    ],
)
def test_what_holds_no_model_is_told(files, name, why):
    (files / "script.txt").write_text("hello")
    with pytest.raises(ValueError, match=why):
        opened(str(files / name))


def test_torchscript_that_needs_a_missing_operation_names_it(files, tmp_path):
    with zipfile.ZipFile(files / "script.pt") as source, zipfile.ZipFile(tmp_path / "neuron.pt", "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if b"class Sequential" in content:
                content = re.sub(rb"return \(_2\)\.forward", b"return ops.neuron.forward_v9(input) # ", content)
            target.writestr(name, content)
    with pytest.raises(TypeError, match=r"needs neuron::forward_v9.*record_layer_outputs=True"):
        opened(tmp_path / "neuron.pt")


@pytest.mark.parametrize(
    ("name", "why"), [("AOTICompiledModel", "machine code"), ("InferenceSession", "record the path of its .onnx file")]
)
def test_a_live_engine_is_refused_with_the_way_that_works(name, why):
    with pytest.raises(TypeError, match=why):
        find(type(name, (), {})())
