"""The Monitor's published interface, against PyTorch's own hooks and torch.load."""

import gc
import json
import logging
import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from asserts import assert_no_hooks_left, hooks_on
from layerscope import open_run
from layerscope.monitor.monitor import Monitor


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def feed(monitor, net, *, epoch=1, batches=3, rows=2):
    """Run an epoch; return what each module gave, as PyTorch's own hooks saw it."""
    seen = {name: [] for name, _ in net.named_modules()}
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: seen[name].append(o))
        for name, module in net.named_modules()
    ]
    monitor.set_epoch(epoch)
    for n in range(batches):
        monitor.set_batch_idx(n)
        net(torch.full((rows, 4), epoch + n / 10))
    for handle in handles:
        handle.remove()
    return seen


# What can be asked --------------------------------------------------------------------------------


def test_layers_that_do_not_exist_are_named_with_those_that_do(tmp_path):
    with pytest.raises(ValueError, match="do not exist") as caught:
        Monitor(model(), ["0", "nope", "5"], [1], tmp_path, [0])
    assert str(caught.value) == (
        "The following layers specified in 'layers_to_monitor' do not exist in the model: ['nope', '5']. "
        "Available layers: ['0', '1', '2']"
    )


@pytest.mark.parametrize(
    ("layers", "alias"),
    [
        ({"0": {"alias": "a"}, "2": {"alias": "a"}}, "a"),
        ({"0": {"alias": "2"}, "2": {}}, "2"),
        (["0", "0"], "0"),
        ({"*": {"alias": "all"}}, "all"),
    ],
)
def test_two_layers_under_one_alias_are_refused(tmp_path, layers, alias):
    with pytest.raises(ValueError, match="Duplicate") as caught:
        Monitor(model(), layers, [1], tmp_path, [0])
    assert str(caught.value) == f"Duplicate alias '{alias}' in layers_to_monitor."


@pytest.mark.parametrize(
    ("layers", "epochs", "batches", "said"),
    [
        (["0"], [], [0], "'epochs_to_record' is empty"),
        (["0"], range(0), [0], "'epochs_to_record' is empty"),
        (["0"], [1], None, "'batch_indices' must be given and not empty"),
        (["0"], [1], [], "'batch_indices' must be given and not empty"),
        (
            {"0": {"record_type": "all"}},
            [1],
            [0],
            "record_type 'all' of layer '0' is not known; use 'single' or 'epoch_full'",
        ),
        ({"0": {"alais": "a"}}, [1], [0], "layer '0' has"),
        ([], [1], [0], "'layers_to_monitor' is empty"),
        ([7], [1], [0], "7 in 'layers_to_monitor' is not the name"),
        (["0:input"], [1], [0], "asks for more than outputs"),
        (["0"], [-1], [0], "epochs_to_record"),
        (["0"], [True], [0], "epochs_to_record"),
        (["0"], [1], [0.5], "batch_indices"),
    ],
)
def test_what_cannot_be_asked_is_a_value_error(tmp_path, layers, epochs, batches, said):
    net = model()
    with pytest.raises(ValueError, match=said):
        Monitor(net, layers, epochs, tmp_path, batches)
    assert_no_hooks_left(net)


def test_a_container_that_is_never_called_is_refused(tmp_path):
    net = zoo.Holder(lambda m, x: m.layers[0](x), layers=nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="layers"):
        Monitor(net, ["layers"], [1], tmp_path, [0])


def test_epoch_full_needs_no_batches_and_takes_all(tmp_path):
    net = model()
    with Monitor(net, {"0": {"record_type": "epoch_full"}, "2": None}, [1], tmp_path, [1]) as monitor:
        feed(monitor, net)
        assert list(monitor.get_epoch_data()["0"]["data"]) == [(1, 0), (1, 1), (1, 2)]
        assert list(monitor.get_single_data()["2"]["data"]) == [(1, 1)]


def test_patterns_stand_for_the_layers_they_match(tmp_path):
    with Monitor(model(), ["type:Linear"], [1], tmp_path, [0]) as monitor:
        assert [layer.alias for layer in monitor.layers] == ["0", "2"]


