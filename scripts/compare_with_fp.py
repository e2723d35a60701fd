#!/usr/bin/env python3
"""Compare a mode's layer outputs with the reference's, in one folder of `mode_{M}_layer_{i}.npy` files.

    python3 scripts/compare_with_fp.py 2-1 --reference fp32 --output_dir layer_outputs

Exit code 0 once a comparison is made, whatever it says; 2 when none can be. `layerscope compare` is the same with more
choices, and tells by its exit code whether the two differ.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from checkout import HERE, give_up, hand_over, one_sentence, tell_user

try:
    from layerscope.cli import compare as comparing
    from layerscope.cli.page import counting, put
    from layerscope.compare.page.document import document
    from layerscope.errors import LayerscopeError
    from layerscope.models import is_model
    from layerscope.store import Manifest, open_run
    from layerscope.store.layouts.quamba import mode_of
except ModuleNotFoundError as error:
    hand_over(error)

USUAL = "quamba-130m-w8a8"  # the model of the documents, for a folder that holds nothing yet
LIKE_THE_OTHERS = ("pretrained_dir", "calib_file", "prompt", "calib_data_num", "calib_seqlen")


def main() -> int:
    """Compare the modes that were asked for, print the page, save it where that was asked for."""
    asked = arguments()
    with one_sentence():
        here = modes_in(asked.output_dir)
        modes = [mode for mode in here if mode != asked.reference] if asked.all else asked.modes
        for mode in (asked.reference, *modes):
            if mode not in here:
                give_up(missing(mode, asked.output_dir, here))
        if not modes:
            give_up(
                f"{asked.output_dir} holds no mode but {asked.reference}. {how_to_make('quant_only', asked.output_dir)}"
            )
        with counting("comparing") as progress:
            comparison = comparing.compared(
                f"{asked.output_dir}:{asked.reference}",
                [f"{asked.output_dir}:{mode}" for mode in modes],
                progress=progress,
            )
        if asked.save_comparison:
            for mode, against in zip(modes, comparison, strict=True):
                alone = replace(comparison, candidates=(against,))
                comparing.saved(document(alone), Path(asked.save_comparison.replace("{mode}", mode)))
        put(document(comparison, summary=asked.all or None))
        for sentence in comparing.complaints(comparison):
            tell_user(sentence)
    return 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare a mode's layer outputs with the reference's.")
    parser.add_argument("modes", metavar="MODE", nargs="*", help="the mode to compare, such as 2-1")
    parser.add_argument("--all", action="store_true", help="every mode in the folder but the reference")
    parser.add_argument("--reference", default="fp32", metavar="MODE", help="what to compare with (fp32)")
    parser.add_argument("--output_dir", default="layer_outputs", metavar="DIR", help="the folder (layer_outputs)")
    parser.add_argument("--save_comparison", metavar="F", help="save as JSON; {mode} stands for the mode's name")
    asked = parser.parse_args()
    if bool(asked.modes) == asked.all:
        parser.error("name a MODE, or say --all")
    if len(asked.modes) > 1 and asked.save_comparison and "{mode}" not in asked.save_comparison:
        parser.error("several modes need several files: write {mode} in --save_comparison")
    return asked


def modes_in(folder: str) -> list[str]:
    """Return the modes that have a file in the folder."""
    try:
        return sorted({mode for path in Path(folder).iterdir() if (mode := mode_of(path.name)) is not None})
    except OSError:
        return []


def missing(mode: str, folder: str, here: list[str]) -> str:
    """Say that a mode is not there, what is, and which command makes it."""
    there = f"it has {', '.join(here)}" if here else "it holds no mode" if Path(folder).is_dir() else "it is not there"
    return f"{folder} has no mode {mode}: {there}. {how_to_make(mode, folder)}"


def how_to_make(mode: str, folder: str) -> str:
    """Name the command that makes a mode as the folder's others were made; where nobody knows the model, say MODEL."""
    said = manifests_in(folder)
    models = {name for name in (str(one.model.get("name")) for one in said) if is_model(name)}
    model = USUAL if not modes_in(folder) else models.pop() if len(models) == 1 else "MODEL"
    command = [os.path.relpath(HERE / "save_layer_outputs.py"), model, "--mode", mode, "--output_dir", folder]
    for word in LIKE_THE_OTHERS:
        values = {str(one.settings[word]) for one in said if word in one.settings}
        command += [f"--{word}", *values] if len(values) == 1 else []
    return f"Make it: `python3 {shlex.join(command)}`."


def manifests_in(folder: str) -> list[Manifest]:
    """Return what is said of the modes of a folder, as far as it can be read."""
    found = []
    for mode in modes_in(folder):
        with suppress(LayerscopeError, OSError):
            found.append(open_run(folder, mode=mode).manifest)
    return found


if __name__ == "__main__":
    sys.exit(main())
