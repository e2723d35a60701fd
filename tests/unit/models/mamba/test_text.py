"""Bundled text: the same on every machine, and never calibrated on what is recorded."""

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import layerscope.models.mamba
from layerscope.errors import BadText
from layerscope.models.mamba import sample_batches

EXCERPTS = Path(layerscope.models.mamba.__file__).parent / "excerpts"


@pytest.mark.parametrize("split", ["calibration", "recorded"])
def test_a_sample_is_a_row_of_bytes_of_the_text(split):
    samples = sample_batches(10, 512, split=split)
    text = (EXCERPTS / f"{split}.txt").read_bytes()
    assert [tuple(ids.shape) for ids in samples] == [(1, 512)] * 10
    assert {ids.dtype for ids in samples} == {torch.int64}
    assert all(bytes(ids[0].tolist()) in text for ids in samples)


def test_the_text_is_these_bytes_on_every_machine():
    digests = {file.stem: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in EXCERPTS.glob("[cr]*.txt")}
    assert digests == {"calibration": "f4e640214827e305", "recorded": "d8de845117aacc44"}


def test_a_hundred_samples_of_a_thousand_tokens_do_not_overlap():
    text = (EXCERPTS / "recorded.txt").read_bytes()
    starts = [text.find(bytes(ids[0].tolist())) for ids in sample_batches(100, 1024, split="recorded")]
    assert all(later - start >= 1024 for start, later in pairwise(starts))


def test_what_is_recorded_shares_no_line_of_code_with_what_is_calibrated_on():
    def rows(split):
        return {
            bytes(row) for ids in sample_batches(40, 1024, split=split) for row in ids.unfold(1, 64, 64)[0].tolist()
        }

    assert not rows("calibration") & rows("recorded")


def test_more_than_the_text_goes_on_at_its_beginning():
    length = len((EXCERPTS / "recorded.txt").read_bytes())
    (ids,) = sample_batches(1, length + 100, split="recorded")
    assert torch.equal(ids[0, :100], ids[0, -100:])


@pytest.mark.parametrize(("num", "seqlen"), [(0, 512), (10, 0), (-1, 5)])
def test_nothing_cannot_be_asked_for(num, seqlen):
    with pytest.raises(BadText, match="were asked for; there is at least 1 of each"):
        sample_batches(num, seqlen, split="recorded")