def test_the_names_of_a_wrapped_model_work_as_they_are_listed(tmp_path):
    net = nn.DataParallel(model())
    with Monitor(net, ["module.0"], [1], tmp_path, [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(torch.ones(1, 4))
        assert monitor.get_single_data()["module.0"]["layer"] == "module.0"


def test_a_module_under_two_names_is_captured_under_both(tmp_path):
    net, inputs = zoo.shared()
    with Monitor(net, {"a": {}, "b": {"record_type": "epoch_full"}}, [1], tmp_path, [0]) as monitor:
        for n in range(2):
            monitor.set_epoch(1) if n == 0 else None
            monitor.set_batch_idx(n)
            net(*inputs)
        assert list(monitor.get_single_data()["a"]["data"]) == [(1, 0)]
        assert list(monitor.get_epoch_data()["b"]["data"]) == [(1, 0), (1, 1)]


# Handing out --------------------------------------------------------------------------------------


def test_what_is_handed_out_is_what_the_layers_gave(tmp_path):
    net = model()
    with Monitor(
        net, {"0": {"alias": "first"}, "2": {"record_type": "epoch_full"}}, [1, 2], tmp_path, [0, 2]
    ) as monitor:
        seen = feed(monitor, net)
        data = monitor.get_single_data()
        assert data.keys() == {"first"}
        assert data["first"].keys() == {"layer", "alias", "output_shape", "data"}
        assert (data["first"]["layer"], data["first"]["output_shape"]) == ("0", [2, 3])
        assert data["first"]["data"][1, 2].equal(seen["0"][2])
        assert not data["first"]["data"][1, 2].requires_grad
        assert [each.tolist() for each in monitor.get_epoch_buffers()["2"]] == [each.tolist() for each in seen["2"]]
        assert len(monitor.get_single_outputs()["first"]) == 2


def test_every_access_is_a_copy_of_its_own(tmp_path):
    net = model()
    with Monitor(net, ["0"], [1], tmp_path, [0]) as monitor:
        feed(monitor, net)
        data = monitor.get_single_data()["0"]["data"]
        before = data[1, 0].clone()
        data[1, 0].zero_()
        assert data[1, 0].equal(before)
        assert next(iter(monitor.get_single_data()["0"]["data"].values())).equal(before)
        with pytest.raises(KeyError):
            data[1, 1]


def test_layers_are_chosen_by_alias_or_by_name(tmp_path, caplog):
    net = model()
    with Monitor(net, {"0": {"alias": "first"}, "2": {}}, [1], tmp_path, [0]) as monitor:
        feed(monitor, net)
        assert monitor.get_single_data(["first"]).keys() == monitor.get_single_data("0").keys() == {"first"}
        assert monitor.get_single_data(layers=["0", "2"]).keys() == {"first", "2"}
        assert monitor.get_epoch_data("0") == {}
        assert monitor.get_single_data(["other"]) == {}
    assert "'other' is not monitored; there is first, 2" in caplog.text


def test_tuples_stay_tuples_and_none_stays_none(tmp_path):
    net, inputs = zoo.tuple_outputs()
    with Monitor(net, ["block"], [1], tmp_path, [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(*inputs)
        info = monitor.get_single_data()["block"]
        assert info["output_shape"] == [[2, 4], None, [[2, 4]]]
        first, nothing, [second] = info["data"][1, 0]
        assert nothing is None
        assert second.equal(inputs[0] * 2)
        assert first.shape == (2, 4)
        assert type(info["data"][1, 0]) is tuple
        [path] = monitor.save_single_outputs()
    item = torch.load(path, weights_only=True)
    assert type(item["output"]) is tuple
    assert item["output"][1] is None
    assert item["output_shape"] == [[2, 4], None, [[2, 4]]]


def test_a_none_at_the_end_of_a_tuple_is_not_lost(tmp_path):
    net = zoo.Holder(lambda m, x: m.attn(x, x, x, need_weights=False)[0], attn=nn.MultiheadAttention(8, 2))
    with Monitor(net, ["attn"], [1], tmp_path, [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(torch.randn(3, 2, 8))
        assert monitor.get_single_data()["attn"]["output_shape"] == [[3, 2, 8], None]
        _, weights = monitor.get_single_data()["attn"]["data"][1, 0]
        assert weights is None


def test_a_layer_that_gives_nothing_at_all_is_none(tmp_path):
    net, inputs = zoo.no_tensors()
    with Monitor(net, ["teller"], [1], tmp_path, [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(*inputs)
        info = monitor.get_single_data()["teller"]
        assert (info["output_shape"], dict(info["data"])) == (None, {(1, 0): None})


def test_named_parts_become_plain_containers(tmp_path):
    net, inputs = zoo.named_outputs()
    with Monitor(net, ["first", "second"], [1], tmp_path, [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(*inputs)
        parts = monitor.get_single_data()["first"]["data"][1, 0]
        assert (type(parts), parts["label"]) == (dict, "not a tensor")
        pair = monitor.get_single_data()["second"]["data"][1, 0]
        assert type(pair) is tuple
        assert [each.shape for each in pair] == [(2, 4), ()]
        assert len(monitor.save_single_outputs()) == 2
    assert torch.load(tmp_path / "single_epoch_1_000.pt", weights_only=True)["output"]["hidden"].equal(parts["hidden"])


def test_an_output_that_is_changed_in_place_afterwards_is_kept_as_it_was(tmp_path):
    net, inputs = zoo.in_place()
    with Monitor(net, ["0"], [1], tmp_path, [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(*inputs)
        expected = torch.nn.functional.linear(inputs[0], net[0].weight, net[0].bias)
        assert monitor.get_single_data()["0"]["data"][1, 0].equal(expected)
        assert expected.min() < 0  # the ReLU behind it would have shown


def test_a_layer_called_several_times_in_a_batch_keeps_its_last_call_and_the_run_has_all(tmp_path, caplog):
    net, inputs = zoo.called_thrice()
    with Monitor(net, ["layer"], [1], tmp_path, [0, 1]) as monitor:
        monitor.set_epoch(1)
        for n in range(2):
            monitor.set_batch_idx(n)
            out = net(*inputs)
        assert monitor.get_single_data()["layer"]["data"][1, 1].equal(out)
        assert [entry.moment.call for entry in monitor.run.records("layer", batch=0)] == [0, 1, 2]
    assert caplog.text.count("was called more than once in a batch") == 1


# The moment ---------------------------------------------------------------------------------------


def test_a_forward_before_set_epoch_is_not_recorded_and_warned_of_once(tmp_path, caplog):
    net = model()
    with Monitor(net, ["0"], [0], tmp_path, [0]) as monitor:
        net(torch.ones(1, 4))
        net(torch.ones(1, 4))
        assert monitor.get_single_data() == {}
        assert len(monitor.run) == 0
        assert caplog.text.count("before set_epoch()") == 1
        feed(monitor, net, epoch=0)
        assert list(monitor.get_single_data()["0"]["data"]) == [(0, 0)]


def test_set_epoch_saves_what_was_not_saved_and_then_forgets_it(tmp_path):
    net = model()
    with Monitor(net, {"0": {}, "2": {"record_type": "epoch_full"}}, [1, 2], tmp_path, [0]) as monitor:
        feed(monitor, net, epoch=1)
        assert not list(tmp_path.glob("*.pt"))
        monitor.set_epoch(2)
        assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["epoch_1_000.pt", "single_epoch_1_000.pt"]
        assert monitor.get_single_data() == monitor.get_epoch_data() == {}


def test_an_epoch_or_a_batch_that_is_none_is_refused_and_forgets_nothing(tmp_path):
    with Monitor(model(), ["0"], [1], tmp_path, [0]) as monitor:
        feed(monitor, monitor.model, batches=1)
        for word in (monitor.set_epoch, monitor.set_batch_idx):
            with pytest.raises(ValueError, match="=None is not a moment"):
                word(None)
        assert list(monitor.get_single_data()["0"]["data"]) == [(1, 0)]


def test_callbacks_set_what_the_methods_set(tmp_path):
    with Monitor(model(), ["0"], [4], tmp_path, [7]) as monitor:
        monitor.create_epoch_callback()(4)
        monitor.create_batch_callback()(7)
        assert (monitor.current_epoch, monitor.current_batch_idx) == (4, 7)
        monitor.model(torch.ones(1, 4))
        assert list(monitor.get_single_data()["0"]["data"]) == [(4, 7)]


def test_a_pause_lasts_until_the_next_batch(tmp_path):
    net = model()
    with Monitor(net, {"0": {"record_type": "epoch_full"}}, [1], tmp_path) as monitor:
        seen = feed(monitor, net, batches=2)
        monitor.pause("evaluation")
        net(torch.zeros(9, 4))
        assert monitor.get_epoch_data()["0"]["data"][1, 1].equal(seen["0"][1])
        monitor.set_batch_idx(2)
        net(torch.zeros(9, 4))
        assert len(monitor.get_epoch_data()["0"]["data"]) == 3


def test_an_evaluation_after_the_last_batch_is_not_taken_for_it(tmp_path, caplog):
    net = model()
    with Monitor(net, {"0": {"record_type": "epoch_full"}}, [1, 2], tmp_path) as monitor:
        for epoch in (1, 2):
            seen = feed(monitor, net.train(), epoch=epoch)
            net.eval()
            for _ in range(3):
                net(torch.zeros(9, 4))
            net.train()
            assert monitor.get_epoch_buffers()["0"][-1].equal(seen["0"][-1])
        assert len(monitor.run) == 6
    assert caplog.text.count("a forward in evaluation mode") == 1


def test_a_model_in_evaluation_mode_is_captured_where_the_batch_is_set(tmp_path):
    net = model().eval()
    with Monitor(net, {"0": {"record_type": "epoch_full"}}, [1], tmp_path) as monitor:
        feed(monitor, net)
        net(torch.zeros(9, 4))
        assert [len(each) for each in monitor.get_epoch_buffers()["0"]] == [2, 2, 9]


def test_clearing_discards_without_saving(tmp_path):
    net = model()
    layers = {"0": {}, "2": {"record_type": "epoch_full"}}
    with Monitor(net, layers, [1], tmp_path, [0]) as monitor:
        feed(monitor, net)
        monitor.clear_epoch_data()
        assert monitor.get_epoch_data() == {}
        assert monitor.get_single_data() != {}
        monitor.clear_current_epoch_data()
        assert monitor.get_single_data() == {}
        assert len(monitor.run) == 4
    assert not list(tmp_path.glob("*.pt"))


def test_the_log_tells_each_capture_and_each_skip_with_its_reason(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="layerscope")
    net = model()
    with Monitor(net, {"0": {"alias": "first"}}, [1], tmp_path, [0], when="~batches(0) | epochs(1)") as monitor:
        net(torch.ones(1, 4))
        feed(monitor, net, epoch=1, batches=2)
        feed(monitor, net, epoch=2, batches=1)
        monitor.pause("evaluation")
        net(torch.ones(1, 4))
    for said in (
        "first is captured at epoch=1 step=0: shape [2, 3], in memory",
        "first is skipped at epoch=1 step=1: batch 1 is not in batch_indices",
        "first is skipped at epoch=2 step=2 batch=0: epoch 2 is not in epochs_to_record",
        "a forward is skipped: no epoch is set",
        "a forward is skipped: evaluation",
        f"first is saved as {tmp_path / 'single_epoch_1_000.pt'}",
    ):
        assert caplog.text.count(said) == 1, said


# Saving -------------------------------------------------------------------------------------------


def test_items_have_what_the_document_says_and_are_read_as_a_run(tmp_path):
    net = model()
    with Monitor(net, {"0": {"alias": "first"}, "2": {"record_type": "epoch_full"}}, [1], tmp_path, [0, 2]) as monitor:
        seen = feed(monitor, net)
        assert [path.name for path in monitor.save_single_outputs()] == [
            "single_epoch_1_000.pt",
            "single_epoch_1_001.pt",
        ]
        assert [path.name for path in monitor.save_epoch_outputs(["2"])] == ["epoch_1_000.pt"]
    item = torch.load(tmp_path / "single_epoch_1_001.pt", weights_only=True)
    output = item.pop("output")
    assert item == {"epoch": 1, "batch_idx": 2, "layer": "0", "alias": "first", "output_shape": [2, 3]}
    assert output.equal(seen["0"][2])
    whole = torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)
    assert whole["output"].equal(torch.cat(seen["2"]))
    assert (whole["batch_idx"], whole["output_shape"]) == ([0, 1, 2], [6, 2])
    assert whole["statistics"]["mean"] == pytest.approx(torch.cat(seen["2"]).double().mean().item())
    run = open_run(tmp_path)
    assert run.layout == "monitor"
    assert run.tensor("first", epoch=1, batch=2).equal(seen["0"][2])
    assert run.tensor("2").equal(torch.cat(seen["2"]))


def test_a_ragged_last_batch_is_joined_and_other_shapes_are_listed(tmp_path):
    net = zoo.Holder(lambda m, x: m.same(x), same=nn.Identity())
    with Monitor(net, {"same": {"record_type": "epoch_full"}}, [1, 2, 3], tmp_path) as monitor:
        for epoch, shapes in {1: [(4, 3), (4, 3), (1, 3)], 2: [(2, 3), (2, 5)], 3: [(), ()]}.items():
            monitor.set_epoch(epoch)
            for n, shape in enumerate(shapes):
                monitor.set_batch_idx(n)
                net(torch.full(shape, float(n)))
    first, second, third = (torch.load(tmp_path / f"epoch_{n}_000.pt", weights_only=True) for n in (1, 2, 3))
    assert first["output"].shape == (9, 3)
    assert first["output"][-1].tolist() == [2, 2, 2]
    assert [tuple(each.shape) for each in second["output"]] == [(2, 3), (2, 5)]
    assert second["output_shape"] == [[2, 3], [2, 5]]
    assert third["output"].tolist() == [0, 1]  # a number per batch


def test_tuples_of_an_epoch_are_joined_part_by_part(tmp_path):
    net, inputs = zoo.tuple_outputs()
    with Monitor(net, {"block": {"record_type": "epoch_full"}}, [1], tmp_path) as monitor:
        monitor.set_epoch(1)
        for n in range(3):
            monitor.set_batch_idx(n)
            net(inputs[0] + n)
    item = torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)
    first, nothing, [second] = item["output"]
    assert nothing is None
    assert (first.shape, item["output_shape"]) == ((6, 4), [[6, 4], None, [[6, 4]]])
    assert second.equal(torch.cat([(inputs[0] + n) * 2 for n in range(3)]))
    assert item["statistics"][2][0]["max"] == pytest.approx(second.max().item())


def test_what_is_saved_once_is_not_saved_again_and_a_grown_epoch_replaces_its_item(tmp_path):
    net = model()
    with Monitor(net, {"0": {}, "2": {"record_type": "epoch_full"}}, [1], tmp_path, [0, 1, 2]) as monitor:
        monitor.set_epoch(1)
        for n in range(3):
            monitor.set_batch_idx(n)
            net(torch.ones(2, 4))
            assert len(monitor.save_single_outputs()) == 1
            assert monitor.save_single_outputs() == []
            assert [path.name for path in monitor.save_epoch_outputs()] == ["epoch_1_000.pt"]
    assert len(list(tmp_path.glob("*.pt"))) == 4
    assert torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)["output"].shape == (6, 2)


def test_a_second_monitor_in_the_same_folder_replaces_nothing(tmp_path):
    for _ in range(2):
        net = model()
        monitor = Monitor(net, ["0"], [1], tmp_path, [0])
        feed(monitor, net, epoch=1)
        monitor.remove_hooks()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run", "run-002", "single_epoch_1_000.pt", "single_epoch_1_001.pt"]


def test_two_monitors_at_once_do_not_meet(tmp_path):
    net = model()
    with Monitor(net, ["0"], [1], tmp_path, [0]) as one, Monitor(net, ["2"], [1], tmp_path, [0]) as other:
        one.set_epoch(1)
        feed(other, net)
        assert other.get_single_data().keys() == {"2"}
        assert len(other.run) == 1


def test_numpy_files_are_written_where_they_are_asked_for(tmp_path):
    net, inputs = zoo.tuple_outputs()
    layers = {"block": {}, "block.layer": {"record_type": "epoch_full"}}
    with Monitor(net, layers, [1], tmp_path, [0], format="npy") as monitor:
        monitor.set_epoch(1)
        for n in range(2):
            monitor.set_batch_idx(n)
            net(inputs[0].bfloat16().float())
    with np.load(tmp_path / "single_epoch_1_000.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["0", "2.0"]
        assert arrays["2.0"].tolist() == (inputs[0].bfloat16().float() * 2).tolist()
    assert np.load(tmp_path / "epoch_1_000.npy", allow_pickle=False).shape == (4, 4)
    about = json.loads((tmp_path / "epoch_1_000.json").read_text())
    assert (about["epoch"], about["batch_idx"], about["layer"], about["output_shape"]) == (
        1,
        [0, 1],
        "block.layer",
        [4, 4],
    )
    assert not list(tmp_path.glob("*.pt"))


def test_a_format_may_be_named_where_it_is_saved(tmp_path):
    net = model()
    layers = {"0": {}, "2": {"record_type": "epoch_full"}}
    with Monitor(net, layers, [1], tmp_path, [0]) as monitor:
        feed(monitor, net)
        single, whole = monitor.save_single_outputs(format="npy"), monitor.save_epoch_outputs(format="npy")
        assert [path.name for path in single + whole] == ["single_epoch_1_000.npy", "epoch_1_000.npy"]
        with pytest.raises(ValueError, match="format='csv' is not known"):
            monitor.save_epoch_outputs(format="csv")
    assert np.load(tmp_path / "epoch_1_000.npy").shape == (6, 2)


def test_a_program_that_changes_its_folder_finds_everything_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Monitor(model(), ["0"], [1], "out", [0]) as monitor:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        feed(monitor, monitor.model)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run", "single_epoch_1_000.pt"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_monitor_that_goes_with_its_model_saves_what_is_unsaved(tmp_path):
    def train():
        net = model()
        return feed(Monitor(net, ["0"], [1], tmp_path, [0]), net)["0"][0]

    expected = train()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "layerscope-saving":
            thread.join()
    assert torch.load(tmp_path / "single_epoch_1_000.pt", weights_only=True)["output"].equal(expected)
    assert open_run(tmp_path / "run").state == "complete"


def test_a_collector_that_takes_the_recording_first_leaves_it_to_the_monitor(tmp_path):
    net = model()
    monitor = Monitor(net, ["0"], [1], tmp_path, [0])
    feed(monitor, net)
    monitor._recording.__del__()
    monitor.remove_hooks()
    assert open_run(tmp_path / "run").state == "complete"


@pytest.mark.usefixtures("nobody_leaves")
def test_while_hooks_are_there_sigterm_ends_the_process_in_order_and_not_longer(tmp_path):
    first = Monitor(model(), ["0"], [1], tmp_path, [0])
    second = Monitor(model(), ["0"], [1], tmp_path, [0])
    first.remove_hooks()
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
    third = Monitor(model(), ["0"], [1], tmp_path, [0])
    second.remove_hooks()
    third.leave_sigterm_alone()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    third.remove_hooks()


def test_a_signal_in_the_middle_of_saving_does_not_lose_the_rest(tmp_path, monkeypatch):
    net = model()
    monitor = Monitor(net, ["0", "2"], [1], tmp_path, [0])
    seen = feed(monitor, net, batches=1)
    put, once = type(monitor._writer).put, []

    def interrupted(writer, *given, **wishes):
        if not once:
            once.append(1)
            raise KeyboardInterrupt
        return put(writer, *given, **wishes)

    monkeypatch.setattr(type(monitor._writer), "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        monitor.remove_hooks()
    items = [torch.load(tmp_path / f"single_epoch_1_{n:03d}.pt", weights_only=True) for n in (0, 1)]
    assert [item["output"].equal(seen[item["layer"]][0]) for item in items] == [True, True]
    assert_no_hooks_left(net)


def test_dtypes_that_numpy_lacks_are_written_wider_and_named(tmp_path):
    net, inputs = zoo.half_precision()
    with Monitor(net, ["0"], [1], tmp_path, [0], format="npy") as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(*inputs)
        kept = monitor.get_single_data()["0"]["data"][1, 0]
    assert kept.dtype == torch.bfloat16
    assert np.load(tmp_path / "single_epoch_1_000.npy").tolist() == kept.float().tolist()
    assert json.loads((tmp_path / "single_epoch_1_000.json").read_text())["dtype"] == "bfloat16"


def test_an_epoch_larger_than_the_budget_is_read_back_from_the_run(tmp_path):
    net = zoo.Holder(lambda m, x: m.same(x), same=nn.Identity())
    rows, size = [torch.randn(3, 1000) for _ in range(20)], 3 * 1000 * 4
    with Monitor(net, {"same": {"record_type": "epoch_full"}}, [1], tmp_path, budget=6 * size) as monitor:
        monitor.set_epoch(1)
        for n, row in enumerate(rows):
            monitor.set_batch_idx(n)
            net(row)
        captures = monitor._gathered.of(monitor.layers[0])
        assert [capture.in_memory for capture in captures] == [True] * 3 + [False] * 17
        data = monitor.get_epoch_data()["same"]["data"]
        assert all(data[1, n].equal(row) for n, row in enumerate(rows))
        data[1, 19].zero_()
        assert data[1, 19].equal(rows[19])
        [path] = monitor.save_epoch_outputs()
    item = torch.load(path, weights_only=True)
    assert item["output"].equal(torch.cat(rows))
    assert item["statistics"]["max"] == torch.cat(rows).max().item()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["epoch_1_000.pt", "run"]


def test_a_copy_that_was_read_from_the_run_is_saved_alone(tmp_path):
    net = zoo.Holder(lambda m, x: m.same(x), same=nn.Identity())
    with Monitor(net, {"same": {"record_type": "epoch_full"}}, [1], tmp_path, budget=2) as monitor:
        monitor.set_epoch(1)
        for n in range(50):
            monitor.set_batch_idx(n)
            net(torch.zeros(1000))
        torch.save(monitor.get_epoch_data()["same"]["data"][1, 49], tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 8000


def test_ones_own_results_are_saved_as_plain_values(tmp_path):
    with Monitor(model(), ["0"], [1], tmp_path, [0]) as monitor:
        given = {"t": torch.ones(2, requires_grad=True), "a": np.arange(3), "n": np.float64(0.5), "l": [1, ("x", None)]}
        path = monitor.save_custom_output(given, "deep/custom.pt")
        assert path == tmp_path / "deep" / "custom.pt"
        read = torch.load(path, weights_only=True)
        assert (read["a"].tolist(), read["n"], read["l"]) == ([0, 1, 2], 0.5, [1, ("x", None)])
        assert not read["t"].requires_grad
        monitor.save_custom_output(np.eye(2), "eye.npy")
        assert np.load(tmp_path / "eye.npy", allow_pickle=False).tolist() == np.eye(2).tolist()
        for name in ("../out.pt", "/tmp/out.pt", "", ".", "run/x.pt"):
            with pytest.raises(ValueError, match="name"):
                monitor.save_custom_output(1, name)
        with pytest.raises(TypeError, match="a Linear is not saved"):
            monitor.save_custom_output([nn.Linear(1, 1)], "object.pt")
        with pytest.raises(TypeError, match="array of object"):
            monitor.save_custom_output(np.array([{}]), "object.pt")
    assert not (tmp_path.parent / "out.pt").exists()
    assert not (tmp_path / "object.pt").exists()


def test_a_name_does_not_leave_the_folder_through_a_link(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "elsewhere").symlink_to(tmp_path)
    monitor = Monitor(model(), ["0"], [1], tmp_path / "out", [0])
    with monitor, pytest.raises(ValueError, match="is not a name inside"):
        monitor.save_custom_output(1, "elsewhere/x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_layers_named_like_paths_name_no_file(tmp_path):
    net = zoo.Holder(lambda m, x: m.odd(x), odd=nn.Identity())
    with Monitor(net, {"odd": {"alias": "../../evil"}}, [1], tmp_path / "out", [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(torch.ones(1))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run", "single_epoch_1_000.pt"]


# The ends -----------------------------------------------------------------------------------------


def test_removing_the_hooks_saves_once_and_twice_does_no_harm(tmp_path):
    net = model()
    monitor = Monitor(net, ["0"], [1], tmp_path, [0])
    feed(monitor, net)
    assert hooks_on(net) > 0
    monitor.remove_hooks()
    assert_no_hooks_left(net)
    [path] = tmp_path.glob("*.pt")
    written = path.stat().st_mtime_ns
    monitor.remove_hooks()
    net(torch.ones(1, 4))
    assert path.stat().st_mtime_ns == written
    assert monitor.run.state == "complete"
    assert monitor.get_single_data()["0"]["data"][1, 0].shape == (2, 3)


def test_nothing_captured_is_said_and_raises_nothing(tmp_path, caplog):
    net, inputs = zoo.never_called()
    with Monitor(net, ["unused"], [1], tmp_path, [0]) as monitor:
        monitor.set_epoch(1)
        monitor.set_batch_idx(0)
        net(*inputs)
    assert "no tap saw a tensor: unused:output: never called" in caplog.text


def test_the_folder_is_made_and_one_that_cannot_be_written_is_refused_at_once(tmp_path):
    Monitor(model(), ["0"], [1], tmp_path / "a" / "b", [0]).remove_hooks()
    assert (tmp_path / "a" / "b" / "run" / "run.json").exists()
    (tmp_path / "file").write_text("")
    net = model()
    with pytest.raises(OSError, match="output_dir cannot be written") as caught:
        Monitor(net, ["0"], [1], tmp_path / "file" / "below", [0])
    assert caught.value.filename == str(tmp_path / "file" / "below")
    assert_no_hooks_left(net)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_a_permission_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="output_dir cannot be written"):
        Monitor(model(), ["0"], [1], tmp_path, [0])


def test_a_run_folder_that_is_somebody_elses_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    Monitor(model(), ["0"], [1], tmp_path, [0]).remove_hooks()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    assert (tmp_path / "run-002" / "run.json").exists()


def test_other_ranks_save_in_folders_of_their_own(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        net = model()
        monitor = Monitor(net, ["0"], [1], tmp_path, [0])
        feed(monitor, net)
        monitor.remove_hooks()
    assert (tmp_path / "single_epoch_1_000.pt").exists()
    assert (tmp_path / "rank-00001" / "single_epoch_1_000.pt").exists()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank-00000", "rank-00001", "run.json"]


def test_a_loader_that_is_watched_gives_its_sample_indices(tmp_path):
    from torch.utils.data import DataLoader, TensorDataset

    net = model()
    data = torch.randn(7, 4)
    loader = DataLoader(TensorDataset(data), batch_size=3, shuffle=True)
    with Monitor(net, {"0": {"record_type": "epoch_full"}, "2": {}}, [1], tmp_path, [1]) as monitor:
        monitor.set_epoch(1)
        fed = {}
        for n, (batch,) in enumerate(monitor.watch_loader(loader)):
            monitor.set_batch_idx(n)
            net(batch)
            fed[1, n] = batch
        indices = monitor.sample_indices
        assert all(data[indices[key]].equal(batch) for key, batch in fed.items())
        assert [entry.note["sample_indices"] for entry in monitor.run.records("0")] == list(indices.values())
    item = torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)
    assert item["sample_indices"] == list(indices.values())
    assert torch.load(tmp_path / "single_epoch_1_000.pt", weights_only=True)["sample_indices"] == indices[1, 1]


def test_items_are_found_among_many_files_of_ones_own(tmp_path):
    net = model()
    with Monitor(net, ["0"], [1], tmp_path, [0]) as monitor:
        feed(monitor, net)
        for n in range(20):
            monitor.save_custom_output(torch.zeros(1), f"custom_{n}.pt")
    assert open_run(tmp_path).layout == "monitor"


def test_a_monitor_whose_hooks_are_removed_says_so_when_it_is_used_again(tmp_path, caplog):
    monitor = Monitor(model(), ["0"], [1], tmp_path, [0])
    for _ in range(2):
        with monitor:
            assert ("make another Monitor" in caplog.text) == (hooks_on(monitor.model) == 0)


def test_what_there_is_no_time_to_save_is_left_to_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("layerscope.monitor.monitor._LAST_SECONDS", -1.0)
    net = model()
    monitor = Monitor(net, {"0": {"record_type": "epoch_full"}}, [1], tmp_path)
    feed(monitor, net)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        monitor.remove_hooks()
    assert not list(tmp_path.glob("*.pt"))
    assert "no time is left to save 0" in caplog.text
    assert len(monitor.run) == 3


def test_settings_come_from_a_configuration(tmp_path):
    config = {"monitor_layers": ["0"], "monitor_epochs": [1], "monitor_batches": [2], "lr": 0.1}
    monitor = Monitor.from_config(model(), config, tmp_path, format="npy")
    assert (monitor.epochs_to_record, monitor.batch_indices) == ((1,), (2,))
    monitor.remove_hooks()
    with pytest.raises(ValueError, match="'batch_indices' must be given"):
        Monitor.from_config(model(), {"monitor_layers": ["0"], "monitor_epochs": [1]}, tmp_path)


def test_training_is_the_same_to_the_last_bit_with_and_without(tmp_path):
    def train(watched: bool):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        monitor = Monitor(net, {"**": {"record_type": "epoch_full"}}, range(9), tmp_path) if watched else None
        losses = []
        for step in range(20):
            if monitor is not None:
                if step % 5 == 0:
                    monitor.set_epoch(step // 5)
                monitor.set_batch_idx(step % 5)
            loss = net(torch.randn(6, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if monitor is not None:
            monitor.remove_hooks()
        return losses, [p.detach().clone() for p in net.parameters()], torch.get_rng_state()

    plain, watched = train(False), train(True)
    assert plain[0] == watched[0]
    assert all(a.equal(b) for a, b in zip(plain[1], watched[1], strict=True))
    assert plain[2].equal(watched[2])
    assert len(list(tmp_path.glob("epoch_*.pt"))) == 20


# Subclasses --------------------------------------------------------------------------------------


class Large(Monitor):
    """Captures outputs that are larger than one somewhere."""

    def _custom_condition(self, output):
        return bool((output > 1).any())


def test_a_condition_of_a_subclass_says_which_outputs_are_captured(tmp_path):
    model = torch.nn.Sequential(torch.nn.Identity())
    with Large(model, ["0"], [1], tmp_path, batch_indices=[0, 1]) as monitor:
        monitor.set_epoch(1)
        for batch, value in enumerate((0.5, 2.0)):
            monitor.set_batch_idx(batch)
            model(torch.full((3,), value))
        assert list(monitor.single_data["0"]["data"]) == [(1, 1)]
        monitor._custom_condition = lambda output: False  # as a hook that asks self for it would see
        model(torch.full((3,), 9.0))
        assert monitor.single_data["0"]["data"][1, 1].tolist() == [2.0] * 3
        assert monitor.epoch_data == {}
        assert len(list(monitor.run.records())) == 3  # the run has them all


def test_a_hook_function_of_a_subclass_is_refused_because_nobody_would_call_it(tmp_path):
    class Own(Monitor):
        def _hook_fn(self, layer_name):
            return lambda module, args, output: None

    with pytest.raises(TypeError, match=r"Own has a _hook_fn of its own.*_custom_condition\(self, output\)"):
        Own(torch.nn.Sequential(torch.nn.Identity()), ["0"], [1], tmp_path)
