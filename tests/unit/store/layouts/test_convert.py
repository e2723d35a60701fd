"""Conversions, read back by the loaders that users' own scripts have."""

import json
import math

import numpy as np
import pytest
import torch

from layerscope.errors import Ambiguous, BadText, NoSuchPoint, RunExists, Unsupported
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, Writer, convert, open_run
from layerscope.store.layouts.convert import WRITTEN

NAMES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head")


def blob_of(tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes, lambda: flat)


def recorded(path, records, **about):
    """Write a run of (text of a point, moment, tensor or summary) with our own writer."""
    writer = Writer(path, Manifest(**about))
    for text, moment, value in records:
        kept = {"blob": blob_of(value)} if isinstance(value, torch.Tensor) else {"summary": value}
        writer.write(Point.parse(text), moment, **kept)
    writer.close(forwards=1, points=len(records))
    return path


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    outputs = {name: torch.randn(1, 4, 6) for name in NAMES}
    return outputs | {"model.layers.0:input[0]": torch.randn(1, 4, 6), "model.norm": torch.randn(1, 4, 6)}


@pytest.fixture
def source(tmp_path, tensors):
    records = [(name, Moment(), tensor) for name, tensor in tensors.items()]
    about = {"model": {"class": "Tiny"}, "mode": "2-1", "settings": {"seq_len": 4, "pretrained_dir": "models/pa"}}
    return recorded(tmp_path / "source", records, started="2025-01-10T16:00:00+00:00", **about)


def left(done):
    return {str(each.point): each.reason for each in done.left_out}


# Quamba ---------------------------------------------------------------------------------------------


def test_quamba_is_what_its_scripts_load(source, tmp_path, tensors):
    done = convert(source, tmp_path / "layer_outputs", layout="quamba")
    assert sorted(p.name for p in (tmp_path / "layer_outputs").iterdir()) == [
        *(f"mode_2-1_layer_{n}.npy" for n in range(3)),
        "mode_2-1_stats.json",
    ]
    stats = json.loads((tmp_path / "layer_outputs" / "mode_2-1_stats.json").read_text())
    assert (stats["mode"], stats["model"], stats["seq_len"]) == ("2-1", "Tiny", 4)
    for layer in range(3):
        wanted = tensors[f"model.layers.{layer}"].numpy()
        np.testing.assert_array_equal(np.load(tmp_path / "layer_outputs" / f"mode_2-1_layer_{layer}.npy"), wanted)
        entry, exact = stats[f"layer_{layer}"], wanted.astype(np.float64)
        for name in ("mean", "std", "min", "max"):
            assert entry[name] == pytest.approx(getattr(exact, name)(), rel=1e-9, abs=1e-12)
        assert (entry["shape"], entry["dtype"]) == ([1, 4, 6], "float32")
        assert entry["first_10"] == exact.reshape(-1)[:10].tolist()
    assert [str(w.point) for w in done.written] == [f"model.layers.{n}:output" for n in range(3)]
    assert set(left(done)) == {
        *("model.embed_tokens:output", "lm_head:output", "model.norm:output", "model.layers.0:input[0]")
    }


def test_other_modes_stay_and_the_same_one_is_refused_unless_told(source, tmp_path):
    to = tmp_path / "lo"
    convert(source, to, layout="quamba")
    first = (to / "mode_2-1_layer_0.npy").read_bytes()
    convert(source, to, layout="quamba", mode="fp32")
    assert (to / "mode_2-1_layer_0.npy").read_bytes() == first
    assert open_run(to, mode="fp32").manifest.mode == "fp32"
    np.save(to / "mode_2-1_layer_77.npy", np.ones(1))
    with pytest.raises(RunExists, match=r"already has mode 2-1 \(mode_2-1_layer_0\.npy\); overwrite=True"):
        convert(source, to, layout="quamba")
    convert(source, to, layout="quamba", overwrite=True)
    assert not (to / "mode_2-1_layer_77.npy").exists()  # of the mode that was replaced
    assert (to / "mode_fp32_layer_2.npy").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_numpy_lacks_goes_as_float32_and_the_statistics_say_so(tmp_path, dtype):
    tensor = torch.randn(3, 4).to(getattr(torch, dtype))
    run = recorded(tmp_path / "source", [("layers.0", Moment(), tensor)])
    (written,) = convert(run, tmp_path / "lo", layout="quamba", mode="0").written
    loaded = np.load(tmp_path / "lo" / "mode_0_layer_0.npy")
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, tensor.float().numpy())
    entry = json.loads((tmp_path / "lo" / "mode_0_stats.json").read_text())["layer_0"]
    assert (entry["dtype"], entry["recorded_dtype"]) == ("float32", dtype)
    assert (written.dtype, written.recorded_dtype) == ("float32", dtype)


