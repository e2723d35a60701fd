"""Every statistic against numpy, for every dtype, shape and layout, by both engines."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerscope.stats.sweeps
import layerscope.stats.tensor_views
from layerscope.errors import Unsupported
from layerscope.stats import Sketch, backend, fingerprint, prepare, summarize
from layerscope.stats.tensor_views import ITEMS

DTYPES = [getattr(torch, name) for name in ITEMS]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (8,), (1023,), (1025,), (33, 65), (4096 + 9,), (40_000,)]

pytestmark = [
    pytest.mark.usefixtures("counting"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def random_bits(dtype, shape, seed=0):
    """Any bits at all: NaNs, infinities, subnormals and both zeros included."""
    rng = np.random.default_rng(seed)
    size = math.prod(shape)
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, size) == 1).reshape(shape)
    raw = rng.integers(0, 256, (size, dtype.itemsize), dtype=np.uint8)
    raw[rng.random(size) < 0.1] = 0
    return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(shape)


@np.errstate(all="ignore")
def values_of(tensor):
    """What torch takes the tensor's values to be."""
    if tensor.dtype is torch.float4_e2m1fn_x2:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        packed = tensor.view(torch.uint8).numpy().reshape(-1)
        return np.stack([table[packed & 15], table[packed >> 4]], axis=1).reshape(-1)
    if tensor.dtype.is_complex:
        parts = torch.view_as_real(tensor.to(torch.complex128).resolve_conj()).numpy().astype(np.longdouble)
        modulus = np.hypot(parts[..., 0], parts[..., 1])
        return np.where(np.isnan(parts).any(axis=-1), math.nan, modulus).astype(np.float64)
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.numpy().astype(np.float64)
    return tensor.to(torch.float64).numpy()


