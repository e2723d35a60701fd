"""What recording promises on a GPU. CI has none, and skips all of this."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from asserts import assert_same_bits
from kernels.laws import BYTES, FLOATS, WORDS, assert_like_the_cpu, values
from layerscope.errors import Unsupported
from layerscope.recorder.gpu import transfer as transfers
from layerscope.recorder.gpu.statistics import DeviceStatistics
from layerscope.recorder.gpu.transfer import to_host, transfer_of
from layerscope.stats import summarize
from layerscope.stats.device import Slots

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

OTHERS = [torch.complex64, torch.float4_e2m1fn_x2]  # no kernel: these travel


def on_device(tensor, *, level="full"):
    statistics = DeviceStatistics()
    later = statistics.of(tensor.cuda(), level=level)
    statistics.fetch()
    assert statistics.kernels == "triton", "the kernels are not in use, so this would test the host against itself"
    return later()


# Statistics -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t.flatten()[1:],
        lambda t: t[:, 3:],
        lambda t: t[:1].expand(900, -1),
        lambda t: t[::2, ::3],
        lambda t: t[0, 0],
        lambda t: t[:0],
    ],
    ids=["transposed", "unaligned", "columns", "expanded", "strided", "scalar", "empty"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_views_are_summarised_in_their_own_order(view, dtype):
    whole = values(dtype, 64 * 300).view(64, 300)
    statistics = DeviceStatistics()
    assert_like_the_cpu(statistics.of(view(whole.cuda()))(), view(whole))
    assert statistics.kernels == "triton"


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_what_has_no_kernel_is_summarised_on_the_host(dtype):
    tensor = values(dtype, 5000)
    assert on_device(tensor) == summarize(tensor)


def assert_channels_like_the_cpu(found, tensor, axis):
    """Counts and magnitudes exactly, sums to the rounding of float64."""
    expected = summarize(tensor, channels=axis).channels
    assert found.axis == expected.axis
    np.testing.assert_array_equal(found.table[:2], expected.table[:2])
    size = np.abs(expected.table).max(axis=1, keepdims=True)
    assert (np.abs(found.table - expected.table) <= 1e-12 * size).all()


@pytest.mark.parametrize("dtype", FLOATS + WORDS + BYTES + [torch.complex64], ids=str)
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_every_dtype_has_the_channels_of_the_cpu(dtype, axis):
    statistics = DeviceStatistics()
    tensors = [values(dtype, 24 * n).view(4, 6, n) for n in (0, 1, 7, 128, 1000)]
    laters = [statistics.of(t.cuda(), channels=axis) for t in tensors]
    statistics.fetch()
    for later, tensor in zip(laters, tensors, strict=True):
        assert_channels_like_the_cpu(later().channels, tensor, axis)


@pytest.mark.parametrize("shape", [(8192, 2048), (5, 40_000), (300_000, 3), (4, 64, 56, 56)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_tensors_have_the_channels_of_the_cpu(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    tensor.view(-1)[77] = float("nan")
    axis = 1 if len(shape) == 4 else -1
    later = DeviceStatistics().of(tensor.cuda(), channels=axis)
    assert_channels_like_the_cpu(later().channels, tensor, axis)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("width", [64, 4096], ids=["staged", "in the hook"])
def test_channels_of_a_recording_are_those_of_its_tensors_and_no_hook_synchronises(width, batches):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width)).cuda()
    x = torch.randn(512, width, device="cuda")
    with torch.no_grad():
        model(x)
        with ls.record(model, ["0", "1", "2"], statistics="channels") as rec, strict_about_synchronising():
            for step in range(batches):
                model(x + step)
    for step in range(batches):
        for name in "012":
            assert_channels_like_the_cpu(rec.run.summary(name, step=step).channels, rec.run.tensor(name, step=step), -1)


def test_many_tensors_of_many_kinds_keep_their_own_numbers():
    tensors = [values((FLOATS + WORDS + BYTES)[i % 16], 1 + 37 * i) for i in range(150)]
    levels = ["full" if i % 3 else "moments" for i in range(150)]
    statistics = DeviceStatistics()
    laters = [statistics.of(t.cuda(), level=level) for t, level in zip(tensors, levels, strict=True)]
    for i in [149, 0, 77, *range(150)]:
        assert_like_the_cpu(laters[i](), tensors[i], level=levels[i])


def test_slots_are_used_again_step_after_step():
    statistics = DeviceStatistics()
    for step in range(20):
        tensors = [torch.randn(3000 + step) * 2.0**step for _ in range(50)]
        laters = [statistics.of(t.cuda()) for t in tensors]
        statistics.fetch()
        for later, tensor in zip(laters, tensors, strict=True):
            assert_like_the_cpu(later(), tensor)


def test_a_tensor_may_change_as_soon_as_its_statistics_are_started():
    tensor = torch.randn(1_000_000)
    given = tensor.cuda()
    later = DeviceStatistics().of(given)
    given.zero_()
    assert_like_the_cpu(later(), tensor)


def test_threads_may_ask_before_the_step_ends():
    statistics = DeviceStatistics()
    tensors = [torch.randn(5000) for _ in range(100)]
    wrong = []

    def ask(later, tensor):
        try:
            assert_like_the_cpu(later(), tensor)
        except AssertionError as error:
            wrong.append(error)

    threads = []
    for tensor in tensors:
        threads.append(threading.Thread(target=ask, args=(statistics.of(tensor.cuda()), tensor)))
        threads[-1].start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_streams_of_the_user_have_slots_of_their_own():
    tensors = [torch.randn(2_000_000) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in tensors]
    statistics = DeviceStatistics()
    given = [t.cuda() for t in tensors]
    torch.cuda.synchronize()
    laters = []
    for tensor, stream in zip(given, streams, strict=True):
        with torch.cuda.stream(stream):
            laters.append(statistics.of(tensor * 2))
    statistics.fetch()
    for later, tensor in zip(laters, tensors, strict=True):
        assert_like_the_cpu(later(), tensor * 2)


def test_a_device_without_kernels_says_so_and_goes_on(monkeypatch, caplog):
    from layerscope.stats.device import Slots

    monkeypatch.setattr(Slots, "starting", lambda *_: 1 / 0)
    statistics = DeviceStatistics()
    tensor = torch.randn(1000)
    assert_like_the_cpu(statistics.of(tensor.cuda())(), tensor)
    assert statistics.kernels == "on the host: Triton failed: ZeroDivisionError: division by zero"
    assert "costs a copy of every tensor" in caplog.text


# Copies -----------------------------------------------------------------------------------------


@pytest.fixture(params=["flown", "carried"])
def transfer(request, monkeypatch):
    """The device's transfer, with page-locked memory to fly to, or without."""
    transfer = transfer_of(torch.device("cuda", 0))
    if request.param == "carried":
        monkeypatch.setattr(transfer, "pinned", None)
        return transfer
    for size in [40 << 20, 70 << 20, 16 << 20, *[60 << 20] * 4]:
        transfer.pinned.room(size)
    transfer.pinned.grow()
    return transfer


