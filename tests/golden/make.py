"""Write the golden run of the current format; run once per format version, and never again for an old one.

    python tests/golden/make.py tests/golden/v2

It holds what version 2 can say: several dtypes, moments with and without an epoch, two ranks, summaries, channels,
notes with numbers JSON has no word for, a tensor that is stored once and seen twice, a record that replaces another,
losses, hostile names, a sealed segment, and one left behind as a kill leaves it. Every value follows from a formula
that `test_golden.py` writes out by hand.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, Missing, Writer


def blob(tensor: torch.Tensor) -> Blob:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes, lambda: data)


def main(target: Path) -> None:
    manifest = Manifest(
        model={"class": "Tiny", "layers": 2},
        mode="fp32",
        runtime="eager",
        versions={"layerscope": "0.1.0", "torch": "2.13.0"},
        device="cpu",
        seed=7,
        weights={"blocks.0": "0123456789abcdef" * 2},
        taps=["blocks.*"],
        aliases={"first": ["blocks.0:output"]},
        shared={"head": "embed"},
        settings={"threshold": math.inf, "text": "NaN"},
        started="2026-11-18T06:00:00+00:00",
    )
    with tempfile.TemporaryDirectory() as folder:
        live = Path(folder) / "live"
        zero = Writer(live, manifest, segment_tensors=8)
        kinds = ["float32", "bfloat16", "float16", "float64", "int8", "int64", "bool", "complex64"]
        for kind in kinds:  # fills and seals the first segment
            values = torch.arange(6).reshape(2, 3).to(getattr(torch, kind))
            zero.write(Point("kinds", leaf=(kind,)), Moment(), blob=blob(values))
        zero.flush()
        for step in range(3):  # stays behind as a pair
            values = torch.arange(4, dtype=torch.float32) + 10 * step
            zero.write(
                Point("blocks.0"),
                Moment(epoch=1, step=step, batch=step),
                blob=blob(values),
                summary=summarize(values, channels=0) if step == 1 else summarize(values),
                note={"scale": math.nan, "text": "NaN"} if step == 0 else None,
            )
        zero.write(Point("seen.again", "input"), Moment(), blob=blob(torch.arange(4, dtype=torch.float32) + 20))
        zero.write(Point("blocks.1", "input", ("hidden_states", 0)), Moment(call=2), blob=blob(torch.tensor(2.5)))
        zero.write(Point("replaced"), Moment(), blob=blob(torch.zeros(2)))
        zero.write(Point("replaced"), Moment(), blob=blob(torch.ones(2)))
        zero.write(Point("../../x</script>\n"), Moment(), blob=blob(torch.zeros(0, 3)))
        zero.write(Point("aten.softmax", op=True), Moment(), summary=summarize(torch.tensor([1.0, math.nan])))
        for step in range(3):
            zero.lose(Point("blocks.1"), Moment(step=step, batch=step), "there was no room")
        one = Writer(live, manifest, rank=1)
        one.write(Point("blocks.0"), Moment(epoch=1, rank=1), blob=blob(torch.arange(4, dtype=torch.float32) * -1))
        zero.flush()
        one.close(forwards=1, points=2, missing=[Missing("blocks.1:output", "never called")])
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(live, target)
        zero.close()
    journal = target / "rank-00000" / "segment-00001.journal"
    frames = journal.read_bytes().rstrip(b"\0")
    journal.write_bytes(frames + frames[:13] + b"torn by the ki")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
