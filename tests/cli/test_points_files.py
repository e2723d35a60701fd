"""`layerscope points` and `record` of compiled models: their files, and the folders that `compiled.save` writes."""

import json
import warnings
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim

import layerscope as ls
from asserts import assert_same_bits
from layerscope.models.tiny import tiny_transformer

IDS = torch.arange(6).view(1, 6)
TEXT = "Hello there"
PROMPT = torch.tensor([list(TEXT.encode())])


@pytest.fixture(scope="module")
def model():
    return tiny_transformer(layers=2, hidden=16, heads=2).eval()


def second_layer(model, ids):
    """The oracle: the layers called one after the other."""
    with torch.no_grad():
        x = model.model.embed_tokens(ids)
        for layer in model.model.layers:
            x = layer(x)
    return x


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """The same model in every kind of file that can be opened, with an input by name; and as TorchScript, frozen."""
    folder = tmp_path_factory.mktemp("files")
    sizes = ({1: Dim("length", min=2, max=64)},)
    traced = torch.jit.trace(model, (IDS,))
    torch.jit.save(traced, folder / "model.pt")
    torch.jit.save(torch.jit.freeze(traced), folder / "frozen.pt")
    torch.export.save(torch.export.export(model, (IDS,), dynamic_shapes=sizes), folder / "model.pt2")
    torch.save({"input_ids": IDS + 3}, folder / "inputs.pt")
    return folder


