"""A model whose modules are put in each other's place while it is recorded, as PEFT and quantisation do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits

X = torch.linspace(-1, 1, 8).view(2, 4)


def nested():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def test_a_module_that_takes_anothers_place_is_recorded_from_then_on(tmp_path, caplog):
    for to in (None, tmp_path / "run"):
        model = nested()
        old, new = model[0][0], nn.Linear(4, 4)
        with ls.record(model, ["0.0", "1"], to=to, on_error="raise") as rec:
            model(X)
            model[0][0] = new
            model(X)
            model[0] = nn.Sequential(old, nn.Identity())  # the module above it
            model(X)
        assert rec.missing == []
        for step, layer in enumerate((old, new, old)):
            assert_same_bits(rec.run.tensor("0.0", step=step), layer(X).detach())
        assert [m.step for m in rec.run.moments] == [0, 1, 2]
        assert_no_hooks_left(model)
        assert_no_hooks_left(nn.ModuleList([old, new]))
    assert "0.0 was replaced while recording" in caplog.text


def test_a_wrapper_around_a_module_is_one_record_under_its_name():
    """What PEFT does: the old module goes on inside the new one."""
    model = nested()
    with ls.record(model, "0.0", on_error="raise") as rec:
        model(X)
        model[0][0] = zoo.Holder(lambda m, x: m.base(x) + 1, base=model[0][0])
        model(X)
    assert [(e.moment.step, e.moment.call) for e in rec.run.records()] == [(0, 0), (1, 0)]
    assert_same_bits(rec.run.tensor("0.0", step=1), rec.run.tensor("0.0", step=0) + 1)


def test_hooks_that_were_off_while_nothing_was_due_come_back_on_the_new_module():
    model = nested()
    with ls.record(model, "0.0", when="every(5)", on_error="raise") as rec:
        for step in range(11):
            if step == 4:
                model[0][0] = nn.Linear(4, 4)
            model(X)
    assert [m.step for m in rec.run.moments] == [0, 5, 10]
    assert_same_bits(rec.run.tensor("0.0", step=10), model[0][0](X).detach())


def test_a_module_that_was_taken_out_is_missing_with_the_reason():
    model = zoo.Holder(lambda m, x: m.b(m.a(x)) if hasattr(m, "b") else m.a(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with ls.record(model, ["a", "b"]) as rec:
        model(X)
        del model.b
        model(X)
    [missing] = rec.missing
    assert missing.point == "b:output"
    assert "taken out of the model while recording" in missing.reason
    rec = ls.record(model, "**", on_error="raise").__enter__()
    model(X)
    del model.a
    model._forward = lambda m, x: x
    model(X)
    with pytest.raises(ls.errors.Incomplete, match="taken out of the model"):
        rec.__exit__(None, None, None)


def test_a_module_that_came_while_recording_is_missing_where_a_tap_names_it():
    model = nested()
    with ls.record(model, "**") as rec, ls.record(model, "1") as other:
        model.append(nn.Linear(4, 4))
        model(X)
    assert [missing.point for missing in rec.missing] == ["2:output"]
    assert "came into the model while recording" in rec.missing[0].reason
    assert other.missing == []


def test_peft_and_quantisation_keep_the_names_that_are_still_there():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nested(), nn.ReLU())
    with ls.record(model, ["0.0.0", "0.1"]) as rec:
        model(X)
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0.0.0"], init_lora_weights=False), model)
        after = model(X)
    assert rec.missing == []
    assert {(str(e.point), e.moment.step) for e in rec.run.records()} == {
        (f"{name}:output", step) for name in ("0.0.0", "0.1") for step in (0, 1)
    }
    assert_same_bits(rec.run.tensor("0.0.0", step=1), model[0][0][0](X).detach())
    assert_same_bits(after, copy.deepcopy(model)(X))


def test_a_schedule_that_raises_in_one_step_is_listed_and_loses_nothing_else(caplog):
    def odd(moment):
        if moment.step in (1, 3):
            raise ZeroDivisionError("nobody looked")
        return True

    model = nested()
    taps = [ls.Tap("0.0", when=ls.when(odd)), ls.Tap("1")]
    with ls.record(model, taps) as rec:
        for _ in range(5):
            model(X)
    steps = {name: [e.moment.step for e in rec.run.records() if e.point.name == name] for name in ("0.0", "1")}
    assert steps == {"0.0": [0, 2, 4], "1": [0, 1, 2, 3, 4]}
    [missing] = rec.missing
    assert missing.point == "0.0:output"
    assert "raised ZeroDivisionError: nobody looked (at step 1, and 1 times more)" in missing.reason
    assert caplog.text.count("ZeroDivisionError") == 1
    rec = ls.record(model, taps, on_error="raise").__enter__()
    model(X)
    model(X)
    with pytest.raises(ls.errors.Incomplete, match="ZeroDivisionError"):
        rec.__exit__(None, None, None)


def test_a_schedule_for_all_taps_that_raises_lists_them_all():
    model = nested()
    with ls.record(model, ["0.0", "1"], when=ls.when(lambda moment: 1 / (moment.step - 1) > -2)) as rec:
        for _ in range(3):
            model(X)
    assert [m.step for m in rec.run.moments] == [0, 2]
    assert {missing.point for missing in rec.missing} == {"0.0:output", "1:output"}
