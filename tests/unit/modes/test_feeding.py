"""What a mode is given: copies of the same inputs, in its own types."""

import pytest
import torch
from torch import nn

from layerscope.models import Inputs
from layerscope.modes.feeding import dtype_of, fingerprint_of, fitted


def test_equal_inputs_have_equal_fingerprints_and_others_have_not():
    x, mask = torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.bool)
    given = fingerprint_of([Inputs((x,), {"mask": mask})])
    assert fingerprint_of([Inputs((x.clone(),), {"mask": mask.clone()})]) == given
    others = [
        [Inputs((x + 1,), {"mask": mask})],
        [Inputs((x.flip(0),), {"mask": mask})],
        [Inputs((x.view(3, 2),), {"mask": mask})],
        [Inputs((x.double(),), {"mask": mask})],
        [Inputs((x,), {"mask": ~mask})],
        [Inputs((x,), {"masks": mask})],
        [Inputs((x, mask))],
        [Inputs((x,), {"mask": mask, "scale": 2})],
        [Inputs((x,), {"mask": mask}), Inputs((x,), {"mask": mask})],
    ]
    assert len({given, *map(fingerprint_of, others)}) == 1 + len(others)


def test_what_cannot_be_fingerprinted_does_not_stop_anything():
    assert fingerprint_of([Inputs((torch.eye(3).to_sparse(),))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_floating_inputs_get_the_models_dtype_and_others_stay(dtype):
    x, ids = torch.ones(2), torch.arange(2)
    batch = fitted(Inputs((x, [ids]), {"more": {"x": x}}), nn.Linear(2, 2, dtype=dtype))
    assert (batch.args[0].dtype, batch.args[1][0].dtype, batch.kwargs["more"]["x"].dtype) == (dtype, ids.dtype, dtype)
    assert x.dtype == torch.float32


def test_a_forward_that_writes_into_its_input_spoils_no_other():
    x = torch.ones(2)
    fitted(Inputs((x,)), nn.Linear(2, 2)).args[0].zero_()
    assert x.tolist() == [1, 1]


def test_a_model_without_weights_takes_inputs_as_they_are():
    assert dtype_of(nn.ReLU()) is None
    assert fitted(Inputs((torch.ones(1, dtype=torch.float64),)), nn.ReLU()).args[0].dtype == torch.float64