def test_what_is_not_finite_is_named_in_strict_json(tmp_path):
    tensor = torch.tensor([math.nan, math.inf, 1.0])
    run = recorded(tmp_path / "source", [("layers.0", Moment(), tensor)])
    convert(run, tmp_path / "lo", layout="quamba", mode="0")

    def refuse(name):
        raise ValueError(name)

    text = (tmp_path / "lo" / "mode_0_stats.json").read_text()
    entry = json.loads(text, parse_constant=refuse)["layer_0"]
    assert (entry["first_10"], entry["has_nan"], entry["has_inf"]) == (["NaN", "Infinity", 1.0], True, True)
    assert entry["mean"] == 1.0  # of the finite values


def test_a_summary_goes_into_the_statistics_and_its_array_is_left_out(tmp_path):
    values = torch.randn(5)
    records = [("layers.0", Moment(), values), ("layers.1", Moment(), summarize(values))]
    done = convert(recorded(tmp_path / "source", records), tmp_path / "lo", layout="quamba", mode="0")
    assert "only a summary was kept" in left(done)["layers.1:output"]
    assert [w.dtype for w in done.written] == ["float32", None]
    again = open_run(tmp_path / "lo")
    assert again.summary("layers.1").mean == summarize(values).mean


@pytest.mark.parametrize("mode", ["", "a/b", "..", "a\0b"])
def test_a_mode_that_can_name_no_file_is_refused(source, tmp_path, mode):
    with pytest.raises(BadText, match="is no mode to name a file after"):
        convert(source, tmp_path / "lo", layout="quamba", mode=mode)
    assert not (tmp_path / "lo").exists()


def test_whatever_a_mode_is_called_it_reads_back(source, tmp_path):
    stored = open_run(source).tensor("model.layers.0")
    for mode in ("two\nlines", "a b", "a_layer_1", "ü"):
        convert(source, tmp_path / "lo", layout="quamba", mode=mode)
        assert torch.equal(open_run(tmp_path / "lo", mode=mode).tensor("layers.0"), stored)


def test_a_run_that_names_no_mode_must_be_given_one(tmp_path):
    run = recorded(tmp_path / "source", [("layers.0", Moment(), torch.ones(1))])
    with pytest.raises(Unsupported, match="states none: say it with mode= or --mode"):
        convert(run, tmp_path / "lo", layout="quamba")


# First layer ----------------------------------------------------------------------------------------


