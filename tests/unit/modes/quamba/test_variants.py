"""The variants of the table: what each stage passes on, what agrees with what, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.errors import NoSuchMode, Unsupported
from layerscope.models.mamba import CausalConv, Mamba, MambaConfig, Scan
from layerscope.models.mamba.assembly import assembled
from layerscope.models.mamba.drawing import drawn_weights
from layerscope.modes.quamba import QUAMBA_MODES, Codes, calibrate, quantised, why_not
from layerscope.modes.quamba.stages import Convolution, FloatScan, Int8Scan, Projection

CONFIG = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=3, state_size=4, time_step_rank=2)
ALL = pytest.mark.parametrize("mode", QUAMBA_MODES)
FIXED = pytest.mark.parametrize("mode", [mode for mode in QUAMBA_MODES if mode != "3"])  # its scale is the tensor's
PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj")


def ids(seed: int, *, samples: int = 4, length: int = 64) -> torch.Tensor:
    return torch.randint(32, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> Mamba:
    return assembled(CONFIG, drawn_weights(CONFIG, seed=0), source="tests")


@pytest.fixture
def calibration(model):
    return calibrate(model, [ids(0)])


def seen(model: nn.Module, mixer: str = "backbone.layers.0.mixer") -> dict[str, tuple]:
    """What the stages of a mixer are given (`scan`) and give (the others) when the model runs."""
    found: dict[str, tuple] = {}
    stages = dict(model.get_submodule(mixer).named_children())
    handles = [
        stage.register_forward_hook(lambda _, args, out, name=name: found.update({name: (args, out)}))
        for name, stage in stages.items()
    ]
    with torch.no_grad():
        model(ids(1))
    for handle in handles:
        handle.remove()
    return found


def on_grid(x: torch.Tensor, scale: torch.Tensor | float) -> bool:
    steps = x.double() / float(scale)
    return bool(((steps - steps.round()).abs() < 1e-4).all())


def test_the_modes_are_those_of_the_table_each_with_a_line_of_its_own():
    assert list(QUAMBA_MODES) == ["0", "2-0", "2-1", "2-2", "2-3", "2-4", "3", "1"]
    assert len(set(QUAMBA_MODES.values())) == 8


@pytest.mark.parametrize(
    ("mode", "convolution", "scan"),
    [
        ("0", "codes", "codes"),
        ("2-0", "on the grid", "codes"),
        ("2-1", "codes", "codes"),
        ("2-2", "on the grid", "float"),
        ("2-3", "float", "codes"),
        ("2-4", "float", "float"),
        ("3", "float", "float"),
        ("1", "float", "the model's own"),
    ],
)
def test_values_between_the_stages_are_what_the_table_says(model, calibration, mode, convolution, scan):
    variant = quantised(model, mode, calibration)
    mixer, u = variant.backbone.layers[0].mixer, seen(variant)["conv1d"][1]
    scale = calibration.layers[0].u
    if convolution == "codes":
        assert isinstance(u, Codes)
        assert (u.codes.dtype, float(u.scale)) == (torch.int8, pytest.approx(scale))
    else:
        assert u.dtype == torch.float32
        assert on_grid(u, scale) == (convolution == "on the grid")
    assert type(mixer.conv1d) is (CausalConv if mode == "1" else Convolution)
    assert type(mixer.scan) is {"codes": Int8Scan, "float": FloatScan, "the model's own": Scan}[scan]
    if mode != "1":
        assert (mixer.conv1d.input_scale is None) == (mode == "3")


@ALL
def test_the_four_projections_are_w8a8_in_every_mode_and_every_layer(model, calibration, mode):
    variant = quantised(model, mode, calibration)
    for layer in variant.backbone.layers:
        for name in PROJECTIONS:
            stage = getattr(layer.mixer, name)
            assert type(stage) is Projection
            assert stage.weight.dtype == torch.int8
            assert stage.input_scale.shape == ()
            assert stage.arithmetic.name == ("plain" if mode in ("2-1", "2-3") else "fast")


@ALL
def test_the_given_model_is_untouched_and_shares_what_is_not_quantised(model, calibration, mode):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    said, logits = repr(model), model(ids(1))
    variant = quantised(model, mode, calibration)
    variant(ids(1))
    assert repr(model) == said
    assert torch.equal(model(ids(1)), logits)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    own = dict(model.named_parameters())
    shared = dict(variant.named_parameters())
    assert all(parameter is own[name] for name, parameter in shared.items())
    assert {name for name in own if name not in shared} >= {"backbone.layers.0.mixer.in_proj.weight"}
    assert variant.lm_head.weight is model.lm_head.weight
    assert not torch.equal(variant(ids(1)), logits)


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ("2-0", "0", "a code that is taken off its grid and put back on it is the same code"),
        ("2-3", "2-1", "both x_proj and the scan put the floats on the grid that the convolution would have"),
    ],
    ids=["2-0 and 0", "2-3 and 2-1"],
)
def test_some_modes_are_equal_bit_for_bit_by_their_definitions(model, calibration, one, other, reason):
    assert torch.equal(quantised(model, one, calibration)(ids(1)), quantised(model, other, calibration)(ids(1))), reason


@pytest.mark.parametrize("mode", ["2-1", "2-2"])
def test_a_layer_of_2_1_and_2_2_gives_what_0_gives_but_for_values_on_the_border_of_two_codes(model, calibration, mode):
    torch.manual_seed(0)
    hidden = torch.randn(4, 64, 32)
    base, other = (quantised(model, name, calibration).backbone.layers[1].mixer for name in ("0", mode))
    given: dict[str, list[torch.Tensor]] = {"base": [], "other": []}
    for name, mixer in (("base", base), ("other", other)):
        for stage in ("in_proj", "x_proj", "dt_proj", "scan"):
            mixer.get_submodule(stage).register_forward_hook(lambda _, args, out, to=given[name]: to.append(out))
    with torch.no_grad():
        y, z = base(hidden), other(hidden)
    *integers, scan = zip(given["base"], given["other"], strict=True)
    assert all(torch.equal(one, two) for one, two in integers)  # up to the scan nothing differs at all
    assert (scan[0] - scan[1]).norm() <= 1e-6 * scan[0].norm()
    # out_proj rounds what the scans gave: most codes are the same ones, and no other is further away than one step
    step = base.out_proj.input_scale * base.out_proj.weight_scale * base.out_proj.weight.abs().amax(1)
    differs = (y - z).abs() > 1e-5 * y.abs().max()
    assert differs.any(dim=-1).float().mean() < 0.02
    assert ((y - z).abs() <= 3 * step).all()


@ALL
def test_a_variant_says_where_it_is_int8(model, calibration, mode):
    said = repr(quantised(model, mode, calibration))
    alike = said.count("Mixer(")  # torch prints layers that say the same as one
    assert said.count("INT8 weight, INT8 input") == alike * (4 if mode == "1" else 5)
    assert ("INT8 output" in said) == (mode in ("0", "2-1"))
    assert ("float output on the INT8 grid" in said) == (mode in ("2-0", "2-2"))
    assert ("INT8 u, delta, B, C" in said) == (mode in ("0", "2-0", "2-1", "2-3"))
    assert ("delta, B, C on the INT8 grid" in said) == (mode in ("2-2", "2-4", "3"))
    assert ("float output" in said) == (mode in ("2-0", "2-2", "2-3", "2-4", "3"))
    assert ("(plain)" in said) == (mode in ("2-1", "2-3"))
    assert ("of the tensor" in said) == (mode == "3")


@FIXED
def test_a_sample_alone_is_what_it_is_in_a_batch_to_rounding(model, calibration, mode):
    variant = quantised(model, mode, calibration)
    with torch.no_grad():
        together, alone = variant(ids(1))[:1], variant(ids(1)[:1])
    assert (together - alone).norm() <= 1e-2 * together.norm()


def test_what_cannot_be_quantised_says_why_in_one_sentence(model, calibration):
    assert why_not(model) is None
    other = nn.Sequential(nn.Linear(2, 2))
    assert why_not(other) == (
        "it quantises the stages of layerscope's own Mamba (quamba-small, quamba-130m-w8a8 or a Mamba checkpoint "
        "folder), and this model is a Sequential"
    )
    with pytest.raises(
        Unsupported, match="mode '0' does not fit Sequential: it quantises the stages of layerscope's own"
    ):
        quantised(other, "0", calibration)
    with pytest.raises(Unsupported, match="it is quantised already, and variants are made of the float model"):
        quantised(quantised(model, "0", calibration), "2-1", calibration)
    half = assembled(CONFIG, drawn_weights(CONFIG, seed=0), source="tests").half()
    assert why_not(half) == "it starts from float32 weights, and these are float16; use model.float()"


def test_an_unknown_mode_and_a_calibration_of_another_depth_are_refused(model, calibration):
    with pytest.raises(NoSuchMode, match=r"no quantised mode '2-5' of a Mamba; there are 0, 2-0, 2-1"):
        quantised(model, "2-5", calibration)
    shallow = MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, state_size=4, time_step_rank=2)
    other = assembled(shallow, drawn_weights(shallow, seed=0), source="tests")
    with pytest.raises(Unsupported, match="of 3 layers, and the model has 1; calibrate this model"):
        quantised(other, "0", calibration)


@FIXED
def test_a_sample_has_the_same_bits_whatever_it_is_batched_with(model, calibration, mode):
    variant, samples = quantised(model, mode, calibration).backbone, ids(2, samples=5)
    with torch.no_grad():
        together = variant(samples)
        for size in (1, 2, 3):
            assert torch.equal(torch.cat([variant(few) for few in samples.split(size)]), together)
