"""What many small records cost: 3,257 points x 30 steps of tensors of 24 numbers, recorded, opened, shown, compared.

    python -m benchmarks.many [quick]            # quick: a tenth of the steps

CPU time of this process, all threads (`time.process_time`), and the peak of memory for the comparison, which runs in a
process of its own. Recording is timed from the first `Writer.write` to the end of `close`, with statistics that are
there already, so that it is the store's cost alone. Then 64 simulated ranks x 100 points x 1,000 steps of moments: how
long opening takes, and the series of one point. The limits are those the store was built to.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Manifest, RecordTable, Run, Writer, open_run

POINTS, STEPS = 3257, 30
LIMITS = {
    "record both": 0.15, "record summary": 0.12, "bytes both": 450, "bytes moments": 130,
    "open": 0.5, "to_pandas": 0.5, "to_dicts": 1.5, "show": 3.0, "compare": 30.0, "compare MB": 500,
    "open 64 ranks": 2.0, "one series": 0.1,
}  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def record(path: Path, *, steps: int, keep: str, level: str = "full") -> float:
    """Write the run and return CPU seconds."""
    rng = np.random.default_rng(0)
    names = [f"model.layers.{n // 50}.mlp.experts.{n % 50}.down_proj" for n in range(POINTS)]
    points = [Point(name) for name in names]
    values = [torch.from_numpy(rng.normal(size=(2, 12)).astype(np.float32)) for _ in range(997)]
    summaries = [summarize(value, level=level) for value in values]
    blobs = [value.numpy().reshape(-1).view(np.uint8) for value in values]

    def write() -> None:
        writer = Writer(path, Manifest(mode="fp32"))
        for step in range(steps):
            for n, point in enumerate(points):
                at = (step * POINTS + n) % 997
                blob = Blob("float32", (2, 12), 96, data=lambda at=at: blobs[at]) if keep == "both" else None
                writer.write(point, Moment(step=step, batch=step), blob=blob, summary=summaries[at])
        done = writer.close(forwards=steps, points=POINTS)
        assert done.records == steps * POINTS, done

    return timed(write)


def compare(reference: Path, candidate: Path) -> None:
    """Compare in a process of its own; print CPU seconds and the peak of its memory."""
    import layerscope as ls

    seconds = timed(lambda: ls.compare(reference, candidate))
    status = Path("/proc/self/status").read_text()  # ru_maxrss is at least that of the process that began this one
    print(seconds, int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024)


def ranks(folder: Path, *, count: int = 64, points: int = 100, steps: int = 1000) -> None:
    one = summarize(torch.randn(24), level="moments")
    for rank in range(count):
        writer = Writer(folder, Manifest(), rank=rank)
        for step in range(steps):
            for n in range(points):
                writer.write(Point(f"layers.{n}"), Moment(step=step, batch=step, rank=rank), summary=one)
        writer.close(forwards=steps, points=points)


def main() -> int:
    if sys.argv[1:2] == ["compare"]:
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    steps = 3 if "quick" in sys.argv else STEPS
    folder = Path(tempfile.mkdtemp(prefix="layerscope-many-"))
    records = steps * POINTS
    found: dict[str, float] = {}
    try:
        found["record both"] = 1e3 * record(folder / "both", steps=steps, keep="both") / records
        found["bytes both"] = size_of(folder / "both") / records
        found["record summary"] = 1e3 * record(folder / "summary", steps=steps, keep="summary") / records
        record(folder / "moments", steps=steps, keep="summary", level="moments")
        found["bytes moments"] = size_of(folder / "moments") / records
        shutil.copytree(folder / "both", folder / "like")
        found["open"] = timed(lambda: len(open_run(folder / "both")))
        RecordTable().to_pandas()  # importing pandas is no matter of ours
        for verb in ("to_pandas", "to_dicts"):
            run = open_run(folder / "both")
            assert len(run) == records
            found[verb] = timed(lambda run=run, verb=verb: getattr(run.summaries(), verb)())
        show = [sys.executable, "-m", "layerscope", "show", str(folder / "both")]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(show, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["show"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        command = [sys.executable, "-m", "benchmarks.many", "compare", str(folder / "both"), str(folder / "like")]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        found["compare"], found["compare MB"] = map(float, out[-2:])
        if "quick" not in sys.argv:
            shutil.rmtree(folder / "both")
            ranks(folder / "ranks")
            found["open 64 ranks"] = timed(lambda: len(open_run(folder / "ranks")))
            run = open_run(folder / "ranks")
            len(run)
            found["one series"] = timed(lambda: series(run))
    finally:
        shutil.rmtree(folder)
    print(f"{records:,} records; CPU seconds, milliseconds a record, bytes a record")
    for name, value in found.items():
        print(f"{name:>16} {value:10.3f}  (limit {LIMITS[name]:g}){'' if value <= LIMITS[name] else '  OVER'}")
    return int(any(value > LIMITS[name] for name, value in found.items()))


def series(run: Run) -> object:
    """Return the means of one point over all steps and ranks."""
    return run.summaries("layers.7").column("mean")


if __name__ == "__main__":
    raise SystemExit(main())
