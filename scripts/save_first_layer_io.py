#!/usr/bin/env python3
"""Save what goes into the first layer of a model and what comes out of it, for several modes, in one `.npz`.

    python3 scripts/save_first_layer_io.py --modes fp32 0 2-1 --output_file first_layer_io_all_modes.npz

Keys are `mode_{M}_input` and `mode_{M}_output`; statistics go to `first_layer_io_all_modes_stats.json` beside it and,
for reading, to stdout. All modes see the same sample: of the text that comes with layerscope for a built-in model and a
Mamba, the inputs that another model came with. Exit code 0 once they are saved; 2 when one cannot be.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checkout import hand_over, one_sentence

try:
    from variants import recorded

    from layerscope.models import BUILT_IN
    from layerscope.modes.preparing import DEFAULT_DIR
    from layerscope.store.layouts.convert import convert
    from layerscope.store.layouts.first_layer import NAME, statistics_name
except ModuleNotFoundError as error:
    hand_over(error)

LINE = "=" * 98
SEQ_LEN = 512


def main() -> int:
    """Record the first layer in each mode, print it, and put both files in their place when all of it is there."""
    asked = arguments()
    file = Path(asked.output_file if asked.output_file.endswith(".npz") else f"{asked.output_file}.npz")
    failed = saved = False
    with one_sentence():
        file.parent.mkdir(parents=True, exist_ok=True)
        # A file that is there may hold modes of another sample: what is written is new, and replaces it whole.
        with TemporaryDirectory(prefix=".first_layer_", dir=file.parent) as beside:
            for one in recorded(
                asked.model,
                asked.modes,
                layers="first",
                sides="input,output",
                stop=True,
                pretrained_dir=asked.pretrained_dir,
                calib_file=asked.calib_file,
                prompt=asked.prompt,
                calib_seqlen=asked.seq_len,
                usual=(1, SEQ_LEN),
            ):
                if one.run is None or one.error is not None:
                    failed = True
                    continue
                convert(one.run, Path(beside) / file.name, layout="first-layer")
                show(one.mode.name, json.loads((Path(beside) / statistics_name(file.name)).read_text()))
                saved = True
                del one
            for name in (file.name, statistics_name(file.name)) if saved else ():
                (Path(beside) / name).replace(file.with_name(name))
                print(f"saved {file.with_name(name)}")
    return 2 if failed else 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Save what goes into a model's first layer and what comes out of it.")
    parser.add_argument("--model", metavar="MODEL", default="quamba-130m-w8a8", help="(quamba-130m-w8a8)")
    parser.add_argument("--pretrained_dir", metavar="D", help=f"a folder with weights ({DEFAULT_DIR})")
    parser.add_argument("--modes", metavar="M", nargs="+", default=["all"], help="(fp32 0 2-0 2-1 2-2 2-3 2-4 3)")
    parser.add_argument("--output_file", metavar="F", default=NAME, help=f"({NAME})")
    parser.add_argument("--seq_len", metavar="N", type=int, help=f"tokens of a built-in model's sample ({SEQ_LEN})")
    parser.add_argument("--calib_file", metavar="F", help="text or token ids (the text that comes with layerscope)")
    parser.add_argument("--prompt", metavar="TEXT", help="record this text, in place of a sample")
    asked = parser.parse_args()
    if asked.pretrained_dir is None and asked.model.startswith("quamba"):
        asked.pretrained_dir = DEFAULT_DIR
    if asked.seq_len is None and asked.prompt is None and asked.model in BUILT_IN:
        asked.seq_len = SEQ_LEN
    return asked


def show(mode: str, said: dict[str, Any]) -> None:
    """Print what the statistics file says of a mode."""
    print(f"{LINE}\nMODE {mode}\n{LINE}\n")
    for sign, side in (("📥", "input"), ("📤", "output")):
        entry = said["modes"][mode][side]
        mean, std, low, high = (f"{float(entry[key]):.6f}" for key in ("mean", "std", "min", "max"))
        print(f"{sign} {side.upper()} (Shape: {entry['shape']}):")
        print(f"  First 10 values: {[f'{float(value):.6f}' for value in entry['first_10']]}")
        print(f"  Mean: {mean}\n  Std:  {std}\n  Range: [{low}, {high}]\n")


if __name__ == "__main__":
    sys.exit(main())