def room(size):
    """Ordinary memory of the host."""
    return np.empty(size, np.uint8)


def model_on_device(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers).to("cuda", dtype).train(), torch.randn(512, 64, device="cuda", dtype=dtype)


@contextmanager
def strict_about_synchronising():
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def one_step(record, make):
    model, args = make()
    args = [a.detach().cuda().requires_grad_(a.requires_grad) for a in args]
    model.cuda()
    torch.manual_seed(42)
    with record(model):
        out = model(*args)
        loss = sum(leaf.float().nan_to_num().sum() for leaf in (out if isinstance(out, tuple) else (out,)))
        if loss.requires_grad:
            loss.backward()
    grads = [p.grad for p in [*model.parameters(), *args] if p.grad is not None]
    return [out, *grads, torch.get_rng_state(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize(
    "make", [make for make in zoo.ALL if make is not zoo.keyword_inputs], ids=lambda make: make.__name__
)
def test_outputs_gradients_and_rng_are_bit_identical(make, disk, tmp_path):
    to = tmp_path / "run" if disk else None
    plain = one_step(lambda model: nullcontext(), make)
    recorded = one_step(lambda model: ls.record(model, "**:*", to=to, keep="both"), make)
    assert len(plain) == len(recorded)
    for mine, theirs in zip(recorded, plain, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_operation_in_place_does_not_reach_what_was_recorded(dtype, disk, tmp_path):
    model, x = model_on_device(dtype)
    with ls.record(model, ["0", "1"], to=tmp_path / "run" if disk else None, keep="both") as rec:
        model(x)
    before = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert (before < 0).any()
    assert_same_bits(rec["0"], before.cpu())
    assert_same_bits(rec["1"], before.relu().cpu())
    assert rec.run.summary("0").min == before.min().item()
    assert rec.run.summary("1").min == 0.0


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("dtype", FLOATS + WORDS + BYTES + OTHERS, ids=str)
def test_tensors_of_every_dtype_read_back_equal(dtype, disk, tmp_path):
    tensor = values(dtype, 6000).reshape(60, 100)
    model = zoo.Holder(lambda m, x: m.inner(x), inner=zoo.Holder(lambda m, x: x.view_as(x)))
    with ls.record(model, "inner", to=tmp_path / "run" if disk else None, keep="both") as rec:
        model(tensor.cuda())
    assert rec["inner"].device.type == "cpu"
    assert_same_bits(rec["inner"], tensor)


@pytest.mark.parametrize("keep", ["tensor", "summary", "both"])
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_no_hook_synchronises(disk, keep, tmp_path):
    model, x = model_on_device()
    x.requires_grad_()
    with ls.record(model, "**:*", to=tmp_path / "run" if disk else None, keep=keep) as rec:
        with strict_about_synchronising():
            model(x).sum().backward()
        rec.flush()
    assert not rec.completeness.missing
    assert rec.completeness.records == 6 * 4


def test_the_check_for_synchronising_can_fail():
    model, x = model_on_device()
    model[0].register_forward_hook(lambda module, args, out: out.cpu())
    with pytest.raises(RuntimeError, match="synchroniz"), strict_about_synchronising():
        model(x)


def asleep(seconds=0.3):
    """Keep the device busy; what is launched next runs when it wakes."""
    torch.cuda._sleep(int(seconds * 1.7e9))
    woken = torch.cuda.Event()
    woken.record()
    return woken


@pytest.mark.parametrize("keep", ["tensor", "summary"])
def test_the_forward_does_not_wait_for_the_device(keep):
    model, x = model_on_device()
    with ls.record(model, "**:*", keep=keep):
        model(x)  # compiles
    torch.cuda.synchronize()
    with ls.record(model, "*", keep=keep) as rec:
        woken = asleep()
        model(x)
        assert not woken.query(), "the forward ended only when the device had done its work"
        rec.flush()
        assert woken.query()
    assert rec.completeness.records == 5


def test_a_device_that_lags_holds_no_numbers_that_were_gathered_and_the_host_no_more_than_so_many():
    statistics, x = DeviceStatistics(), values(torch.float32, 1000).cuda()
    statistics.of(x)()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    [queue] = statistics._queues.values()
    batch = queue.slots.size
    queue.ahead = 2
    woken = asleep()
    laters = [statistics.of(x) for _ in range(3 * batch)]
    assert not woken.query(), "the device came too soon: this would test nothing"
    laters += [statistics.of(x)]  # the third batch is full, and the first two have not been written
    assert woken.query()
    laters += [statistics.of(x) for _ in range(5 * batch)]
    assert torch.cuda.max_memory_allocated() == before
    assert all(buffer.words.is_pinned() for buffer in queue.unused)
    for later in (laters[0], laters[3 * batch], laters[-1]):
        assert_like_the_cpu(later(), x.cpu())


def test_large_and_many_tensors_arrive(transfer):
    sizes = [40 << 20, 1, 0, 17, 16 << 20, *[1000] * 300, (16 << 20) + 1, 70 << 20]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes]
    arrivals = [to_host(tensor, room) for tensor in tensors]
    for tensor, arrival in zip(tensors, arrivals, strict=True):
        assert torch.equal(arrival(), tensor.cpu())


def test_a_full_device_makes_the_caller_wait_and_loses_nothing(transfer, monkeypatch):
    monkeypatch.setattr(transfer, "_most", 8 << 20)
    tensors = [torch.randn(800_000, device="cuda") for _ in range(20)]
    arrivals = [to_host(tensor, room) for tensor in tensors]
    assert transfer._held <= 8 << 20
    for tensor, arrival in zip(tensors, arrivals, strict=True):
        assert_same_bits(arrival(), tensor.cpu())


def test_what_flies_is_used_again_only_after_it_has_landed():
    transfer = transfer_of(torch.device("cuda", 0))
    transfer.pinned.room(1)
    transfer.pinned.grow()
    tensors = [torch.full((400_000,), float(i), device="cuda") for i in range(200)]
    asleep()
    for tensor in tensors:
        to_host(tensor, room)  # nobody waits for it, and its memory must not be given away
    last = [to_host(tensor, room) for tensor in tensors[:20]]
    assert [arrival().unique().tolist() for arrival in last] == [[float(i)] for i in range(20)]


@pytest.mark.parametrize("keep", ["tensor", "both"])
def test_a_thousand_steps_of_a_busy_device_are_recorded_to_the_bit(keep):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4)).cuda()

    def forward(model, x):
        for layer in model.layers:
            x += layer(x).tanh_()  # in place, and x is what the layer before returned or was given
        return x

    model = zoo.Holder(forward, layers=layers)
    taken = []
    hooks = [layer.register_forward_hook(lambda m, a, out: taken.append(out.clone())) for layer in layers]
    with torch.no_grad(), ls.record(model, "layers.*", keep=keep) as rec:
        for step in range(1000):
            if step % 100 == 0:
                asleep(0.05)
            model(torch.randn(64, 256, device="cuda"))
    for hook in hooks:
        hook.remove()
    run = rec.run
    assert rec.completeness.records == 4000
    for step in range(1000):
        for number in range(4):
            kept = run.tensor(f"layers.{number}", step=step)
            assert_same_bits(kept, taken[4 * step + number].cpu())


