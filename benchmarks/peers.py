"""The same job done by the peers that install from PyPI, each against its own plain forward.

Each peer runs in a process of its own, because some change the model or torch for good. A peer that does not install or
does not run here says so; nothing is assumed for it. tensor-tracker is not on PyPI and is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

Variants = dict[str, Callable[[], object]]


def layerscope() -> Variants:
    import layerscope as ls
    from benchmarks.llama import llama, tokens

    model, ids = llama(), tokens()

    def plain():
        return model(input_ids=ids, use_cache=False)

    def recorded(taps, **options):
        def run():
            with ls.record(model, taps, **options) as rec:
                plain()
            return rec

        return run

    everything = ["**:input", "**:output", ".:output"]
    return {
        "plain": plain,
        "layerscope: decoder layers, tensors (the whole block)": recorded("model.layers.*"),
        "layerscope: all modules, in and out, moments": recorded(everything, keep="summary", statistics="moments"),
        "layerscope: all modules, in and out, full statistics": recorded(everything, keep="summary"),
    }


def nnsight() -> Variants:
    from nnsight import NNsight

    from benchmarks.llama import llama, tokens

    model, ids = llama(), tokens()
    wrapped = NNsight(model)

    def layers():
        with wrapped.trace(ids, use_cache=False) as tracer:
            cache = tracer.cache(modules=list(wrapped.model.layers)).save()
        return [cache]

    def everything():
        with wrapped.trace(ids, use_cache=False) as tracer:
            cache = tracer.cache().save()
        return [cache]

    return {
        "plain": lambda: model(input_ids=ids, use_cache=False),
        "nnsight: decoder layers, references": layers,
        "nnsight: all modules, references": everything,
    }


def transformer_lens() -> Variants:
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from benchmarks.llama import llama, tokens

    folder = tempfile.mkdtemp()
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(8000)}, unk_token="t0"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t3", "unk_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    model, ids = llama(attention="eager"), tokens()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bridge = TransformerBridge.boot_transformers("llama", hf_model=llama(), tokenizer=tokenizer, device="cpu")
    return {
        "plain": lambda: model(input_ids=ids, use_cache=False),
        "transformer-lens: block outputs (against eager attention, which it forces)": lambda: bridge.run_with_cache(
            ids, names_filter=lambda name: name.endswith("hook_out") and name.count(".") == 2
        ),
        "transformer-lens: full cache": lambda: bridge.run_with_cache(ids),
    }


def torchlens() -> Variants:
    import torchlens as tl

    from benchmarks.llama import llama, tokens

    model, ids = llama(), tokens()
    return {
        "plain": lambda: model(ids),
        "torchlens: record, one decoder layer": lambda: tl.record(model, ids, save=tl.module("model.layers.3")),
        "torchlens: trace, every operation": lambda: tl.trace(model, ids),
    }


def msprobe() -> Variants:
    from msprobe.pytorch import PrecisionDebugger

    from benchmarks.llama import llama, tokens

    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    settings = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = {"task": "statistics", "dump_path": str(folder), "rank": [], "step": [], "level": "L0"}
    (folder / "config.json").write_text(json.dumps({**config, "statistics": settings}))
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    watched, model, ids = llama(), llama(), tokens()

    def dump():
        debugger.start(model=watched)
        watched(input_ids=ids, use_cache=False)
        debugger.stop()
        debugger.step()

    return {
        "plain": lambda: model(input_ids=ids, use_cache=False),
        "mindstudio-probe: all modules, in and out, four statistics": dump,
    }


PEERS = {f.__name__: f for f in (layerscope, nnsight, transformer_lens, torchlens, msprobe)}


def main() -> int:
    if len(sys.argv) > 1:
        return measure(sys.argv[1])
    for name in PEERS:
        done = subprocess.run([sys.executable, "-m", "benchmarks.peers", name], capture_output=True, text=True)
        why = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        print(done.stdout if done.returncode == 0 else f"### {name}\n\nnot measured: {why[0]}\n", flush=True)
    return 0


def measure(name: str) -> int:
    import torch

    from benchmarks.timing import interleave, machine, table

    warnings.simplefilter("ignore")
    out = os.dup(1)
    os.dup2(2, 1)  # what a peer prints is not ours
    with torch.no_grad():
        rows = interleave(PEERS[name](), against="plain", rounds=7)
    os.dup2(out, 1)
    print(table(f"{name} ({machine()}, torch {torch.__version__})", rows), flush=True)
    for folder in Path(tempfile.gettempdir()).glob("msprobe*"):
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
