"""What a file says of its modules without being loaded is what torch says once it has loaded it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import zoo
from layerscope.models.tiny import tiny_transformer
from layerscope.runtimes import find
from layerscope.runtimes.listing import Listing
from layerscope.runtimes.model_files import listed, opened


def tied():
    model = tiny_transformer(layers=2, hidden=16, heads=2)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model, (torch.arange(5)[None],)


def normalised():
    """Buffers beside parameters, a frozen weight, a list of modules."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ModuleList([nn.PReLU()])[0])
    model[0].weight.requires_grad_(False)
    return model.eval(), (torch.ones(1, 1, 5, 5),)


class Scripted(nn.Module):
    """Attributes of every kind that TorchScript knows, and modules that a tracer would not see."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 2, bias=False)})
        self.names, self.table, self.pair = ["a", "b"], {"a": 1}, (1, 2.0)
        self.note = torch.jit.Attribute(None, Tensor | None)
        self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        x = self.layers["one"](x * self.scale)
        return self.layers["two"](x) if twice else x


def scripted():
    return Scripted(), None


def traced(model, args, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        made = torch.jit.script(model) if args is None else torch.jit.trace(model, args, check_trace=False)
    torch.jit.save(made, path)


def exported(model, args, path):
    torch.export.save(torch.export.export(model, args), path)


MODELS = [zoo.plain, zoo.shared, zoo.called_thrice, zoo.in_place, zoo.never_called, zoo.half_precision, zoo.attention]


@pytest.mark.parametrize("save", [traced, exported])
@pytest.mark.parametrize("make", [*MODELS, tied, normalised], ids=lambda make: make.__name__)
def test_a_file_lists_what_torch_loads(make, save, tmp_path):
    model, args = make()
    assert_lists_what_torch_loads(model.eval(), args, save, tmp_path / "model.pt2")


def test_a_scripted_module_lists_what_torch_loads(tmp_path):
    assert_lists_what_torch_loads(*scripted(), traced, tmp_path / "model.pt")


def assert_lists_what_torch_loads(model, args, save, path):
    save(model, args, path)
    found = listed(path)
    loaded = opened(path)
    expected = Listing.of(find(loaded), loaded)
    assert found._replace(refuse=None) == expected._replace(refuse=None)
    for wanted in ({"": {"output"}}, {"": {"grad_input"}}):
        assert refused(found, wanted) == refused(expected, wanted)


def refused(listing, wanted):
    try:
        listing.refuse(wanted, False)
    except TypeError as error:
        return str(error)
    return None


def test_a_frozen_module_says_that_its_operations_are_known_once_it_is_loaded(tmp_path):
    model, args = zoo.plain()
    torch.jit.save(torch.jit.freeze(torch.jit.trace(model.eval(), args)), tmp_path / "frozen.pt")
    found = listed(tmp_path / "frozen.pt")
    assert [place.name for place in found.places] == [""]
    assert "torch.jit.freeze" in found.remark
    assert "--trust" in found.remark


def test_what_code_in_the_file_restores_is_said_to_be_closed(tmp_path):
    class Restored(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.ones(2)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

        @torch.jit.export
        def __getstate__(self):
            return self.weight, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[Tensor, bool]) -> None:
            self.weight, self.training = state

    torch.jit.save(torch.jit.script(nn.Sequential(Restored(), nn.Linear(2, 2))), tmp_path / "model.pt")
    found = listed(tmp_path / "model.pt")
    assert [place.name for place in found.places] == ["", "0", "1"]
    assert found.remark.startswith("0 is restored by code in the file")
    assert not listed_remark(nn.Linear(2, 2), tmp_path)


def listed_remark(model, folder):
    torch.jit.save(torch.jit.script(model), folder / "plain.pt")
    return listed(folder / "plain.pt").remark


def test_what_is_no_program_is_not_listed(tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    assert listed(tmp_path / "weights.pt") is None
    assert listed(tmp_path / "nowhere.pt2") is None
