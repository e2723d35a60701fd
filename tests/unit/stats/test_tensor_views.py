"""Reading a tensor's memory, and saying why where it cannot be read."""

import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from layerscope.errors import LayerscopeError, Unsupported
from layerscope.stats import summarize
from layerscope.stats.tensor_views import ITEMS, byte_values, lying, read


@pytest.mark.parametrize("name", [name for name, item in ITEMS.items() if item.itemsize == 1 and "x2" not in name])
def test_every_byte_is_worth_what_torch_says(name):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = (codes != 0).double() if name == "bool" else codes.view(getattr(torch, name)).to(torch.float64)
    np.testing.assert_array_equal(byte_values(name), expected.numpy())
    number = ~np.isnan(expected.numpy())
    np.testing.assert_array_equal(np.signbit(byte_values(name))[number], np.signbit(expected.numpy())[number])


def test_every_dtype_of_torch_is_read_or_refused_by_name():
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    refused = {str(d)[6:] for d in dtypes} - set(ITEMS)
    assert refused == {
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bit", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
        *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
    } & {str(d)[6:] for d in dtypes}


@pytest.mark.parametrize("items", [np.zeros((4, 6)), np.zeros((4, 6))[:, ::2], np.zeros((6, 4)).T])
def test_nothing_is_copied_to_look(items):
    assert np.shares_memory(read(torch.from_numpy(items)).items, items)
    assert np.shares_memory(read(items).items, items)


def test_pieces_are_in_order_unless_order_does_not_matter():
    array = np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)
    bits = read(torch.from_numpy(array))
    assert np.concatenate(list(bits.pieces())).tolist() == array.reshape(-1).tolist()
    (piece,) = bits.pieces(ordered=False)
    assert np.shares_memory(piece, array)
    assert sorted(piece.tolist()) == sorted(array.reshape(-1).tolist())


def refused(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces each of these kinds as a prototype
        return make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.empty(3, device="meta"),
            "meta has no memory this process can read; a meta tensor has no values",
        ),
        (lambda: torch.eye(3).to_sparse(), r"a sparse_coo tensor has no plain array .* to_dense\(\)"),
        (lambda: torch.eye(3).to_sparse_csr(), r"a sparse_csr tensor .* to_dense\(\)"),
        (lambda: torch.eye(3).to_mkldnn(), r"_mkldnn tensor .* to_dense\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), r"nested tensor .* unbind\(\)"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantised tensor .* dequantize\(\)"),
        (
            lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
            "dtype bits8 are not defined; they are of float64,",
        ),
        (lambda: np.zeros(2, np.longdouble), "are not defined; they are of"),
        (lambda: np.array(["a"]), "dtype str32 are not defined"),
        (lambda: np.array([object()]), "dtype object are not defined"),
        (lambda: [1.0, 2.0], "asked of a list; they exist for torch.Tensor and numpy.ndarray"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "a FakeTensor keeps its values elsewhere"),
    ],
)
def test_what_has_no_plain_values_is_refused_with_the_way_out(make, message):
    tensor = refused(make)
    with pytest.raises(Unsupported, match=message) as error:
        summarize(tensor)
    assert isinstance(error.value, LayerscopeError)


def test_a_tensor_inside_a_transform_is_refused():
    def inside(x):
        with pytest.raises(Unsupported, match="inside a transform"):
            summarize(x)
        return x * 2

    assert torch.vmap(inside)(torch.ones(3, 2)).sum() == 12


def test_a_tensor_whose_memory_was_given_back_is_refused_not_read():
    whole = torch.ones(10, 10)
    part, turned, empty = whole[3:], whole.T[3:], whole[:0]
    assert summarize(part).count == 70
    whole.untyped_storage().resize_(0)
    for tensor in (whole, part, turned):
        with pytest.raises(Unsupported, match=r"was given back \(0 bytes are left"):
            summarize(tensor)
    assert summarize(empty).count == 0


def test_a_subclass_with_memory_of_its_own_is_read():
    class Mine(torch.Tensor):
        pass

    assert summarize(torch.ones(3).as_subclass(Mine)).count == 3
    assert summarize(torch.nn.Parameter(torch.ones(3))).mean == 1.0


def test_only_what_kernels_can_read_as_it_lies_is_said_to_lie_plainly():
    whole = torch.randn(6, 8)
    for tensor in (whole, whole[2:], whole.bfloat16(), whole.half(), whole.double(), whole.requires_grad_() * 2):
        dtype, address, size = lying(tensor)
        assert (dtype, address, size) == (str(tensor.dtype)[6:], tensor.data_ptr(), tensor.numel())
    shrunk = torch.ones(100)
    shrunk.untyped_storage().resize_(100)
    given_back = torch.ones(100)
    given_back.untyped_storage().resize_(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes, and what torch will drop
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        quantised = torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8)
    odd = [
        whole.T, whole[:, ::2], whole[:0], torch._neg_view(whole), whole.to_sparse(), whole.to("meta"), shrunk,
        given_back, torch.arange(3), torch.ones(3).bool(), whole.to(torch.complex64), torch.nn.Parameter(whole),
        nested, quantised, whole.detach().numpy(), [1.0], None,
    ]  # fmt: skip
    for tensor in odd:
        assert lying(tensor) is None
    assert torch.vmap(lambda x: x * (1 if lying(x) is None else 2))(torch.ones(3, 2)).sum() == 6