def test_a_device_without_room_drops_counts_and_says_so(monkeypatch, caplog):
    transfer = transfer_of(torch.device("cuda", 0))
    monkeypatch.setattr(transfer, "pinned", None)
    monkeypatch.setattr(transfer, "_most", 1 << 20)
    monkeypatch.setattr(transfers, "_BOUND", 0.05)
    hold, carry = threading.Event(), transfer.copy
    monkeypatch.setattr(
        transfer, "copy", lambda pairs, after: (hold.wait(), carry(pairs, after=after))
    )  # they get nowhere
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).cuda(), torch.randn(512, 512, device="cuda")
    with torch.no_grad(), ls.record(model, "*:output") as rec:
        model(x)
        hold.set()
    assert [(d.point, d.count) for d in rec.completeness.dropped] == [("1:output", 1), ("2:output", 1)]
    assert "1 MiB of them waited for 0.05 s" in rec.completeness.dropped[0].reason
    assert "is not recorded" in caplog.text
    assert_same_bits(rec["0"], model[0](x).detach().cpu())


@pytest.fixture
def batches(monkeypatch):
    """How many tensors were taken together, each time."""
    seen = []
    send_all, starting_all = transfers.Transfer.send_all, Slots.starting_all

    def counted(slots, dtype):
        start = starting_all(slots, dtype)
        return lambda first, entries, count, programs: (seen.append(count), start(first, entries, count, programs))

    def sent(transfer, memory, staged, raw):
        seen.append(len(staged))
        return send_all(transfer, memory, staged, raw)

    monkeypatch.setattr(transfers.Transfer, "send_all", sent)
    monkeypatch.setattr(Slots, "starting_all", counted)
    return seen


