"""Draw the loss curve from the log of the training.

python -m training.curve
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import matplotlib as mpl

HERE = Path(__file__).parent


def main() -> int:
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "quamba-small"  # the same picture from the same log
    from matplotlib import pyplot as plt

    with (HERE / "quamba_small.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    (trigram,) = re.findall(
        r"trigram .* (\d\.\d+) bits per byte", (HERE / "quamba_small.log").read_text(), re.MULTILINE
    )[:1]
    bytes_seen = [row["bytes"] / 1e6 for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(bytes_seen, [row["held_out_bits_per_byte"] for row in rows], color="#1f77b4", label="held-out text")
    axes.plot(bytes_seen, [row["train_bits_per_byte"] for row in rows], color="#ff7f0e", label="training text")
    axes.axhline(float(trigram), color="grey", linestyle="--", label=f"trigram model, {float(trigram):.2f}")
    axes.set(xlabel="megabytes trained on", ylabel="bits per byte", ylim=(0.8, 4), title="quamba-small")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "quamba_small.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
