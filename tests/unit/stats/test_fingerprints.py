"""Fingerprints: equal for equal bits, different for everything else that can go wrong."""

import numpy as np
import pytest
import torch

from layerscope.stats import fingerprint, summarize

pytestmark = pytest.mark.usefixtures("counting")

WHOLE = 2**64 - 1


def by_hand(words):
    """The definition in Python's integers."""

    def mixed(word):
        x = (word * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & WHOLE
        x = ((x ^ x >> 32) * 0xD6E8FEB86659FD93) & WHOLE
        return x ^ x >> 32

    free = sum(mixed(w) for w in words)
    placed = sum(mixed(w) * (mixed(WHOLE ^ i % 1024) | 1) * (mixed(i // 1024) | 1) for i, w in enumerate(words))
    return f"{free & WHOLE:016x}{placed & WHOLE:016x}"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("size", [0, 1, 5, 1024, 2500])
def test_the_fingerprint_is_what_its_definition_says(dtype, size):
    words = np.random.default_rng(size).integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    assert fingerprint(words) == by_hand(words.tolist())


def test_complex_numbers_are_their_halves_in_order():
    z = np.array([1 + 2j, -3.5j], np.complex64)
    assert fingerprint(z) == by_hand(z.view(np.uint64).tolist())
    assert fingerprint(z) != fingerprint((z * 1j).conj() * 1j) or (z == (z * 1j).conj() * 1j).all()
    swapped = z.view(np.float32).reshape(-1, 2)[:, ::-1].copy().view(np.complex64)
    assert both_differ(z, swapped)
    wide = z.astype(np.complex128)
    assert both_differ(wide, swapped.astype(np.complex128))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "int8", "int32", "complex64", "complex128"]
)
def test_the_summary_and_the_fingerprint_agree(dtype):
    tensor = (torch.randn(3, 700) * 50).to(getattr(torch, dtype))
    summary = summarize(tensor)
    assert fingerprint(tensor) == f"{summary.fingerprint:016x}{summary.placed:016x}"


def both_differ(a, b):
    one, other = fingerprint(a), fingerprint(b)
    return one[:16] != other[:16] and one[16:] != other[16:]


def only_the_place_differs(a, b):
    one, other = fingerprint(a), fingerprint(b)
    return one[:16] == other[:16] and one[16:] != other[16:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8", "complex128"])
def test_one_bit_anywhere_changes_both(dtype):
    tensor = (torch.randn(2600) * 40).to(getattr(torch, dtype))
    size = tensor.element_size()
    rng = np.random.default_rng(0)
    for place, bit in [*zip(rng.integers(0, 2600, 40), rng.integers(0, 8 * size, 40), strict=True), (0, 0), (2599, 7)]:
        flipped = tensor.clone()
        flipped.view(torch.uint8)[int(place) * size + int(bit) // 8] ^= 1 << int(bit) % 8
        assert both_differ(tensor, flipped), (place, bit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.flip(0),
        lambda x: x.roll(1),
        lambda x: x.roll(1024),
        lambda x: x[torch.randperm(x.numel())],
        lambda x: x.view(-1, 2).flip(1).reshape(-1),
        lambda x: x.view(64, -1)[torch.randperm(64)].reshape(-1),
        lambda x: x.view(64, -1).T.reshape(-1),
        lambda x: x.view(-1, 1024).flip(0).reshape(-1),
    ],
    ids=[
        "reversed",
        "shifted",
        "shifted a block",
        "shuffled",
        "swapped pairs",
        "shuffled rows",
        "transposed",
        "blocks",
    ],
)
def test_another_order_changes_only_the_placed_one(dtype, moved):
    tensor = torch.randint(0, 200, (64 * 96,)).to(getattr(torch, dtype))
    assert only_the_place_differs(tensor, moved(tensor))


@pytest.mark.parametrize("width", [32, 1000, 1024, 2048])
def test_exchanged_rows_of_a_one_hot_matrix_are_told_apart(width):
    """Such rows hold the same values: weights that grow evenly with the position would not see it."""
    one_hot = torch.eye(8, width)
    for row in range(1, 8):
        order = list(range(8))
        order[0], order[row] = row, 0
        assert only_the_place_differs(one_hot, one_hot[order])


@pytest.mark.parametrize(("i", "j"), [(0, 1), (1, 1024), (1026, 2049), (5, 1029), (1023, 1024), (2047, 1)])
def test_two_exchanged_items_are_told_apart(i, j):
    tensor = torch.arange(4096.0)
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    assert only_the_place_differs(tensor, swapped)


def test_no_two_places_of_the_first_million_weigh_the_same():
    from layerscope.stats.fingerprints import BLOCK, WEIGHTS, mixed

    weights = WEIGHTS * (mixed(np.arange(1024, dtype=np.uint64)) | np.uint64(1))[:, None]
    assert np.unique(weights).size == 1024 * BLOCK
    assert (weights % 2 == 1).all()


def test_small_integers_with_the_same_sums_are_told_apart():
    assert both_differ(torch.tensor([0, 4, 5]), torch.tensor([1, 2, 6]))  # same sum, same sum of squares
    assert both_differ(torch.tensor([0, 0, 3, 3]), torch.tensor([1, 1, 1, 3]))


def test_zeros_count_and_so_does_their_sign():
    assert both_differ(torch.zeros(3), torch.zeros(4))
    assert both_differ(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_one_nan_is_not_another():
    bits = np.array([0x7FC00000, 0x7FC00001], np.uint32)
    assert both_differ(bits[:1].view(np.float32), bits[1:].view(np.float32))


def test_equal_tensors_agree_across_strides_and_shapes():
    tensor = torch.randn(30, 40, 50)
    apart = torch.empty(30, 40, 100)[..., ::2].copy_(tensor)
    assert not apart.is_contiguous()
    same = {fingerprint(x) for x in (tensor, apart, tensor.reshape(-1), tensor.mT.contiguous().mT, tensor.numpy())}
    assert len(same) == 1
    assert fingerprint(tensor).isascii()
    assert len(fingerprint(tensor)) == 32


def test_byte_order_does_not_matter():
    for dtype in ("<f4", "<c8", "<f8", "<i2"):
        array = np.arange(9).astype(dtype)
        assert fingerprint(array) == fingerprint(array.astype(array.dtype.newbyteorder(">")))
