"""What the live page and a report cost: 100 runs of 500 points x 1,000 steps, listed and looked at; a large report.

    python -m benchmarks.pages [quick]            # quick: a tenth of the steps

CPU time (`time.process_time`), the least of three rounds, and the peak of memory, in a process that imports no torch.
The hundred runs are one that was recorded and 99 links to its files. The report has 24 layers x 8 modes of 64 x 64
values; the time Chromium needs for 10,000 rows is that of its script, style and layout; a
scroll is 100 pixels. The limits are those the pages were built to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

RUNS, POINTS, STEPS = 100, 500, 1000
LIMITS = {
    "list": 1.0, "list again": 1.0, "page of a run": 2.0, "MB for ten pages": 400, "report MB": 1.5,
    "open 10,000 rows": 3.0, "each of 100 scrolls": 0.016,
}  # fmt: skip
BUSY = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


def record_runs(folder: Path, *, steps: int) -> None:
    """Record one run of many points and steps, and link to it under other names."""
    import torch

    from layerscope.recorder import record

    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(POINTS)))
    with record(model, "*", to=folder / "run-000", keep="summary", statistics="moments"):
        for step in range(steps):
            model(torch.full((2, 4), 1.0 + step))
    for nth in range(1, RUNS):
        for file in (folder / "run-000").rglob("*"):
            to = folder / f"run-{nth:03}" / file.relative_to(folder / "run-000")
            to.parent.mkdir(parents=True, exist_ok=True)
            if file.is_file():
                os.link(file, to)


def least(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def peak() -> float:
    """Return the most memory this process has had, in megabytes; `ru_maxrss` would be that of its parent."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def look(folder: Path) -> dict[str, float]:
    """List the runs and make the pages of ten, as the server does."""
    from layerscope.server.comparisons import Comparisons
    from layerscope.server.pages import Pages
    from layerscope.server.runs import Runs

    found: dict[str, float] = {}
    runs = Runs(folder)
    comparisons = Comparisons(folder)
    pages = Pages(runs, comparisons)
    start = time.process_time()
    pages.start()
    found["list"] = time.process_time() - start
    found["list again"] = least(pages.start)
    before = peak()
    times = []
    for run in runs.found()[:10]:
        start = time.process_time()
        assert pages.run(run.id) is not None
        times.append(time.process_time() - start)
    found["page of a run"] = max(times)
    found["MB for ten pages"] = peak() - before
    comparisons.close()
    assert "torch" not in sys.modules
    return found


def report(folder: Path) -> float:
    """Return the megabytes of a report of 24 layers and 8 modes."""
    import torch

    from layerscope.compare import compare
    from layerscope.recorder import record

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))
    names = ["fp32", *(f"mode-{n}" for n in range(8))]
    with torch.no_grad():
        for nth, name in enumerate(names):
            model[nth].weight *= 1 + nth / 100
            with record(model, "*", to=folder / name, keep="both", statistics="full", floors=nth == 0):
                model(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    compare(folder / names[0], *(folder / name for name in names[1:])).to_html(folder / "report.html")
    return (folder / "report.html").stat().st_size / 1e6


def browse(folder: Path) -> dict[str, float]:
    """Return the seconds that Chromium's page is busy to open 10,000 rows, and to scroll through them."""
    from playwright.sync_api import sync_playwright

    from layerscope.report import Cell, Column, Document, Table, html

    columns = [Column("point", "point", "name"), Column("kind", "kind"), Column("bar", "", "bar", log=True)]
    columns += [Column(str(n), f"measure {n}", "number") for n in range(9)]
    rows = (
        (f"model.layers.{n}.mlp", Cell("same", "good"), n + 1.0, *(1 / (n + k + 1) for k in range(9)))
        for n in range(10_000)
    )
    html.save(Document("long", (Table.of("t", columns, rows),)), folder / "long.html")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def busy() -> float:
            told = session.send("Performance.getMetrics")["metrics"]
            return sum(one["value"] for one in told if one["name"] in BUSY)

        page.goto((folder / "long.html").as_uri())
        page.locator("tbody", has_text="model.layers.1.mlp").wait_for()
        opened = busy()
        page.evaluate(
            """async () => {
              const box = document.querySelector('.table');
              for (let n = 1; n <= 100; n += 1) {
                box.scrollTop += 100;
                await new Promise(requestAnimationFrame);
              }
            }"""
        )
        scrolled = busy() - opened
        browser.close()
    return {"open 10,000 rows": opened, "each of 100 scrolls": scrolled / 100}


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "look":
        for name, value in look(Path(sys.argv[2])).items():
            print(f"{name}\t{value}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        record_runs(runs, steps=STEPS // 10 if "quick" in sys.argv else STEPS)
        command = [sys.executable, "-m", "benchmarks.pages", "look", str(runs)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = {name: float(value) for name, value in (line.split("\t") for line in told.splitlines())}
        found["report MB"] = report(Path(folder, "modes"))
        if shutil.which("chromium"):
            found |= browse(Path(folder))
    for name, value in found.items():
        print(f"{name:20} {value:8.3f}   limit {LIMITS[name]:g}{'' if value <= LIMITS[name] else '   OVER'}")
    return int(any(value > LIMITS[name] for name, value in found.items()))


if __name__ == "__main__":
    raise SystemExit(main())
