"""How many healthy pairs are accused and how many planted faults are named, from folders alone.

python benchmarks/verdicts.py                        # every architecture of tests/families.py, on this CPU
python benchmarks/verdicts.py --device cuda          # healthy pairs across devices: CPU against GPU, both ways
python benchmarks/verdicts.py --taps '**' llama bert # outputs alone, two architectures
"""

from __future__ import annotations

import argparse
import collections
import sys
from importlib import import_module
from pathlib import Path

import torch

import layerscope as ls

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests" / "stories")]

families, judged = import_module("families"), import_module("test_judged_from_folders")


def on(device, model, given, *, taps, floors=False):
    """Record one forward on a device."""
    given = {name: value.to(device) for name, value in given.items()}
    return judged.recorded(model.to(device), given, floors=floors, taps=taps)


def across(names, device, taps):
    """Yield every healthy pair of a CPU and a GPU, both ways, in three dtypes."""
    for name in names:
        given = families.inputs(name)
        for here, there in (("cpu", device), (device, "cpu")):
            for dtype in (torch.float32, torch.bfloat16):
                own = judged.cast(given, dtype)
                reference = on(here, families.family(name, dtype=dtype), own, taps=taps, floors=True)
                other = on(there, families.family(name, dtype=dtype), own, taps=taps)
                yield f"{name} {dtype} {here} {there}", ls.compare(reference, other)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--taps", default="**:io")
    options = parser.parse_args()
    names = options.names or list(families.FAMILIES)
    pairs, accused = 0, []
    missed: dict[str, list[str]] = collections.defaultdict(list)
    planted: dict[str, int] = collections.Counter()
    if options.device != "cpu":
        if not torch.cuda.is_available():
            parser.error(f"there is no {options.device} here")
        for what, result in across(names, options.device, options.taps):
            pairs += 1
            if str(result.verdict) not in ("same", "noise"):
                accused.append(f"{what}: {result.verdict.because}")
        names = []
    for name in names:
        reference = judged.recorded(families.family(name), families.inputs(name), floors=True, taps=options.taps)
        for what, run in judged.healthy(name, taps=options.taps):
            pairs += 1
            result = ls.compare(reference, run)
            if str(result.verdict) not in ("same", "noise"):
                accused.append(f"{name} {what}: {result.verdict.because}")
        for fault in judged.FAULTS:
            for dtype in (torch.float32, torch.bfloat16):
                if not judged.targets(name, fault, families.inputs(name)):
                    continue
                kind = f"{fault} {str(dtype).removeprefix('torch.')}"
                planted[kind] += 1
                if said := judged.missed(reference, name, fault, dtype, taps=options.taps):
                    missed[kind].append(said)
    for line in (*accused, *(line for lines in missed.values() for line in lines)):
        print(line)
    print(f"{len(accused)} of {pairs} healthy pairs accused")
    for kind, number in planted.items():
        print(f"{kind}: {number - len(missed[kind])} of {number} named first")


if __name__ == "__main__":
    main()