@pytest.mark.parametrize("level", ["moments", "full"])
@pytest.mark.parametrize("keep", ["tensor", "summary"])
def test_small_tensors_are_taken_together_at_the_end_of_the_step(keep, level, batches):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), nn.Flatten(0)).cuda()
    taken = []
    hooks = [layer.register_forward_hook(lambda m, a, out: taken.append(out.clone())) for layer in model]
    with torch.no_grad(), ls.record(model, "*", keep=keep, statistics=level) as rec:
        for _ in range(40):
            model(torch.randn(8, 64, device="cuda"))
    for hook in hooks:
        hook.remove()
    assert batches.count(6) > 30  # of forty: now and then a batch of slots is full
    for number, tensor in enumerate(taken):
        step, name = number // 6, str(number % 6)
        if keep == "tensor":
            assert_same_bits(rec.run.tensor(name, step=step), tensor.cpu())
        else:
            assert_like_the_cpu(rec.run.summary(name, step=step), tensor.cpu(), level=level)


@pytest.mark.parametrize("keep", ["tensor", "summary"])
def test_a_change_in_place_reaches_nothing_whether_torch_counts_it_or_not(keep, batches):
    def forward(m, x):
        a, b, c = m.a(x), m.b(x), m.c(x)
        a.add_(1)
        b.data.add_(1)
        return a + b + c

    model = zoo.Holder(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64), c=nn.Linear(64, 64)).cuda()
    taken = []
    hooks = [m.register_forward_hook(lambda m, a, out: taken.append(out.clone())) for m in model.children()]
    with torch.no_grad(), ls.record(model, ["a", "b", "c"], keep=keep) as rec:
        for _ in range(40):
            model(torch.randn(8, 64, device="cuda"))
    for hook in hooks:
        hook.remove()
    assert batches.count(3) > 30
    assert not rec.completeness.dropped
    for number, tensor in enumerate(taken):
        step, name = number // 3, "abc"[number % 3]
        if keep == "tensor":
            assert_same_bits(rec.run.tensor(name, step=step), tensor.cpu())
        else:
            assert_like_the_cpu(rec.run.summary(name, step=step), tensor.cpu())


