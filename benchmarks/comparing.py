"""How fast two recorded tensors are compared, against the plain numpy way, other tools, and reading the files.

    python -m benchmarks.comparing [megabytes] [folder]      # default 256 and /dev/shm

Two native runs of one tensor each. Ours reads both files in pieces (checksums verified) and measures everything; the
plain numpy way, SGLang's and msprobe's get the tensors in memory, for nothing. Reading alone is `pread` of both files
into one buffer: the limit. All ways once per round, in one process; medians.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import interleave, machine, table
from layerscope.compare.measure import measure
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer, open_run

ROUNDS = 5
BUFFER = 1 << 20


def plain_numpy(r: np.ndarray, c: np.ndarray) -> tuple[object, ...]:
    """What a user writes: every number by its own line, on whole arrays."""
    d = c - r
    absolute = np.abs(d)
    mse, mae = np.mean(d**2), np.mean(absolute)
    relative = absolute / (np.abs(r) + 1e-8)
    sides = [(x.mean(), x.std(), x.min(), x.max()) for x in (r, c, d)]
    return (
        sides, mse, np.sqrt(mse), mae, absolute.max(), mse / np.mean(r**2), mae / np.mean(np.abs(r)),
        relative.max(), relative.mean(), np.corrcoef(r.ravel(), c.ravel())[0, 1],
        np.dot(r.ravel(), c.ravel()) / (np.linalg.norm(r) * np.linalg.norm(c)),
        [np.percentile(absolute, q) for q in (50, 90, 95, 99)],
    )  # fmt: skip


def like_sglang(r: torch.Tensor, c: torch.Tensor) -> tuple[object, ...]:
    """1 - 2xy / (x^2 + y^2), largest and mean |d|, five percentiles of |d| (which torch takes of 16 Mi at most)."""
    x, y = r.float(), c.float()
    d = (x - y).abs()
    denominator = (x * x + y * y).sum(dtype=torch.float64)
    relative = 1 - 2 * (x * y).sum(dtype=torch.float64) / denominator
    return relative, d.max(), d.mean(), d.flatten()[: 1 << 24].quantile(torch.tensor([0.01, 0.05, 0.5, 0.95, 0.99]))


def like_msprobe(r: np.ndarray, c: np.ndarray) -> tuple[object, ...]:
    """Cosine, Euclidean distance, MaxAbsErr, MaxRelativeErr, shares of elements within 0.1 % and 0.5 %."""
    d = np.abs(r - c)
    relative = d / np.maximum(np.abs(r), np.finfo(np.float32).eps)
    cosine = np.dot(r.ravel(), c.ravel()) / (np.linalg.norm(r) * np.linalg.norm(c))
    return cosine, np.linalg.norm(r - c), d.max(), relative.max(), (relative < 0.001).mean(), (relative < 0.005).mean()


def msprobe() -> tuple[str, Callable[[np.ndarray, np.ndarray], object]]:
    """msprobe's own functions where it is installed, else the same numbers in numpy."""
    try:
        from msprobe.core.compare.npy_compare import compare_ops_apply
    except ImportError:
        return "like msprobe (not installed)", like_msprobe
    return "msprobe", lambda r, c: compare_ops_apply(r, c, False, "")


def written(path: Path, tensor: torch.Tensor) -> Path:
    data = tensor.view(torch.uint8).numpy()
    writer = Writer(path, Manifest())
    blob = Blob(str(tensor.dtype)[6:], tuple(tensor.shape), data.nbytes, lambda: data)
    writer.write(Point("layer"), Moment(), blob=blob)
    assert writer.close().records == 1
    return path


def read_alone(paths: list[Path]) -> int:
    buffer, total = np.empty(BUFFER, np.uint8), 0
    for path in paths:
        fd = os.open(path / "rank-00000/segment-00000.safetensors", os.O_RDONLY)
        while got := os.preadv(fd, [buffer], total):
            total += got
        total = 0
        os.close(fd)
    return total


def compared(title: str, r: torch.Tensor, c: torch.Tensor, folder: Path, *, others: bool) -> None:
    paths = [written(folder / name, tensor) for name, tensor in (("reference", r), ("candidate", c))]
    sides = [next(open_run(path).records("layer")) for path in paths]
    size = r.nbytes + c.nbytes
    metrics = measure(*sides)
    variants: dict[str, Callable[[], object]] = {
        "reading both files": lambda: read_alone(paths),
        "ours, 1 thread": lambda: measure(*sides),
        "ours, 2 threads": lambda: measure(*sides, threads=2),
        "ours, equal bits": lambda: measure(sides[0], sides[0]),
    }
    if others:
        x, y = r.float().numpy(), c.float().numpy()
        name, theirs = msprobe()
        variants["plain numpy"] = lambda: plain_numpy(x, y)
        variants["like SGLang"] = lambda: like_sglang(r, c)
        variants[name] = lambda: theirs(x, y)
    rows = interleave(variants, against="ours, 1 thread", rounds=ROUNDS, warmup=1)
    print(table(f"{title}: {size / 1e6:.0f} MB, relative L2 {metrics.relative_l2:.2e}", rows))
    by_name = {row.name: row for row in rows}
    limit = by_name["reading both files"].wall
    for name in ("ours, 1 thread", "ours, 2 threads"):
        row = by_name[name]
        print(f"{name}: {size / row.wall / 1e9:.2f} GB/s, {limit / row.wall:.0%} of the read limit", end="; ")
    print(f"reading: {size / limit / 1e9:.2f} GB/s")
    if others:
        row = by_name["plain numpy"]
        print(f"CPU time of the plain numpy way: {row.cpu_ratio:.1f} times ours; {size / row.wall / 1e9:.3f} GB/s")
    for path in paths:
        shutil.rmtree(path)


def main(megabytes: str = "256", place: str = "/dev/shm") -> int:
    torch.set_num_threads(1)
    print(f"{machine()}, torch {torch.__version__}, numpy {np.__version__}\n")
    folder = Path(tempfile.mkdtemp(dir=place, prefix="layerscope-bench-"))
    tokens = int(megabytes) * (1 << 20) // 4 // 4096
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(1, tokens, 4096, generator=generator)
    c = r + 1e-3 * torch.randn(1, tokens, 4096, generator=generator)
    try:
        compared("float32 against float32", r, c, folder, others=True)
        compared("float32 against bfloat16", r, c.bfloat16(), folder, others=False)
        compared("bfloat16 against bfloat16", r.bfloat16(), c.bfloat16(), folder, others=False)
    finally:
        shutil.rmtree(folder)
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB, {machine()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
