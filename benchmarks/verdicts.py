"""How many healthy pairs are accused and how many planted faults are named, from folders alone.

python benchmarks/verdicts.py                        # every architecture of tests/families.py, on this CPU
python benchmarks/verdicts.py --taps '**' llama bert # outputs alone, two architectures
python benchmarks/verdicts.py --no-floors            # neither floors nor noise runs
python benchmarks/verdicts.py --layers               # layers alone: what is over three floors there must be named
python benchmarks/verdicts.py --two                  # two faults at once
python benchmarks/verdicts.py --artefacts            # torch.compile, torch.export and ONNX, healthy and with a fault
python benchmarks/verdicts.py --wide 4096            # one Llama layer of that width
python benchmarks/verdicts.py --device cuda          # healthy pairs across devices: CPU against GPU, both ways
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path

import torch
import transformers

import layerscope as ls

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests" / "stories")]

families, judged = import_module("families"), import_module("test_judged_from_folders")

HEALTHY = ("same", "noise")
DTYPES = (torch.float32, torch.bfloat16)


class Tally:
    """Healthy pairs and planted faults, and what went wrong with them."""

    def __init__(self) -> None:
        self.pairs, self.lines = 0, []
        self.accused, self.planted, self.missed = 0, collections.Counter(), collections.Counter()

    def healthy(self, what, result):
        """Count a healthy pair."""
        self.pairs += 1
        if str(result.verdict) not in HEALTHY:
            self.accused += 1
            self.say(f"accused: {what}: {result.verdict.because}")

    def fault(self, kind, said):
        """Count a fault; `said` is what was named instead."""
        self.planted[kind] += 1
        if said:
            self.missed[kind] += 1
            self.say(f"missed: {said}")

    def say(self, line):
        """Print a line at once: a long run may be cut short."""
        print(line[:400], flush=True)

    def figures(self):
        """Print what it came to."""
        print(f"{self.accused} of {self.pairs} healthy pairs accused")
        for kind, number in self.planted.items():
            print(f"{kind}: {number - self.missed[kind]} of {number} named")


def on(device, model, given, *, taps, floors=False):
    """Record one forward on a device."""
    given = {name: value.to(device) for name, value in given.items()}
    return judged.recorded(model.to(device), given, floors=floors, taps=taps)


def across(names, device, taps, tally):
    """Hold a CPU and a GPU against each other, both ways, in two dtypes."""
    for name in names:
        given = families.inputs(name)
        for here, there in (("cpu", device), (device, "cpu")):
            for dtype in DTYPES:
                own = judged.cast(given, dtype)
                reference = on(here, families.family(name, dtype=dtype), own, taps=taps, floors=True)
                other = on(there, families.family(name, dtype=dtype), own, taps=taps)
                tally.healthy(f"{name} {dtype} {here} {there}", ls.compare(reference, other))


def one_at_a_time(name, options, tally):
    """Hold every healthy variant and every single fault against one reference."""
    given = families.inputs(name)
    reference = judged.recorded(families.family(name), given, floors=options.floors, taps=options.taps)
    for what, run in judged.healthy(name, taps=options.taps):
        tally.healthy(f"{name} {what}", ls.compare(reference, run))
    for fault in judged.FAULTS:
        for dtype in DTYPES if options.floors else DTYPES[:1]:
            if judged.targets(name, fault, given):
                kind = f"{fault} {str(dtype).removeprefix('torch.')}"
                tally.fault(kind, judged.missed(reference, name, fault, dtype, taps=options.taps))


def faulty(name, at, dtype=torch.float32, fault="x 1.1"):
    """Return a model with faults planted in the modules `at`."""
    model = families.family(name, dtype=dtype)
    with torch.no_grad():
        for each in at:
            judged.FAULTS[fault](model.get_submodule(each))
    return model


def two_at_once(name, options, tally):
    """Plant two faults in different modules: both must be roots."""
    given = families.inputs(name)
    reference = judged.recorded(families.family(name), given, floors=True, taps=options.taps)
    targets = judged.targets(name, "x 1.1", given)
    for dtype in DTYPES:
        for fault in ("x 1.01", "x 1.1"):
            at = random.Random(f"{name} {fault} {dtype} two").sample(targets, 2)
            run = judged.recorded(faulty(name, at, dtype, fault), judged.cast(given, dtype), taps=options.taps)
            result = ls.compare(reference, run)
            roots = {row.name for row in result.rows if row.kind == "root"}
            said = "" if set(at) <= roots else f"{name} {fault} {dtype} at {at}: {sorted(roots)[:4]}, {result.verdict}"
            tally.fault(f"two {fault} {str(dtype).removeprefix('torch.')}", said)


def layers_alone(name, options, tally):
    """Record the outputs of numbered layers and of the model alone; a fault counts where it is over three floors."""
    given, taps = families.inputs(name), ["**.layers.*", "**.layer.*", "**.h.*", "**.blocks.*", "."]
    there = {module for module, _ in families.family(name).named_modules()}
    taps = [tap for tap in taps if tap == "." or any(f".{tap[3:-2]}." in f".{module}" for module in there)]
    reference = judged.recorded(families.family(name), given, floors=True, taps=taps)
    for what, run in judged.healthy(name, taps=taps):
        tally.healthy(f"{name} {what}", ls.compare(reference, run))
    points = {row.point.name for row in ls.compare(reference, reference).rows}
    for fault in judged.FAULTS:
        for dtype in DTYPES:
            targets = judged.targets(name, fault, given)
            if not targets:
                continue
            at = random.Random(f"{name} {fault} {dtype}").choice(targets)
            holder = max((p for p in points if not p or f"{at}.".startswith(f"{p}.")), key=len)
            result = ls.compare(
                reference, judged.recorded(faulty(name, [at], dtype, fault), judged.cast(given, dtype), taps=taps)
            )
            seen = max((row.excess or 0.0 for row in result.rows if row.point.name == holder), default=0.0)
            if seen > 3:
                first = result.first_divergence
                if not holder:  # in none of the layers: the first that is off is what can be named
                    holder = next(row.name for row in result.rows if (row.excess or 0.0) > 1)
                said = "" if first is not None and first.name == holder else f"{name} {fault} {dtype} at {at}: {first}"
                tally.fault("over three floors, layers alone", said)


def artefacts(name, options, tally):
    """Compile, export and convert a model, healthy and with one fault."""
    given = families.inputs(name)
    reference = judged.recorded(families.family(name), given, floors=True, taps=options.taps)
    at = random.Random(name).choice(judged.targets(name, "x 1.1", given))
    for what in ("compile", "export", "onnx"):
        for where in ([], [at]):
            try:
                run = made(what, faulty(name, where), given, options.taps)
            except Exception as error:  # what torch cannot trace is no pair
                tally.say(f"no pair: {name} {what}: {type(error).__name__} {' '.join(str(error).split())[:80]}")
                break
            result = ls.compare(reference, run)
            if not where:
                tally.healthy(f"{name} {what}", result)
                if run.floors.points:  # the program as the reference, by its own floors
                    for attention in ("eager", "sdpa"):
                        try:
                            other = families.family(name, attention=attention)
                        except ValueError:  # it has no attention
                            continue
                        result = ls.compare(run, judged.recorded(other, given, taps=options.taps))
                        tally.healthy(f"{name} {attention} by the floors of {what}", result)
                    first = ls.compare(run, judged.recorded(faulty(name, [at]), given, taps=options.taps))
                    first = first.first_divergence
                    said = "" if first is not None and first.name == at else f"{name} {what} floors at {at}: {first}"
                    tally.fault(f"x 1.1 by the floors of {what}", said)
                continue
            first = result.first_divergence
            said = "" if first is not None and first.name == at else f"{name} {what} at {at}: {first}, {result.verdict}"
            tally.fault(f"x 1.1 {what}", said)


def made(what, model, given, taps):
    """Record what a compiler makes of a model."""
    model.config.use_cache = False
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        warnings.simplefilter("ignore")
        if what == "compile":
            torch.compiler.reset()
            return judged.recorded(torch.compile(model, backend="aot_eager"), given, taps=taps)
        program = torch.export.export(model, (), given, strict=False)
        if what == "onnx":
            torch.onnx.export(program, f=f"{folder}/model.onnx", verbose=False)
            program = f"{folder}/model.onnx"
        with ls.record(program, taps, keep="tensor", floors=True) as rec:
            rec.model(**given)
        return rec.run


def wide(width, tally, taps):
    """Hold one layer of that width against itself in other kernels and dtypes, and plant faults."""
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=1, num_attention_heads=width // 128,
        num_key_value_heads=width // 512, vocab_size=256, max_position_embeddings=64,
    )  # fmt: skip

    def model(dtype=torch.float32, attention="eager"):
        config._attn_implementation = attention
        torch.manual_seed(0)
        return families.cast(transformers.LlamaForCausalLM(config).eval(), dtype)

    given = {"input_ids": torch.randint(3, 256, (1, 24), generator=torch.Generator().manual_seed(1))}
    reference = judged.recorded(model(), given, floors=True, taps=taps)
    for dtype in DTYPES:
        for attention in ("eager", "sdpa"):
            run = judged.recorded(model(dtype, attention), given, taps=taps)
            tally.healthy(f"{width} wide {dtype} {attention}", ls.compare(reference, run))
        for at in ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"):
            other = model(dtype)
            with torch.no_grad():
                other.get_submodule(at).weight.mul_(1.01)
            first = ls.compare(reference, judged.recorded(other, given, taps=taps)).first_divergence
            tally.fault(f"x 1.01 {dtype}", "" if first is not None and first.name == at else f"{width} {at}: {first}")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--taps", default="**:io")
    parser.add_argument("--no-floors", dest="floors", action="store_false")
    parser.add_argument("--wide", type=int)
    for what in ("two", "layers", "artefacts"):
        parser.add_argument(f"--{what}", action="store_true")
    options = parser.parse_args()
    names, tally = options.names or list(families.FAMILIES), Tally()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"there is no {options.device} here")
    if options.device != "cpu":
        across(names, options.device, options.taps, tally)
    elif options.wide:
        wide(options.wide, tally, options.taps)
    else:
        chosen = {"two": two_at_once, "layers": layers_alone, "artefacts": artefacts}
        measure = next((run for what, run in chosen.items() if getattr(options, what)), one_at_a_time)
        for name in names:
            measure(name, options, tally)
    tally.figures()


if __name__ == "__main__":
    main()
