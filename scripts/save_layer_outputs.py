#!/usr/bin/env python3
"""Save what the first and the last layer of a model give in a mode: `mode_{M}_layer_{i}.npy` and `mode_{M}_stats.json`.

    python3 scripts/save_layer_outputs.py quamba-130m-w8a8 --mode 2-1 --quantize --output_dir layer_outputs

Several modes are several words after --mode; the model is loaded once, and all of them see the same samples. Exit code
0 once they are saved; 2 when one cannot be. `layerscope record --mode` is the same with more choices.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from checkout import hand_over, one_sentence, tell_user

try:
    from variants import recorded

    from layerscope.store.layouts.quamba import statistics_name
    from layerscope.store.layouts.writing import convert
except ModuleNotFoundError as error:
    hand_over(error)

if TYPE_CHECKING:
    from layerscope.store import Run


def main() -> int:
    """Record the modes that were asked for, and save each as soon as it is there."""
    asked = arguments()
    failed = False
    with one_sentence():
        for one in recorded(
            asked.model,
            asked.mode,
            layers="first,last",
            components=asked.components,
            pretrained_dir=asked.pretrained_dir,
            calib_file=asked.calib_file,
            prompt=asked.prompt,
            calib_data_num=asked.calib_data_num,
            calib_seqlen=asked.calib_seqlen,
        ):
            if one.run is None or one.error is not None:
                failed = True
                continue
            if asked.quantize and not one.mode.quantised:
                tell_user(f"mode {one.mode.name} is in floating point: --quantize changes nothing of it")
            save(one.run, one.mode.name, Path(asked.output_dir))
            del one
    return 2 if failed else 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Save what the first and the last layer of a model give in a mode.")
    parser.add_argument("model", metavar="MODEL", help="a built-in name such as quamba-130m-w8a8, or any other MODEL")
    parser.add_argument("--pretrained_dir", metavar="D", help="a folder with weights (those that come with layerscope)")
    parser.add_argument("--mode", metavar="M", nargs="+", required=True, help="fp32, 0, 2-1 ..., or all, essential ...")
    parser.add_argument("--quantize", action="store_true", help="understood; the mode itself says what is quantised")
    parser.add_argument("--output_dir", metavar="D", default="layer_outputs", help="where to save (layer_outputs)")
    parser.add_argument(
        "--components", metavar="C", help="of these layers, what goes in and out of: conv,ssm (nothing)"
    )
    parser.add_argument("--calib_file", metavar="F", help="text or token ids (the text that comes with layerscope)")
    parser.add_argument("--prompt", metavar="TEXT", help="record this text, in place of samples")
    parser.add_argument("--calib_data_num", metavar="N", type=int, help="samples of text (10)")
    parser.add_argument("--calib_seqlen", metavar="N", type=int, help="tokens of each (512)")
    return parser.parse_args()


def save(run: Run, mode: str, folder: Path) -> None:
    """Write the files of a mode in place of those that are there, and print a line of statistics for each layer."""
    convert(run, folder, layout="quamba", overwrite=True)
    file = folder / statistics_name(mode)
    print(f"mode {mode}: {file}")
    for name, layer in json.loads(file.read_text()).items():
        if name.startswith("layer_"):
            mean, std, low, high = (float(layer[key]) for key in ("mean", "std", "min", "max"))
            print(f"  {name:<8}  {layer['shape']}  mean {mean:.6f}  std {std:.6f}  range [{low:.6f}, {high:.6f}]")


if __name__ == "__main__":
    sys.exit(main())