def test_first_layer_is_what_its_scripts_load(source, tmp_path, tensors):
    path = tmp_path / "first_layer_io_all_modes.npz"
    done = convert(source, path, layout="first-layer")
    loaded = np.load(path)
    assert loaded.files == ["mode_2-1_input", "mode_2-1_output"]
    np.testing.assert_array_equal(loaded["mode_2-1_input"], tensors["model.layers.0:input[0]"].numpy())
    np.testing.assert_array_equal(loaded["mode_2-1_output"], tensors["model.layers.0"].numpy())
    stats = json.loads((tmp_path / "first_layer_io_all_modes_stats.json").read_text())
    about = [stats[key] for key in ("timestamp", "model", "pretrained_dir", "seq_len")]
    assert about == ["2025-01-10 16:00:00", "Tiny", "models/pa", 4]
    wanted = loaded["mode_2-1_input"].astype(np.float64)
    assert stats["modes"]["2-1"]["input"]["mean"] == pytest.approx(wanted.mean())
    assert stats["modes"]["2-1"]["output"]["shape"] == [1, 4, 6]
    assert len(done.left_out) == 5


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_second_mode_keeps_the_first(source, tmp_path, save):
    path = tmp_path / "io.npz"
    theirs = np.random.default_rng(0).standard_normal((3, 4))
    save(path, mode_fp32_input=theirs, mode_fp32_output=theirs.T, labels=np.arange(3))
    (tmp_path / "io_stats.json").write_text('{"model": "Other", "note": 1, "modes": {"fp32": {"input": {"mean": 1}}}}')
    done = convert(source, path, layout="first-layer")
    loaded = np.load(path)
    assert set(loaded.files) == {
        *("mode_fp32_input", "mode_fp32_output", "labels", "mode_2-1_input", "mode_2-1_output")
    }
    np.testing.assert_array_equal(loaded["mode_fp32_output"], theirs.T)
    stats = json.loads((tmp_path / "io_stats.json").read_text())
    assert stats["modes"]["fp32"] == {"input": {"mean": 1}}
    assert (stats["note"], set(stats["modes"])) == (1, {"fp32", "2-1"})
    assert done.notes == ("io_stats.json keeps speaking of the model Other; this mode is of Tiny",)
    with pytest.raises(RunExists, match="already has mode 2-1"):
        convert(source, path, layout="first-layer")
    convert(source, path, layout="first-layer", overwrite=True)
    assert len(np.load(path).files) == 5


def test_a_folder_gets_the_file_of_the_usual_name(source, tmp_path):
    convert(source, tmp_path / "out", layout="first-layer")
    assert open_run(tmp_path / "out").manifest.mode == "2-1"


def test_a_first_layer_without_its_input_says_so(tmp_path):
    run = recorded(tmp_path / "source", [("h.1", Moment(), torch.ones(2))])
    done = convert(run, tmp_path / "io.npz", layout="first-layer", mode="0")
    assert done.notes == ("the first layer that was recorded is h.1", "there is no input of h.1 to write")
    assert np.load(tmp_path / "io.npz").files == ["mode_0_output"]


# Neuron ---------------------------------------------------------------------------------------------


def test_neuron_is_what_its_scripts_load(tmp_path, tensors):
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    run = recorded(tmp_path / "source", [(name, Moment(), tensor) for name, tensor in half.items()])
    done = convert(run, tmp_path / "full_model", layout="neuron", mode="bf16")
    to = tmp_path / "full_model"
    for file, name in {
        "embedding_output": "model.embed_tokens",
        "layer_1_output": "model.layers.0",
        "layer_3_output": "model.layers.2",
        "logits_output": "lm_head",
    }.items():
        loaded = torch.load(to / f"{file}.pt")
        assert torch.equal(loaded, half[name])
        assert loaded.untyped_storage().nbytes() == loaded.nbytes  # not the segment it was cut from
    stats = torch.load(to / "statistics.pt")
    assert list(stats) == ["layer_0", "layer_1", "layer_2", "layer_3"]
    for key, name in {"layer_0": "model.embed_tokens", "layer_3": "model.layers.2"}.items():
        exact = half[name].double().numpy()
        assert stats[key]["mean"] == pytest.approx(exact.mean())
        assert stats[key]["std"] == pytest.approx(float(half[name].float().std()), rel=1e-6)  # as the scripts compute
        assert (stats[key]["std"], stats[key]["std_ddof"]) == (pytest.approx(exact.std(ddof=1)), 1)
        assert (stats[key]["min"], stats[key]["max"]) == (exact.min(), exact.max())
        plain = (stats[key]["has_nan"], stats[key]["has_inf"], stats[key]["shape"], stats[key]["dtype"])
        assert plain == (False, False, [1, 4, 6], "torch.bfloat16")
        assert {type(value) for value in stats[key].values()} <= {float, int, bool, str, list}
    metadata = torch.load(to / "metadata.pt")
    assert (metadata["mode"], metadata["num_layers"]) == ("bf16", 3)
    assert set(left(done)) == {"model.norm:output", "model.layers.0:input[0]"}


