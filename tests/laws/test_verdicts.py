"""The same pair has the same verdict, whatever else was tapped, in whatever order its points come."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import families
import layerscope as ls
from layerscope.store import MemoryRun

NAME = "llama"
FAULTY = "model.layers.1.mlp.up_proj"


def recorded(model, *, floors=False):
    with (
        torch.no_grad(),
        ls.record(model, "**:io", keep="tensor", floors=floors, options=ls.RecordOptions(weights=False)) as rec,
    ):
        model(**families.inputs(NAME))
    return rec.run


def made():
    reference = recorded(families.family(NAME), floors=True)
    healthy = recorded(families.family(NAME, dtype=torch.bfloat16))
    model = families.family(NAME, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_submodule(FAULTY).weight.mul_(1.05)
    return reference, healthy, recorded(model)


RUNS = made()
POINTS = [str(entry.point) for entry in RUNS[1].records()]


def some(run, kept, order):
    """The same run with fewer points, in another order."""
    other = MemoryRun(run.manifest)
    entries = [entry for entry in run.records() if str(entry.point) in kept]
    for entry in sorted(entries, key=lambda entry: order.index(str(entry.point))):
        other.add(entry.point, entry.moment, tensor=entry.tensor())
    return other


@settings(max_examples=6, deadline=None)
@given(st.sets(st.sampled_from(POINTS), min_size=5), st.randoms(use_true_random=False), st.sampled_from([1, 2]))
def test_other_taps_another_order_and_threads_give_the_same_verdict(taps, random, threads):
    reference, healthy, faulty = RUNS
    kept = taps | {f"{FAULTY}:input[0]", f"{FAULTY}:output", ".:output[logits]"}
    order = random.sample(POINTS, len(POINTS))
    assert str(ls.compare(reference, some(healthy, kept, order), threads=threads).verdict) == "noise"
    result = ls.compare(reference, some(faulty, kept, order), threads=threads)
    assert (str(result.verdict), result.first_divergence.name) == ("differs", FAULTY)