@pytest.fixture(scope="module")
def onnx_file(model, tmp_path_factory):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    sizes = ({1: Dim("length", min=2, max=64)},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(model, (IDS,), path, dynamo=True, verbose=False, dynamic_shapes=sizes)
    return path


@pytest.fixture(params=["model.pt", "model.pt2", "model.onnx"])
def file(request, made):
    return request.getfixturevalue("onnx_file") if request.param == "model.onnx" else made / request.param


# Files --------------------------------------------------------------------------------------------


def test_a_file_lists_the_modules_of_its_source(cli, file, model):
    answer = cli("points", file)
    assert answer.code == 0
    runtime = {".pt": "torchscript", ".pt2": "export", ".onnx": "onnx"}[file.suffix]
    assert f"recorded in {runtime}" in answer.out
    page = json.loads(cli("points", file, "--json").out)
    assert {row["name"]: row["type"] for row in page["modules"]} == {
        name or ".": type(module).__name__ for name, module in model.named_modules()
    }
    if runtime != "onnx":  # whose exporter folds weights
        assert {row["name"]: row["parameters"] for row in page["modules"]} == {
            name or ".": sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()
        }
    selected = json.loads(cli("points", file, "model.layers.*:input,output", "--json").out)
    assert [row["point"] for row in selected["points"]] == [
        f"model.layers.{i}:{side}" for i in (0, 1) for side in ("input", "output")
    ]


@pytest.mark.parametrize("how", ["prompt", "inputs"])
def test_a_file_is_recorded_on_a_prompt_and_on_inputs_by_name(cli, file, model, made, how, tmp_path):
    given = ("--prompt", TEXT) if how == "prompt" else ("--inputs", made / "inputs.pt")
    answer = cli("record", file, "model.layers.*", *given, "-o", "run")
    assert (answer.code, answer.err) == (0, "")
    assert "complete: 1 forward, 2 points, 2 records" in answer.out
    run = ls.open_run(tmp_path / "run")
    expected = second_layer(model, PROMPT if how == "prompt" else IDS + 3)
    torch.testing.assert_close(run.tensor("model.layers.1"), expected, rtol=0, atol=1e-5)


def test_a_frozen_file_lists_its_operations_says_why_and_records_them(cli, made, model, tmp_path):
    for trust in ((), ("--trust",)):
        answer = cli("points", made / "frozen.pt", *trust)
        assert answer.code == 0
        assert "torch.jit.freeze" in answer.out
        assert ("`--trust`" in answer.out) == (not trust)
    kinds = {row["type"] for row in json.loads(cli("points", made / "frozen.pt", "--trust", "--json").out)["modules"]}
    assert {"embedding", "linear", "rms_norm"} <= kinds
    assert cli("record", made / "frozen.pt", "type:embedding", "--prompt", TEXT, "-o", "run").code == 0
    run = ls.open_run(tmp_path / "run")
    [point] = run.points
    assert_same_bits(run.tensor(str(point)), model.model.embed_tokens(PROMPT).detach())


def test_a_layer_of_a_frozen_file_is_refused_with_the_way_that_works(cli, made, tmp_path):
    answer = cli("record", made / "frozen.pt", "model.layers.*", "--prompt", TEXT, "-o", "run")
    assert answer.code == 2
    assert "record_layer_outputs=True" in answer.err
    assert len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


# What nothing can be tapped in --------------------------------------------------------------------


def an_aotinductor_package(folder):
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:  # as torch 2.13 lays one out
        archive.writestr("model/data/aotinductor/model/abc.wrapper.so", b"\x7fELF")
    return folder / "model.pt2"


def a_neff(folder):
    (folder / "model.neff").write_bytes(b"\x7fNEFF")
    return folder / "model.neff"


def an_engine(folder):
    (folder / "model.engine").write_bytes(b"ftrt")
    return folder / "model.engine"


def onnx_runtimes_own(folder):
    (folder / "model.ort").write_bytes(b"ORTM")
    return folder / "model.ort"


def weights_alone(folder):
    torch.save(nn.Linear(2, 2).state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


def a_neff_in_torchscript(folder):
    """As torch_neuronx.trace saves it, opened where torch_neuronx is not."""
    library = torch.library.Library("neuron", "DEF")
    library.define("forward_v2_1(Tensor x) -> Tensor")
    library.impl("forward_v2_1", lambda x: x + 1, "CompositeExplicitAutograd")

    class Engine(nn.Module):
        def forward(self, x):
            return torch.ops.neuron.forward_v2_1(x)

    torch.jit.save(torch.jit.trace(Engine(), (torch.ones(2),)), folder / "neuron.pt")
    library._destroy()
    return folder / "neuron.pt"


@pytest.mark.parametrize(
    ("make", "what", "instead"),
    [
        (an_aotinductor_package, "is an AOTInductor package, machine code", "layerscope.compile("),
        (a_neff, "is a Neuron NEFF, machine code", "layerscope.compile("),
        (an_engine, "is a TensorRT engine, machine code", "layerscope.compile("),
        (a_neff_in_torchscript, "is TorchScript that needs neuron::forward_v2_1", "layerscope.compile("),
        (onnx_runtimes_own, "is in ONNX Runtime's own format", "give the .onnx file"),
        (weights_alone, "weights alone are not a model", "give the function that makes it"),
    ],
)
def test_what_cannot_be_tapped_is_exit_code_2_and_one_sentence(cli, make, what, instead, tmp_path):
    path = make(tmp_path)
    for command in (("points", path), ("record", path, "0", "--prompt", TEXT, "-o", "run")):
        answer = cli(*command)
        assert (answer.code, answer.out) == (2, "")
        assert path.name in answer.err
        assert what in answer.err
        assert instead in answer.err
        assert len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def cut(path, share):
    """Keep the first part of a file, as a copy that was broken off does."""
    content = path.read_bytes()
    return content[: int(len(content) * share)]


def scrambled(path):
    """Turn the bits of many bytes around, and leave the end of the archive as it is."""
    content = bytearray(path.read_bytes())
    content[200:-3000:50] = bytes(255 - byte for byte in content[200:-3000:50])
    return bytes(content)


ARCHIVE = "a zip archive as torch.jit.save and torch.export.save write it"
ONNX = "an ONNX model as torch.onnx.export writes it"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("m.pt", lambda made: b"", f"is empty, not {ARCHIVE}"),
        ("m.pt2", lambda made: b"", f"is empty, not {ARCHIVE}"),
        ("m.pt", lambda made: b"hello\nthere", f"is text that begins with 'hello', not {ARCHIVE}"),
        ("m.pt2", lambda made: b"hello\nthere", f"is text that begins with 'hello', not {ARCHIVE}"),
        ("m.pt", lambda made: b"\x00\xff" * 30, f"is not {ARCHIVE}"),
        ("m.pt", lambda made: cut(made / "model.pt", 0.5), f"ends too early for {ARCHIVE}"),
        ("m.pt2", lambda made: cut(made / "model.pt2", 0.5), f"ends too early for {ARCHIVE}"),
        ("m.pt2", lambda made: cut(made / "model.pt2", 0.99), f"ends too early for {ARCHIVE}"),
        ("m.pt2", lambda made: scrambled(made / "model.pt2"), f"is damaged, no longer {ARCHIVE}"),
    ],
)
def test_a_file_that_is_damaged_is_told_as_that_and_not_as_weights(cli, made, name, content, what, tmp_path):
    assert_told_as_damaged(cli, tmp_path / name, content(made), what)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (lambda file: b"", f"is empty, not {ONNX}"),
        (lambda file: b"hello\nthere", f"is text that begins with 'hello', not {ONNX}"),
        (lambda file: b"\x00\xff" * 30, f"is not {ONNX}"),
        (lambda file: cut(file, 0.5), f"ends too early, or is damaged: it is not {ONNX}"),
        (lambda file: file.read_bytes()[:2], f"holds no operation: it is not {ONNX}"),
    ],
)
def test_an_onnx_file_that_is_damaged_is_told_as_that(cli, onnx_file, content, what, tmp_path):
    assert_told_as_damaged(cli, tmp_path / "m.onnx", content(onnx_file), what)


def assert_told_as_damaged(cli, path, content, what):
    path.write_bytes(content)
    for command in (("points", path), ("record", path, "0", "--prompt", TEXT, "-o", "run")):
        answer = cli(*command)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.strip().endswith(
            f"{path.name}' {what}; copy it from where it is whole, or save the model again."
        )
        assert len(answer.err.strip().splitlines()) == 1
    assert not (path.parent / "run").exists()