def test_neuron_replaces_its_own_files_only_when_told(source, tmp_path):
    to = tmp_path / "nn"
    convert(source, to, layout="neuron")
    torch.save(torch.ones(1), to / "layer_9_output.pt")
    (to / "notes.txt").write_text("mine")
    with pytest.raises(RunExists, match="overwrite=True"):
        convert(source, to, layout="neuron")
    convert(source, to, layout="neuron", overwrite=True)
    assert not (to / "layer_9_output.pt").exists()
    assert (to / "notes.txt").read_text() == "mine"


# Monitor --------------------------------------------------------------------------------------------


def test_monitor_items_load_with_torchs_defaults(tmp_path):
    first, second = torch.randn(2, 3), torch.randn(2, 2)
    records = []
    for epoch in (1, 5):
        for batch in (0, 7):
            moment = Moment(epoch=epoch, step=epoch * 10 + batch, batch=batch)
            records += [("attn:output[0]", moment, first * epoch), ("attn:output[2]", moment, second)]
            records += [("ffn", moment, first + batch), ("ffn:grad_output", moment, first)]
    run = recorded(tmp_path / "source", records, aliases={"attention": ["attn:output"]})
    done = convert(run, tmp_path / "out", layout="monitor")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == [f"single_epoch_{e}_{k:03d}.pt" for e in (1, 5) for k in range(4)]
    items = [torch.load(tmp_path / "out" / name) for name in names]
    assert all(list(i) == ["epoch", "batch_idx", "layer", "alias", "output_shape", "output"] for i in items)
    attn = [item for item in items if item["layer"] == "attn"]
    assert [(i["epoch"], i["batch_idx"], i["alias"]) for i in attn] == [
        (e, b, "attention") for e in (1, 5) for b in (0, 7)
    ]
    assert attn[2]["output_shape"] == [[2, 3], None, [2, 2]]
    assert torch.equal(attn[2]["output"][0], first * 5)
    assert attn[2]["output"][1] is None
    assert "gradients have no place" in left(done)["ffn:grad_output"]
    again = open_run(tmp_path / "out")
    assert torch.equal(again.tensor("ffn", epoch=5, batch=7), first + 7)


def test_of_several_calls_in_a_batch_the_last_is_an_item(tmp_path):
    records = [("a", Moment(call=n), torch.full((1,), float(n))) for n in range(3)]
    done = convert(recorded(tmp_path / "source", records), tmp_path / "out", layout="monitor")
    (path,) = (tmp_path / "out").iterdir()
    assert torch.load(path)["output"].tolist() == [2]
    assert [each.reason for each in done.left_out] == [
        "step=0 gives way to step=0 call=1: an item is one call of one batch",
        "step=0 call=1 gives way to step=0 call=2: an item is one call of one batch",
    ]


# Choosing -------------------------------------------------------------------------------------------


def test_one_of_several_moments_must_be_chosen(tmp_path):
    records = [
        ("layers.0", Moment(step=s, batch=s, call=c), torch.full((1,), s + c / 10)) for s in (0, 1) for c in (0, 1)
    ]
    run = recorded(tmp_path / "source", records)
    with pytest.raises(Ambiguous) as told:
        convert(run, tmp_path / "lo", layout="quamba", mode="0")
    assert str(told.value) == (
        "layers.0:output was recorded at 4 moments: step=0, step=0 call=1, step=1, step=1 call=1; "
        "the quamba layout holds one, so choose it with step= or --step, batch= or --batch, call= or --call"
    )
    convert(run, tmp_path / "lo", layout="quamba", mode="0", step=1, call=1)
    assert np.load(tmp_path / "lo" / "mode_0_layer_0.npy").tolist() == [pytest.approx(1.1)]
    with pytest.raises(NoSuchPoint, match="no output of a decoder layer at step=7: nothing to write"):
        convert(run, tmp_path / "lo", layout="quamba", mode="1", step=7)