def assert_same(a, b):
    """The same to the bit, save for the rounding of sums that were taken in another order."""
    alike = dataclasses.replace(a, mean=b.mean, std=b.std, l1=b.l1)
    assert alike == b
    for name in ("mean", "std", "l1"):
        slack = 1e-12 * (b.rms if b.finite else 0)
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-12, abs=slack, nan_ok=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits_of_any_dtype_and_shape_have_numpys_statistics(dtype, truth):
    for shape in SHAPES:
        tensor = random_bits(dtype, shape)
        values = values_of(tensor)
        full, moments = summarize(tensor), summarize(tensor, level="moments")
        for summary in (full, moments):
            truth(values).assert_of(summary)
            assert (summary.dtype, summary.shape, summary.tensors) == (str(tensor.dtype)[6:], shape, 1)
            np.testing.assert_array_equal(summary.first, values.reshape(-1)[:10])
        assert full.sketch.total == full.finite
        assert (moments.sketch, moments.fingerprint, moments.placed) == (None, None, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sketch_counts_the_very_values(dtype):
    tensor = random_bits(dtype, (5000,), seed=3)
    values = values_of(tensor)
    finite = np.sort(values[np.isfinite(values)])
    sketch = summarize(tensor).sketch
    magnitude = np.abs(finite)
    with np.errstate(under="ignore"):
        exponent = np.frexp(magnitude)[1] - 1
        step = np.floor((np.ldexp(magnitude, -exponent) - 1) * 64)
    key = np.where(magnitude < 2.0**-126, 0, np.sign(finite) * ((exponent + 126) * 64 + step + 1))
    keys, counts = np.unique(key, return_counts=True)
    np.testing.assert_array_equal(sketch.keys, keys)
    np.testing.assert_array_equal(sketch.counts, counts)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_have_numpys_statistics(dtype, truth):
    for scale in (1.0, 1e-3, 3e4):
        tensor = (torch.randn(3, 177, 91) * scale).to(dtype)
        truth(values_of(tensor)).assert_of(summarize(tensor), rel=1e-12)


VIEWS = {
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(1, 2, 0),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t[1:, 3:, 1:],
    "expanded": lambda t: t[:, :1].expand(6, 50, 9),
    "one value": lambda t: t[0, 0, 0].expand(4, 4),
    "overlapping": lambda t: t.as_strided((5, 5), (1, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_change_nothing(view):
    for dtype in DTYPES:
        tensor = VIEWS[view](random_bits(dtype, (6, 50, 9), seed=1))
        plain = tensor.clone(memory_format=torch.contiguous_format)
        assert_same(summarize(tensor), summarize(plain))
        assert_same(summarize(tensor, level="moments"), summarize(plain, level="moments"))


def test_a_permuted_tensor_too_large_for_one_copy_is_read_in_order():
    tensor = torch.randn(700, 13, 37).permute(2, 0, 1)
    assert not tensor.is_contiguous()
    assert tensor.numel() > 2 * layerscope.stats.tensor_views._COPY
    assert_same(summarize(tensor), summarize(tensor.contiguous()))
    assert fingerprint(tensor) == fingerprint(tensor.contiguous())


def test_lazily_conjugated_and_negated_tensors_are_what_they_stand_for(truth):
    z = torch.randn(40, 30, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag, z.T.conj()[3:], torch._neg_view(z.conj()), z.conj().imag[:0]):
        assert lazy.is_conj() or lazy.is_neg()
        solid = lazy.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        assert_same(summarize(lazy), summarize(solid))
        truth(values_of(solid)).assert_of(summarize(lazy, level="moments"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_has_exactly_its_mean_and_no_spread(dtype):
    one = random_bits(dtype, (1,), seed=8)
    expected = values_of(one)[0]
    if not math.isfinite(expected) or dtype is torch.float4_e2m1fn_x2:
        one = torch.full((1,), 0b0010_0010, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else one * 0 + 0.1
        expected = values_of(one)[0]
    summary = summarize(
        one.expand(3001).clone() if dtype.itemsize > 1 else one.view(torch.uint8).repeat(3001).view(dtype)
    )
    assert (summary.mean, summary.std) == (expected, 0.0)
    assert (summary.min, summary.max, summary.percentile(50)) == (expected, expected, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tensor_without_a_finite_value_has_an_answer(dtype):
    for bad in (math.nan, math.inf, -math.inf):
        summary = summarize(torch.full((1500,), bad, dtype=dtype))
        assert (summary.count, summary.finite, summary.zeros) == (1500, 0, 0)
        assert (summary.nan, summary.posinf, summary.neginf) == tuple(
            1500 * hit for hit in (math.isnan(bad), bad == math.inf, bad == -math.inf)
        )
        assert (summary.l1, summary.l2) == (0.0, 0.0)
        assert math.isnan(summary.mean)
        assert math.isnan(summary.percentile(50))
        assert summary.histogram() == ((), ())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_nan_anywhere_is_seen_and_left_out(dtype, truth):
    clean = torch.randn(9001).to(dtype)
    assert not summarize(clean).has_nan
    for place in (0, 6, 1023, 1024, 5000, -1):
        tensor = clean.clone()
        tensor[place] = math.nan
        summary = summarize(tensor)
        assert summary.nan == 1, place
        truth(values_of(tensor)).assert_of(summary)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormals_and_both_zeros_are_counted_as_what_they_are(dtype):
    tiny = torch.tensor([1, 3], dtype=torch.uint8).to(torch.int16 if dtype.itemsize == 2 else torch.int32)
    tiny = (tiny.to(torch.int64) if dtype.itemsize == 8 else tiny).view(dtype)
    tensor = torch.cat([tiny, -tiny, torch.tensor([0.0, -0.0], dtype=dtype)])
    summary = summarize(tensor)
    exact = tensor.to(torch.float64).numpy()
    assert summary.zeros == 2
    assert (summary.min, summary.max) == (exact.min(), exact.max())
    assert summary.l1 == np.abs(exact).sum()
    assert summary.std == pytest.approx(float(np.sqrt((exact.astype(np.longdouble) ** 2).mean())), rel=1e-12, abs=0.0)


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e6])
def test_a_small_spread_around_a_large_mean_keeps_its_digits(offset, truth):
    tensor = torch.randn(50_000, dtype=torch.float64) * 1e-3 + offset
    truth(tensor.numpy()).assert_of(summarize(tensor), rel=1e-9)
    tensor = (torch.randn(50_000) + offset).float()
    truth(tensor.double().numpy()).assert_of(summarize(tensor), rel=1e-9)


@pytest.mark.parametrize("scale", [1e300, 1e-300, 1e200, 1e-160])
def test_squares_that_leave_the_range_of_float64_do_not_spoil_the_moments(scale, truth):
    tensor = torch.randn(3000, dtype=torch.float64) * scale
    tensor[5] = math.nan
    truth(tensor.numpy()).assert_of(summarize(tensor), rel=1e-11)


def test_integers_beyond_float32_are_exact(truth):
    tensor = torch.tensor([2**53 - 1, -(2**53), 16_777_217, 0])
    summary = summarize(tensor)
    assert (summary.min, summary.max) == (-(2.0**53), 2.0**53 - 1)
    truth(tensor.numpy().astype(np.longdouble)).assert_of(summary)


def test_packed_float4_has_two_values_per_item():
    tensor = torch.tensor([0b0111_0010, 0b1111_0000], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    summary = summarize(tensor)
    assert (summary.count, summary.shape) == (4, (2,))
    assert summary.first == (1.0, 6.0, 0.0, -6.0)


def test_the_modulus_is_nan_before_it_is_infinite():
    z = torch.tensor([complex(math.nan, math.inf), complex(math.inf, 1), complex(3, 4), complex(0, 0)])
    summary = summarize(z)
    assert (summary.nan, summary.posinf, summary.zeros, summary.max) == (1, 1, 1, 5.0)


def test_numpy_arrays_of_any_byte_order_and_mutability_are_read(truth):
    array = np.random.default_rng(0).standard_normal((31, 17)).astype(np.float32)
    expected = summarize(array)
    truth(array).assert_of(expected)
    frozen = array.copy()
    frozen.setflags(write=False)
    shifted = np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(np.float32).reshape(31, 17)  # unaligned
    for same in (array.astype(">f4"), frozen, np.asfortranarray(array), shifted, array[::-1][::-1]):
        assert_same(summarize(same), expected)
    assert summarize(array[::-1]).fingerprint == expected.fingerprint
    assert summarize(np.float64(2.5)).first == (2.5,)


def test_what_autograd_holds_is_read_without_a_trace():
    weight = torch.nn.Parameter(torch.randn(20, 20))
    output = (weight * 2).relu()
    version, node, random = output._version, output.grad_fn, torch.get_rng_state()
    threads = torch.get_num_threads()
    assert summarize(output).zeros == int((output == 0).sum())
    assert (output._version, output.grad_fn, torch.get_num_threads()) == (version, node, threads)
    assert torch.equal(torch.get_rng_state(), random)
    output.sum().backward()
    assert weight.grad is not None


def test_no_torch_operation_runs_on_the_tensor():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    tensors = [torch.randn(2000, 3, requires_grad=True).mT.to(dtype) for dtype in (*FLOATS, torch.complex64)]
    lazy = torch.randn(9, dtype=torch.complex64).conj()
    with Watch():
        for tensor in [*tensors, lazy]:
            summarize(tensor)
            fingerprint(tensor)
        assert seen == []
        _ = lazy + 1
        assert seen  # the watch sees what there is to see


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int8], ids=str)
def test_a_tensor_of_many_chunks_is_summarised_as_one(dtype, counting, monkeypatch, truth):
    tensor = random_bits(dtype, (50_001,), seed=5)
    whole, cheap = summarize(tensor), summarize(tensor, level="moments")
    drain, drained = counting.drain, []
    monkeypatch.setattr(counting, "drain", lambda *args, **how: drained.append(how["finite"]) or drain(*args, **how))
    monkeypatch.setattr("layerscope.stats.tensor_views._CHUNK", 1777)
    monkeypatch.setattr("layerscope.stats.tensor_views._COPY", 1333)
    monkeypatch.setattr("layerscope.stats.sweeps._DRAIN", 4000)
    cut = summarize(tensor)
    assert all(finite <= 4000 for finite in drained)
    assert sum(drained) == cut.finite or dtype is torch.int8  # which has 256 counters of 64 bits
    truth(values_of(tensor)).assert_of(cut)
    truth(values_of(tensor)).assert_of(summarize(tensor, level="moments"))
    assert (cut.sketch, cut.fingerprint, cut.placed) == (whole.sketch, whole.fingerprint, whole.placed)
    assert (cut.min, cut.max, cut.zeros) == (cheap.min, cheap.max, cheap.zeros) or math.isnan(cut.min)


def test_prepare_takes_every_dtype():
    prepare(*ITEMS)
    assert backend() == "numba"


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match='"moments" or "full", not \'fast\''):
        summarize(torch.ones(2), level="fast")


@pytest.mark.parametrize("level", ["moments", "full"])
def test_a_refused_tensor_leaves_the_next_one_right(level):
    with pytest.raises(Unsupported):
        summarize(torch.empty(3, device="meta"), level=level)
    assert summarize(torch.tensor([1.0, 3.0]), level=level).mean == 2.0


@pytest.mark.stress
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
def test_more_than_two_to_the_31_items(dtype):
    tensor = torch.zeros(2**31 + 11, dtype=dtype)
    tensor[-1], tensor[2**31] = 5, -3
    summary = summarize(tensor)
    assert (summary.count, summary.zeros) == (2**31 + 11, 2**31 + 9)
    assert (summary.min, summary.max, summary.l1) == (-3, 5, 8)
    assert summary.sketch.counts.tolist() == [1, 2**31 + 9, 1]
    moved = tensor.clone()
    moved[-1], moved[-2] = 0, 5
    other = summarize(moved)
    assert (other.fingerprint, other.placed != summary.placed) == (summary.fingerprint, True)


@pytest.mark.stress
def test_more_than_two_to_the_31_items_of_an_expanded_scalar():
    summary = summarize(torch.tensor(1.5).expand(2**16, 2**15 + 1))
    assert (summary.count, summary.mean, summary.std) == (2**16 * (2**15 + 1), 1.5, 0.0)
    assert summary.sketch == Sketch.of(np.array([1.5]), np.array([summary.count]))
