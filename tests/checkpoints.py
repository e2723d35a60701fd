"""A Mamba written in the three formats its users have, by the published names and shapes; imports no writer of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["quamba", "state_spaces", "transformers_folder"]


def _config(model: Any, **more: object) -> str:
    c = model.config
    sizes = {"d_model": c.hidden_size, "n_layer": c.num_hidden_layers, "vocab_size": c.vocab_size}
    known = {"rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8}
    return json.dumps(sizes | known | {"ssm_cfg": {}} | more)


def state_spaces(model: Any, folder: Path) -> Path:
    """What mamba_ssm's `save_pretrained` leaves."""
    folder.mkdir(parents=True)
    ssm = {"d_state": model.config.state_size, "dt_rank": model.config.time_step_rank}
    (folder / "config.json").write_text(_config(model, ssm_cfg=ssm))
    weights = {k.replace("backbone.embeddings", "backbone.embedding"): w for k, w in model.state_dict().items()}
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def transformers_folder(model: Any, folder: Path) -> Path:
    """What transformers' `save_pretrained` leaves."""
    import transformers

    c = model.config
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "state_size", "time_step_rank")
    theirs = transformers.MambaForCausalLM(
        transformers.MambaConfig(**{n: getattr(c, n) for n in names}, pad_token_id=0)
    )
    theirs.load_state_dict(model.state_dict())
    theirs.save_pretrained(folder)
    return folder


def quamba(model: Any, folder: Path, *, hadamard: bool = False) -> Path:
    """What Quamba's `save_pretrained` leaves of a W8A8QMamba: one scale a weight, grids as round numbers."""
    folder.mkdir(parents=True)
    c = model.config
    ssm = {"layer": "W8A8QMamba", "d_state": c.state_size, "dt_rank": c.time_step_rank}
    cfg = {
        "norm_cfg": {"norm": "QRMSNorm"},
        "embedding_cfg": {"layer": "Embedding"},
        "lm_head_cfg": {"layer": "Linear"},
    }
    (folder / "config.json").write_text(_config(model, ssm_cfg=ssm, is_hybrid=False, **cfg))
    own = model.state_dict()
    out: dict[str, Any] = {
        "backbone.embedding.weight": own["backbone.embeddings.weight"].half(),
        "backbone.norm_f.weight": own["backbone.norm_f.weight"].half(),
        "lm_head.weight": own["lm_head.weight"].half(),
    }
    for at in range(c.num_hidden_layers):
        layer, m = f"backbone.layers.{at}", f"backbone.layers.{at}.mixer"
        out[f"{layer}.norm.weight"] = own[f"{layer}.norm.weight"].half()
        out[f"{layer}.norm.output_scale"] = GRIDS["norm"]
        for stage, into, given in (
            ("in_proj", "norm", "in"),
            ("x_proj", "u", "x"),
            ("dt_proj", "x", "dt"),
            ("out_proj", "y", None),
        ):
            codes, scale = _absmax(own[f"{m}.{stage}.weight"])
            codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % 16))
            a = GRIDS[into] / (GRIDS[given] if given else 1.0)
            out |= {f"{m}.{stage}.weight": codes.t(), f"{m}.{stage}.a": torch.tensor([[a]])}
            out |= {f"{m}.{stage}.b": torch.tensor([[scale]]), f"{m}.{stage}.alpha": a * scale}
        for part in ("weight", "bias"):
            codes, scale = _absmax(own[f"{m}.conv1d.{part}"])
            out |= {
                f"{m}.conv1d.{part}": codes.squeeze(1) if part == "weight" else codes,
                f"{m}.conv1d.{part}_scale": scale,
            }
        out |= {f"{m}.conv1d.input_scale": GRIDS["in"], f"{m}.conv1d.output_scale": GRIDS["u"]}
        scan = {
            "u_scale": "u",
            "dt_scale": "dt",
            "B_scale": "x",
            "C_scale": "x",
            "z_scale": "in",
            "ssm_state_scale": "y",
        }
        out |= {f"{m}.selective_scan.{key}": torch.tensor(GRIDS[grid]) for key, grid in scan.items()}
        for theirs, ours, word in (("dt_bias", "dt_proj.bias", "dt_bias"), ("A_log", "A_log", "A"), ("D", "D", "D")):
            codes, scale = _absmax(own[f"{m}.{ours}"])
            out |= {f"{m}.selective_scan.{theirs}": codes, f"{m}.selective_scan.{word}_scale": torch.tensor(scale)}
        out[f"{m}.had.x_H_scale" if hadamard else f"{m}.had.scale"] = GRIDS["y"]
    torch.save(out, folder / "pytorch_model.bin")
    return folder


GRIDS = {"norm": 0.05, "in": 0.04, "u": 0.02, "x": 0.05, "dt": 0.06, "y": 0.03}


def _absmax(weight: torch.Tensor) -> tuple[torch.Tensor, float]:
    scale = float(weight.abs().max()) / 127
    return (weight / scale).round().to(torch.int8), scale