@pytest.mark.parametrize("layout", ["quamba", "first-layer", "neuron"])
def test_samples_that_were_recorded_a_few_at_a_time_are_one_tensor(tmp_path, layout):
    whole = torch.randn(7, 4, 6)
    steps = [("model.layers.0", Moment(step=n, batch=n), part) for n, part in enumerate(whole.split(3))]
    steps += [("loss", Moment(step=n, batch=n), torch.tensor(float(n))) for n in range(3)]
    about = {"mode": "0", "settings": {"calib_data_num": 7}}
    run = recorded(tmp_path / "run", steps, **about)
    done = convert(run, tmp_path / "to", layout=layout)
    assert [(w.point.name, w.shape) for w in done.written] == [("model.layers.0", (7, 4, 6))]
    assert torch.equal(open_run(tmp_path / "to").tensor("layers.0"), whole)
    one = convert(run, tmp_path / "one", layout=layout, step=1)
    assert [w.shape for w in one.written] == [(3, 4, 6)]
    more = recorded(tmp_path / "more", [*steps, ("model.layers.0", Moment(step=3), whole)], **about)
    with pytest.raises(Ambiguous, match="4 moments"):
        convert(more, tmp_path / "no", layout=layout)


def test_patterns_choose_the_points(source, tmp_path):
    done = convert(source, tmp_path / "lo", layout="quamba", points=["model.layers.{0,2}"])
    assert [w.file for w in done.written] == ["mode_2-1_layer_0.npy", "mode_2-1_layer_2.npy"]
    assert done.left_out == ()


def test_a_layout_that_nobody_writes_lists_those_that_are(source, tmp_path):
    with pytest.raises(Unsupported, match="no layout 'sglang' to write; there are layerscope, quamba"):
        convert(source, tmp_path / "x", layout="sglang")


def test_these_layouts_are_written_to_disks(source):
    with pytest.raises(Unsupported, match="not to memory://lo"):
        convert(source, "memory://lo", layout="quamba")


@pytest.mark.parametrize("layout", WRITTEN)
def test_a_conversion_that_fails_in_the_middle_leaves_nothing(source, tmp_path, layout):
    (segment,) = source.rglob("*.safetensors")
    raw = bytearray(segment.read_bytes())
    for entry in open_run(source).records():
        raw[raw.index(entry.tensor().numpy().tobytes())] ^= 4
    segment.write_bytes(raw)
    with pytest.raises(OSError, match="checksum"):
        convert(source, tmp_path / "to", layout=layout)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and source not in p.parents]


# Round trips ----------------------------------------------------------------------------------------

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int8", "uint8", "bool", "complex64")


@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4)])
def test_every_layout_gives_back_what_it_was_given(tmp_path, layout, shape):
    torch.manual_seed(0)
    given = [(torch.randn(shape) * 9).to(getattr(torch, dtype)) for dtype in DTYPES]
    records = [(f"layers.{n}", Moment(), tensor) for n, tensor in enumerate(given)]
    convert(recorded(tmp_path / "source", records), tmp_path / "to", layout=layout, mode="m")
    run = open_run(tmp_path / "to")
    for n, tensor in enumerate(given[:1] if layout == "first-layer" else given):
        got = run.tensor(f"layers.{n}")
        wanted = tensor.float() if tensor.dtype == torch.bfloat16 and layout == "quamba" else tensor
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("between", ["quamba", "neuron", "monitor", "first-layer"])
def test_from_one_layout_to_another_and_home_again(source, tmp_path, tensors, between):
    convert(source, tmp_path / "there", layout=between)
    convert(tmp_path / "there", tmp_path / "back", layout="layerscope")
    run = open_run(tmp_path / "back")
    name = "model.layers.0" if between == "monitor" else "layers.0"
    assert torch.equal(run.tensor(name), tensors["model.layers.0"])
    assert run.summary(name) == summarize(tensors["model.layers.0"])
    assert (run.layout, run.state) == ("layerscope", "unknown")
    assert run.manifest.settings["converted_from"]["layout"] == between
