"""Many modes of one model: a run for each, on the same inputs."""

import pytest
import torch
from torch import nn

from layerscope.errors import NoSuchPoint, RunExists
from layerscope.models import Inputs
from layerscope.models.tiny import tiny_transformer
from layerscope.modes.mode_runs import record_modes
from layerscope.modes.registry import Mode, choose, copied, variant
from layerscope.store import convert, open_run
from layerscope.store.joining import joined


def failing(model, setting):
    raise RuntimeError("cannot be made")


def breaking(model, setting):
    own = copied(model)
    own.lm_head.register_forward_pre_hook(lambda module, args: 1 / 0)
    return own


@pytest.fixture
def model():
    return tiny_transformer(layers=2, hidden=32, heads=2)


@pytest.fixture
def batches():
    return [Inputs((torch.arange(at, at + 5).view(1, 5),)) for at in range(3)]


def test_each_run_holds_what_its_variant_computes(model, batches, tmp_path):
    modes = choose(["fp32", "bf16", "int8-weight"], model).modes
    done = list(record_modes(model, modes, batches, "lm_head", to=tmp_path / "runs", name="tiny"))
    assert [one.mode.name for one in done] == ["fp32", "bf16", "int8-weight"]
    for one in done:
        run = open_run(tmp_path / "runs" / one.mode.name)
        own = variant(model, one.mode)
        assert one.error is None
        assert (run.manifest.mode, run.manifest.model["name"]) == (one.mode.name, "tiny")
        for step, batch in enumerate(batches):
            with torch.no_grad():
                assert torch.equal(run.tensor("lm_head", step=step), own(*batch.args))


def test_a_run_says_that_its_mode_is_quantised_and_a_float_one_says_nothing(model, batches):
    grouped = Mode(
        "mine", "weights on a grid of its own", lambda model, setting: copied(model), groups=frozenset({"quant_only"})
    )
    modes = [*choose(["fp32", "bf16", "int8-weight"], model).modes, grouped]
    done = list(record_modes(model, modes, batches[:1], "lm_head", to=None))
    assert [one.error for one in done] == [None] * 4
    said = [one.run.manifest.settings.get("quantised") for one in done]
    assert said == [None, None, "mode int8-weight", "mode mine"]


def test_every_run_states_the_same_inputs_and_another_input_another_fingerprint(model, batches, tmp_path):
    def states(batches, to):
        done = record_modes(model, choose(["fp_only"], model).modes, batches, "lm_head", to=to, settings={"seq_len": 5})
        return [one.run.manifest.settings for one in done]

    first = states(batches, tmp_path / "a")
    assert len({each["inputs"] for each in first}) == 1
    assert all(each["seq_len"] == 5 for each in first)
    assert states(batches[:2], tmp_path / "b")[0]["inputs"] != first[0]["inputs"]


def test_without_a_place_the_runs_are_in_memory(model, batches):
    (one,) = record_modes(model, choose(["fp32"], model).modes, batches[:1], "lm_head", to=None)
    assert one.address is None
    assert torch.equal(one.run.tensor("lm_head"), model(*batches[0].args))


def test_a_mode_that_fails_does_not_cost_the_others(model, batches, tmp_path):
    fp32 = choose(["fp32"], model).modes[0]
    modes = [Mode("bad", "x", failing), Mode("worse", "x", breaking), fp32]
    done = {one.mode.name: one for one in record_modes(model, modes, batches, "model.norm", to=tmp_path)}
    assert "cannot be made" in str(done["bad"].error)
    assert isinstance(done["worse"].error, ZeroDivisionError)
    assert open_run(tmp_path / "worse").state == "interrupted"
    assert done["fp32"].error is None
    assert open_run(tmp_path / "fp32").complete


def test_runs_that_are_there_are_found_out_before_anything_is_made(model, batches, tmp_path):
    modes = choose(["fp32", "fp16"], model).modes
    assert len(list(record_modes(model, modes[1:], batches, "lm_head", to=tmp_path))) == 1
    with pytest.raises(RunExists, match="fp16 holds a run already"):
        next(record_modes(model, modes, batches, "lm_head", to=tmp_path))
    assert not (tmp_path / "fp32").exists()
    again = list(record_modes(model, modes[1:], batches, "lm_head", to=tmp_path, append=True))
    assert [m.step for m in again[0].run.moments] == [0, 1, 2, 3, 4, 5]


def test_random_layers_draw_the_same_in_every_mode(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    modes = choose(["fp32", "fp16"], model).modes
    done = record_modes(model, modes, [Inputs((torch.ones(4, 8),))], "1", to=None, seed=3)
    masks = [one.run.tensor("1") == 0 for one in done]
    assert torch.equal(*masks)
    assert masks[0].any()


def test_progress_goes_over_modes_batches_and_points(model, batches, tmp_path):
    told = []
    modes = choose(["fp32", "fp16"], model).modes
    list(record_modes(model, modes, batches, "model.layers.*", to=tmp_path, progress=lambda *now: told.append(now)))
    assert {total for _, _, total in told} == {2 * 3 * 2}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 12)
    assert ("fp16: model.layers.1", 12, 12) in told


def test_a_pattern_that_matches_nothing_is_an_error_before_the_first_mode(model, batches, tmp_path):
    with pytest.raises(NoSuchPoint):
        next(record_modes(model, choose(["fp32"], model).modes, batches, "nothing.*", to=tmp_path))
    assert not (tmp_path / "fp32").exists()


def test_the_caller_says_how_a_batch_is_run(model, batches):
    def forward(own, batch):
        own(*batch.args).sum().backward()

    (one,) = record_modes(
        model, choose(["fp32"], model).modes, batches[:1], "lm_head:grad_output", to=None, forward=forward
    )
    assert one.run.tensor("lm_head:grad_output").unique().tolist() == [1.0]


class Peeks(nn.Module):
    """Looks into a Linear layer instead of calling it, as transformers' Mamba does."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return x @ self.fc.weight.expand(1, 32, 32)


def test_a_weight_used_behind_the_layers_back_is_said_to_be():
    modes = choose(["int8-weight"], Peeks()).modes
    (one,) = record_modes(Peeks(), modes, [Inputs((torch.ones(1, 32),))], ".", to=None)
    assert str(one.error) == (
        "mode 'int8-weight' does not fit Peeks: its own code uses the weight of a Linear layer as a bare tensor, which "
        "a quantised weight cannot be"
    )


def test_modes_recorded_in_slices_are_written_as_one_file_each(tmp_path):
    model = tiny_transformer(layers=2, hidden=32, heads=2)
    ids = torch.arange(40).view(8, 5)

    def written(size, to):
        batches = [Inputs((few,)) for few in ids.split(size)]
        for one in record_modes(model, choose(["fp32", "bf16"], model).modes, batches, "model.layers.*", to=None):
            convert(joined(one.run), to, layout="quamba")
        return open_run(f"{to}:bf16")

    sliced, at_once = written(3, tmp_path / "sliced"), written(8, tmp_path / "at once")
    for layer in ("layers.0", "layers.1"):
        assert sliced.tensor(layer).shape == (8, 5, 32)
        torch.testing.assert_close(sliced.tensor(layer), at_once.tensor(layer), rtol=2e-2, atol=2e-2)