# Folders of compiled models -----------------------------------------------------------------------


def saved(model, backend, folder, **how):
    return ls.compile(model, (IDS,), backend=backend, observer="skip", **how).save(folder / backend)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return saved(model, "torchscript", tmp_path_factory.mktemp("saved"))


def test_a_folder_lists_its_taps_in_order_and_what_each_is(cli, folder):
    answer = cli("points", folder)
    assert answer.code == 0
    assert "4 taps; compiled by torchscript" in answer.out
    assert "layerscope.compile(...) again for others" in answer.out
    page = json.loads(cli("points", folder, "--json").out)
    assert [(row["point"], row["is"]) for row in page["points"]] == [
        (".:input", "what it is called with"),
        ("model.embed_tokens:output", "hidden state 0, the embedding"),
        ("model.layers.0:output", "hidden state 1"),
        ("model.layers.1:output", "hidden state 2"),
        ("lm_head:output", ""),
        (".:output", "what it returns"),
        ("logits:output", "the logits"),
    ]
    assert page["compiled"]["takes"] == "input_ids"


def test_every_point_a_folder_lists_can_be_recorded(cli, folder, tmp_path):
    points = [row["point"] for row in json.loads(cli("points", folder, "--json").out)["points"]]
    assert cli("record", folder, *points, "--prompt", TEXT, "-o", "run").code == 0
    found = {str(point).split("[")[0] for point in ls.open_run(tmp_path / "run").points}
    assert found == set(points)


def test_patterns_select_among_the_taps_of_a_folder(cli, folder):
    page = json.loads(cli("points", folder, "model.layers.{0,-1}", "logits", "--json").out)
    assert [row["point"] for row in page["points"]] == [
        "model.layers.0:output", "model.layers.1:output", "logits:output",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("model.layers.0:input", "model.layers.0:input was not tapped"),
        ("op:aten.mm", "no operations to watch"),
        ("model.layers.0.mlp", "nearest"),
    ],
)
def test_what_was_not_tapped_is_exit_code_2(cli, folder, pattern, why, tmp_path):
    for command in (("points", folder, pattern), ("record", folder, pattern, "--prompt", TEXT, "-o", "run")):
        answer = cli(*command)
        assert answer.code == 2
        assert why in answer.err
        assert len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


STRESS = pytest.mark.stress


@pytest.mark.parametrize("backend", ["torchscript", "export", "onnx", pytest.param("aoti", marks=STRESS)])
def test_a_folder_is_recorded_as_its_source_is(cli, model, backend, tmp_path):
    if backend == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    folder = saved(model, backend, tmp_path)
    answer = cli("record", folder, "model.layers.*", "logits", "--prompt", TEXT, "-o", "run")
    assert (answer.code, answer.err) == (0, "")
    run = ls.open_run(tmp_path / "run")
    assert run.manifest.runtime == f"{backend}, taps compiled in"
    torch.testing.assert_close(run.tensor("model.layers.1"), second_layer(model, PROMPT), rtol=0, atol=1e-5)


def test_a_folder_is_listed_from_its_table_alone(cli, folder, tmp_path):
    """A NEFF is listed where no Neuron is, and machine code is not loaded to be listed."""
    (tmp_path / "abroad").mkdir()
    table = (folder / "taps.json").read_text().replace('"torchscript"', '"neuron"')
    (tmp_path / "abroad" / "taps.json").write_text(table)
    answer = cli("points", "abroad")
    assert answer.code == 0
    assert "4 taps; compiled by neuron" in answer.out
    answer = cli("record", "abroad", "model.layers.*", "--prompt", TEXT, "-o", "run")
    assert answer.code == 2
    assert "AWS Neuron SDK" in answer.err


def test_a_folder_lists_what_stays_silent_with_the_reason(cli, tmp_path):
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x = torch.ones(1, 3, 4)
    compiled = ls.compile(
        attention, (x, x, x), backend="torchscript", observer="skip", record_layer_outputs=[".", "out_proj"]
    )
    compiled.save(tmp_path / "attention")
    page = json.loads(cli("points", "attention", "--json").out)
    [missing] = page["missing"]
    assert missing["point"] == "out_proj:output"
    assert missing["reason"].startswith("called functionally")


def test_the_machine_code_in_a_folder_is_told_from_the_folder(cli, folder, tmp_path):
    package = an_aotinductor_package(tmp_path)
    (tmp_path / "taps.json").write_text((folder / "taps.json").read_text())
    answer = cli("points", package)
    assert answer.code == 2
    assert "is an AOTInductor package; the taps in it are known to its folder: give that" in answer.err


@pytest.mark.parametrize("text", ["{}", "not JSON", "[]"])
def test_a_folder_whose_table_is_none_is_exit_code_2(cli, text, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "taps.json").write_text(text)
    for command in (("points", "odd"), ("record", "odd", "0", "-o", "run")):
        answer = cli(*command)
        assert answer.code == 2
        assert "'odd' holds no compiled model" in answer.err
        assert len(answer.err.strip().splitlines()) == 1