def test_tensors_that_are_put_together_on_the_device_stay_theirs_while_the_next_step_writes_over_them(batches):
    sizes = (1000, 40_000, 300_001, 1_000_000)  # of 2 bytes: several buffers in a step
    steps = torch.arange(60, device="cuda")

    def forward(m, x):
        for part in m.parts.values():
            part(x)
        return x

    parts = nn.ModuleDict(
        {
            f"{size}_{n}": zoo.Holder(
                lambda m, x, size=size, n=n: torch.full((size,), float(n), device="cuda").add_(x).half()
            )
            for size in sizes
            for n in range(8)
        }
    )
    model = zoo.Holder(forward, parts=parts, last=nn.Linear(2, 2).cuda())
    busy = torch.randn(4096, 4096, device="cuda")
    with torch.no_grad(), ls.record(model, "parts.*") as rec:
        for step in range(60):
            busy @ busy  # so that copies are behind the model
            model(steps[step])
    assert not rec.completeness.dropped
    assert len(batches) >= 2 * 60
    for step in range(60):
        for name in parts:
            size, n = map(int, name.split("_"))
            kept = rec.run.tensor(f"parts.{name}", step=step)
            assert_same_bits(kept, torch.full((size,), float(n + step)).half())


ODD = {
    "plain": lambda x: x + 0,
    "transposed": lambda x: x.t(),
    "unaligned": lambda x: x.flatten()[1:],
    "negated": lambda x: torch._neg_view(x),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
    "conjugated": lambda x: x.to(torch.complex64).conj(),
    "float64": lambda x: x.double(),
    "parameter": lambda x: nn.Parameter(x.clone()),
    "large": lambda x: x.expand(64, -1, -1).contiguous(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("keep", ["tensor", "summary"])
def test_what_does_not_lie_plainly_is_recorded_as_itself(keep):
    parts = nn.ModuleDict({name: zoo.Holder(lambda m, x, make=make: make(x)) for name, make in ODD.items()})

    def forward(m, x):
        for part in m.parts.values():
            part(x)
        m.sparse(x)
        m.nested(x)
        return m.last(x)

    model = zoo.Holder(
        forward,
        parts=parts,
        sparse=zoo.Holder(lambda m, x: x.to_sparse()),
        nested=zoo.Holder(lambda m, x: torch.nested.nested_tensor([x, x[:3]])),
        last=nn.Linear(64, 64).cuda(),
    )
    x = torch.randn(64, 64, device="cuda")
    with torch.no_grad(), ls.record(model, "**", keep=keep) as rec:
        for _ in range(10):
            model(x)
            torch.cuda.synchronize()
    refused = {missing.point: missing.reason for missing in rec.missing}
    assert "sparse_coo tensor is not stored" in refused["sparse:output"]
    assert "nested tensor is not stored" in refused["nested:output"]
    for step in (0, 1, 9):
        for name, make in ODD.items():
            wanted = make(x).detach().resolve_neg().resolve_conj().cpu()
            if keep == "tensor":
                assert_same_bits(rec.run.tensor(f"parts.{name}", step=step), wanted.contiguous())
            else:
                assert_like_the_cpu(rec.run.summary(f"parts.{name}", step=step), wanted)


def test_a_thread_that_is_new_to_the_device_is_recorded():
    model, x = model_on_device()
    with torch.no_grad(), ls.record(model, "**:input", keep="summary") as rec:
        for _ in range(2):
            thread = threading.Thread(target=model, args=(x,))
            thread.start()
            thread.join()
    assert not rec.missing
    assert_like_the_cpu(rec.run.summary("0:input[0]", step=1), x.cpu())


def test_a_small_budget_does_not_lock_hook_and_writer(tmp_path):
    model, x = model_on_device()
    with ls.record(model, "**:*", to=tmp_path / "run", options=ls.RecordOptions(budget=1)) as rec:
        for _ in range(5):
            model(x).sum().backward()
    assert not rec.completeness.dropped
    assert rec.completeness.records >= 5 * 6 * 3


def test_gradients_are_those_of_autograd():
    model, x = model_on_device()
    torch.manual_seed(1)
    with ls.record(model, "3:grad_output", keep="both") as rec:
        out = model(x)
        out.sum().backward()
    expected = 1 - out.detach() ** 2
    assert torch.allclose(rec.run.tensor("3:grad_output"), expected.cpu())
    assert_like_the_cpu(rec.run.summary("3:grad_output"), rec.run.tensor("3:grad_output"))


def test_a_model_on_a_stream_of_its_own_is_recorded():
    model, x = model_on_device()
    model.eval()
    expected = model(x.clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with ls.record(model, "*", keep="both") as rec, torch.cuda.stream(stream):
        for _ in range(3):
            model(x.clone())
    for step in range(3):
        assert_same_bits(rec.run.tensor("4", step=step), expected.cpu())


def test_under_inference_mode_and_a_default_device():
    model, x = model_on_device()
    model.eval()
    with torch.inference_mode(), torch.device("cuda"), ls.record(model, "*", keep="both") as rec:
        out = model(x)
    assert_same_bits(rec["4"], out.cpu())
    assert not rec.completeness.missing


def test_nothing_is_recorded_while_a_graph_is_captured():
    model, x = model_on_device()
    model.eval()
    expected = model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ls.record(model, "*", keep="both") as rec:
        model(x)
        rec.flush()
        with torch.cuda.graph(graph):
            captured = model(x)
    captured.zero_()
    graph.replay()
    assert_same_bits(captured, expected)
    assert rec.completeness.records == 5
    assert {m.point for m in rec.completeness.missing} == {f"{i}:output" for i in range(5)}
    assert all("while a CUDA graph is captured" in m.reason for m in rec.completeness.missing)


def test_a_recording_that_would_begin_in_the_middle_of_a_capture_is_refused_and_spoils_nothing():
    model, x = model_on_device()
    model.eval()
    expected = model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(Unsupported, match="begin it before the capture"), ls.record(model, "*"):
            pass
        captured = model(x)
    captured.zero_()
    graph.replay()
    assert_same_bits(captured, expected)


def test_the_device_gets_its_memory_back():
    model, x = model_on_device()
    with ls.record(model, "**:*", keep="both") as rec:
        model(x)
    del rec
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with ls.record(model, "**:*", keep="both") as rec:
            model(x)
        assert rec.completeness.records == 6 * 2
        del rec
        gc.collect()
    assert torch.cuda.memory_allocated() == before


# Several devices --------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices here")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("keep", ["tensor", "both"])
@torch.no_grad()
def test_a_model_on_two_devices_is_recorded_by_the_transfer_of_each(current, keep):
    torch.manual_seed(0)
    parts = {f"on_{place}": nn.Linear(64, 64).to(f"cuda:{place}") for place in (0, 1)}
    model = zoo.Holder(lambda m, x: m.on_1(m.on_0(x).relu().to("cuda:1")), **parts)
    inputs = [torch.randn(1 + 4096 * (step % 3), 64, device="cuda:0") for step in range(12)]
    expected = [{"on_0": model.on_0(x), "on_1": model(x)} for x in inputs]
    with torch.cuda.device(current), ls.record(model, "*", keep=keep) as rec:
        for x in inputs:
            model(x)
    assert not rec.completeness.missing
    for step, wanted in enumerate(expected):
        for name, value in wanted.items():
            assert_same_bits(rec.run.tensor(name, step=step), value.cpu())
            if keep == "both":
                assert rec.run.summary(name, step=step).fingerprint == summarize(value.cpu()).fingerprint
    assert transfer_of(torch.device("cuda", 0)) is not transfer_of(torch.device("cuda", 1))


# Compiled models --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
@torch.no_grad()
def test_what_a_cuda_graph_computes_is_copied_before_its_next_replay_writes_over_it():
    torch.manual_seed(0)
    model = zoo.Holder(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(64, 64), b=nn.Linear(64, 64)).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(12)]
    expected = [model.a(x) for x in inputs]
    with ls.record(compiled, ["a", "b:input"]) as rec:
        for x in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    for step, value in enumerate(expected):
        torch.testing.assert_close(rec.run.tensor("a", step=step), value.cpu(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(rec.run.tensor("b:input[0]", step=step), value.relu().cpu(), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_torchscript_and_exported_models_on_the_device_are_recorded(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    x = torch.randn(4, 64, device="cuda")
    torch.jit.save(torch.jit.trace(model, (x,)), tmp_path / "model.pt")
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    for path in (tmp_path / "model.pt", tmp_path / "model.pt2"):
        with ls.record(path, ["0", "2"]) as rec:
            rec.model(x)
            rec.model(-x)
        for step, value in enumerate((x, -x)):
            assert_same_bits(rec.run.tensor("0", step=step), model[0](value).cpu())


ENDING = """
import os, signal, sys, torch, layerscope as ls

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
rec = ls.record(model, "*", keep=KEEP).__enter__()
for _ in range(3):
    torch.cuda._sleep(10_000_000)  # so that copies are under way at the end
    with torch.no_grad():
        model(torch.ones(64, 512, device="cuda"))
END
"""

ENDS = {
    "without reading": ("pass", 0),
    "an exception": ("raise ValueError('on purpose')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "an interrupt": ("os.kill(os.getpid(), signal.SIGINT)", -2),
    "the block's end": ("rec.__exit__(None, None, None)", 0),
}


@pytest.mark.parametrize("keep", ["tensor", "summary"])
@pytest.mark.parametrize(("end", "code"), ENDS.values(), ids=ENDS)
def test_twenty_processes_end_cleanly_however_they_end(end, code, keep):
    script = ENDING.replace("KEEP", repr(keep)).replace("END", end)
    for _ in range(2):  # ten at a time: each takes seconds to start
        ran = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(10)]
        said = [process.communicate()[1] for process in ran]
        assert {process.returncode for process in ran} == {code}, said
        assert not any("terminate called" in text for text in said)
