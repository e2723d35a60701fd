"""What a diagnosis measures by its kernel is what the CPU finds: on a GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from layerscope.diagnose.judge import measuring, nearness

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where it plays the device's arithmetic

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
REAL = DEVICE.type == "cuda"  # the interpreter takes a second for what a device does in microseconds
NAN, INF = math.nan, math.inf
LARGE = 1_000_003 if REAL else 2_300


def refuse(*_, **__):
    raise AssertionError("the pair was not gone through on the device")


@pytest.fixture
def there():
    """Whatever is asked meanwhile is answered by the kernel, or not at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_sums", refuse)
        if not REAL:
            patch.setattr(measuring, "elsewhere", lambda side: True)
            patch.setattr(nearness, "_there", lambda tensor: True)
        yield lambda function, *tensors: function(*(tensor.to(DEVICE) for tensor in tensors))


def assert_measured_alike(there, wanted, got):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "elsewhere", lambda side: False)
        patch.setattr(measuring, "_sums", SUMS)
        expected = dataclasses.asdict(measuring.measured(wanted, got))
    found = dataclasses.asdict(there(measuring.measured, wanted, got))
    for name in ("error", "scale", "worst", "peak"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-5, abs=1e-7), name
    assert found == expected


SUMS = measuring._sums


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool], ids=str
)
def test_a_diagnosis_has_the_numbers_of_the_cpu(dtype, there):
    for size in (1, 9, LARGE):
        wanted = torch.randn(size)
        got = (wanted * 1.02 + 0.01 * torch.randn(size)).to(dtype)
        assert_measured_alike(there, wanted if dtype.is_floating_point else wanted.to(dtype), got)
    value = torch.randn(1501).to(dtype)
    assert there(measuring.measured, value, value.clone()).equal
    octets = value.view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(octets[at : at + 8], "little") for at in range(0, len(octets) // 8 * 8, 8)]
    total = sum(word * (2 * at + 1) * 0x9E3779B1 for at, word in enumerate(words)) % 2**64
    digest = (total - 2**64 if total >= 2**63 else total) ^ hash(octets[len(words) * 8 :])
    assert there(measuring.measured, value, value.clone()).digest == digest
    assert there(measuring.bits, value) == digest


def test_a_diagnosis_leaves_out_what_is_masked_or_not_finite(there):
    wanted = torch.randn(1500)
    got = wanted.bfloat16()
    wanted[3:40] = -1e9
    got[5:50] = -INF
    got[100], got[101], wanted[101], wanted[102] = NAN, NAN, NAN, INF
    assert_measured_alike(there, wanted, got)
    assert there(measuring.measured, wanted, got).nonfinite == 2
    assert there(measuring.measured, wanted, got).changed == 12 / 1500


def test_a_diagnosis_of_complex_values_takes_their_parts(there):
    wanted = torch.randn(700, dtype=torch.complex64)
    assert there(measuring.measured, wanted, wanted * 1.5).error == pytest.approx(0.5, rel=1e-6)
    assert there(measuring.measured, wanted, wanted.clone()).equal
