"""Run every benchmark, or those named: `python -m benchmarks overhead store`."""

from __future__ import annotations

import os
import subprocess
import sys

# Threads that spin while they wait count as CPU time of whatever runs beside them.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
ALL = (
    "statistics", "store", "many", "comparing", "overhead", "hooks", "watching", "scanning", "compiled", "diagnosing",
    "peers", "startup", "pages", "gpu",
)  # fmt: skip


def main() -> int:
    chosen = sys.argv[1:] or ALL
    unknown = set(chosen) - set(ALL)
    if unknown:
        print(f"no benchmark called {', '.join(sorted(unknown))}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    worst = 0
    for name in chosen:
        print(f"\n## {name}\n", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        worst |= subprocess.run(command, env={**os.environ, **ENVIRONMENT}).returncode
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
