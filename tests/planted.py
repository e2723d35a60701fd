"""Faults as people really have them, planted in one module of a model that is otherwise right.

    model, blamed = planted(Case("llama", "bf16", "scaled-1.05-weights"))

A fault is planted in float32, as a port goes wrong, and the model is then cast. `blamed` is the module whose
parameters, buffers, attributes, hooks or code were changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from zlib import crc32

import torch
from torch import nn
from torch.nn import functional

import architectures

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Places:
    """Where an architecture keeps what faults are planted in; names are relative to a layer unless they say so."""

    layers: str  # the ModuleList, from the top
    projections: tuple[str, ...]
    norms: tuple[str, ...]
    epsilon: float  # wrong by enough to be seen in bfloat16
    residual: str = ""  # the module whose own code adds it
    attention: str | None = None
    out: str | None = None  # the projection behind the heads
    causal: bool = False
    rotary: str | None = None  # from the top
    dropout: str | None = None  # a Dropout module, or an attention that has a rate of its own
    tokens: bool = True


PLACES = {
    "llama": Places(
        "model.layers",
        ("self_attn.v_proj", "mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj", "mlp.up_proj"),
        ("input_layernorm", "post_attention_layernorm"),
        epsilon=1e-5,
        attention="self_attn",
        out="self_attn.o_proj",
        causal=True,
        rotary="model.rotary_emb",
        dropout="self_attn",
    ),
    "gpt2": Places(
        "transformer.h",
        ("mlp.c_fc", "attn.c_proj", "attn.c_attn", "mlp.c_proj"),
        ("ln_1", "ln_2"),
        epsilon=1e-4,
        attention="attn",
        out="attn.c_proj",
        causal=True,
        dropout="mlp.dropout",
    ),
    "bert": Places(
        "encoder.layer",
        ("output.dense", "attention.self.value", "intermediate.dense", "attention.output.dense"),
        ("attention.output.LayerNorm", "output.LayerNorm"),
        epsilon=1e-2,
        residual="attention.output",
        attention="attention.self",
        out="attention.output.dense",
        dropout="attention.output.dropout",
    ),
    "mamba": Places("backbone.layers", ("mixer.in_proj", "mixer.out_proj", "mixer.x_proj"), ("norm",), epsilon=1e-3),
    "minimax-m2": Places(
        "model.layers",
        ("self_attn.o_proj", "self_attn.v_proj"),
        ("post_attention_layernorm", "input_layernorm"),
        epsilon=1e-5,
        attention="self_attn",
        out="self_attn.o_proj",
        causal=True,
        rotary="model.rotary_emb",
        dropout="self_attn",
    ),
    "t5": Places(
        "decoder.block",
        (
            "layer.2.DenseReluDense.wi",
            "layer.0.SelfAttention.o",
            "layer.1.EncDecAttention.v",
            "layer.2.DenseReluDense.wo",
            "layer.0.SelfAttention.v",
        ),
        ("layer.0.layer_norm", "layer.2.layer_norm", "layer.1.layer_norm"),
        epsilon=3e-2,
        residual="layer.2",
        attention="layer.0.SelfAttention",
        out="layer.0.SelfAttention.o",
        causal=True,
        dropout="layer.2.DenseReluDense.dropout",
    ),
    "vit": Places(
        "layers",
        ("mlp.fc2", "attention.v_proj", "mlp.fc1", "attention.o_proj"),
        ("layernorm_before", "layernorm_after"),
        epsilon=1e-5,
        attention="attention",
        out="attention.o_proj",
        dropout="dropout",
    ),
    "convnet": Places("blocks", ("conv1", "conv2"), ("bn1", "bn2"), epsilon=1e-2, dropout="dropout", tokens=False),
}


@dataclass(frozen=True)
class Spot:
    """One layer of one model, and a number that chooses among what is in it."""

    model: nn.Module
    places: Places
    layer: int
    turn: int

    def name(self, inside: str) -> str:
        return f"{self.places.layers}.{self.layer}" + (f".{inside}" if inside else "")

    def one_of(self, inside: tuple[str, ...]) -> tuple[str, nn.Module]:
        name = self.name(inside[self.turn % len(inside)])
        return name, self.model.get_submodule(name)

    @property
    def projection(self) -> tuple[str, nn.Module]:
        return self.one_of(self.places.projections)


Plant = Callable[[Spot], str]


@dataclass(frozen=True)
class Fault:
    """A way of being wrong; `family` is what the issue calls it, whichever way it came about."""

    name: str
    family: str
    plant: Plant
    needs: Callable[[Places], bool] = lambda places: True
    dtypes: tuple[str, ...] = tuple(DTYPES)  # those in which it has an effect
    backward: bool = False
    random: bool = False


@dataclass(frozen=True)
class Case:
    """A fault in a model of a precision."""

    model: str
    dtype: str
    fault: str

    def __str__(self) -> str:
        return f"{self.model}-{self.dtype}-{self.fault}"

    @property
    def family(self) -> str:
        return BY_NAME[self.fault].family


def planted(case: Case) -> tuple[nn.Module, str]:
    """The faulty model, and the name of the module with the fault."""
    model = architectures.make(case.model)
    blamed = plant(model, case)
    return model.to(DTYPES[case.dtype]), blamed


def plant(model: nn.Module, case: Case, *, layer: int | None = None) -> str:
    """Plant a case's fault in its layer (or in the one that is asked for) and return the module to blame."""
    chosen = crc32(str(case).encode())
    spot = Spot(model, PLACES[case.model], chosen % 3 if layer is None else layer, chosen // 3)
    with torch.no_grad():
        return BY_NAME[case.fault].plant(spot)


# Ways of changing a module ----------------------------------------------------------------------


def output_hooked(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(spot: Spot) -> str:
        name, module = spot.projection
        module.register_forward_hook(lambda module, args, out: change(out))
        return name

    return plant


def input_hooked(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(spot: Spot) -> str:
        name, module = spot.projection
        module.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
        return name

    return plant


def forward_replaced(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(spot: Spot) -> str:
        name, module = spot.projection
        module.forward = MethodType(lambda self, x: change(type(self).forward(self, x)), module)
        return name

    return plant


def subclassed(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(spot: Spot) -> str:
        name, module = spot.projection
        right = type(module)
        module.__class__ = type(right.__name__, (right,), {"forward": lambda self, x: change(right.forward(self, x))})
        return name

    return plant


def weights(change: Callable[[nn.Module], None]) -> Plant:
    def plant(spot: Spot) -> str:
        name, module = spot.projection
        change(module)
        return name

    return plant


# What is changed --------------------------------------------------------------------------------


def scaled(factor: float) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.mul_(factor)

    return change


def new_parameter(factor: float) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        module.weight = nn.Parameter(module.weight * factor)

    return change


def norm_scaled(spot: Spot) -> str:
    name, module = spot.one_of(spot.places.norms)
    module.weight.mul_(1.01)
    return name


def first_outputs(module: nn.Module) -> torch.Tensor:
    """The weight with its outputs along the first axis; a view."""
    return module.weight.T if type(module).__name__ == "Conv1D" else module.weight


def rows_permuted(module: nn.Module) -> None:
    rows = first_outputs(module)
    rows.copy_(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(7))])


def heads_permuted(spot: Spot) -> str:
    """The projection behind the heads expects them in another order."""
    name = spot.name(spot.places.out)
    rows = first_outputs(spot.model.get_submodule(name))
    rows.copy_(torch.cat([rows[:, 12:24], rows[:, 36:], rows[:, :12], rows[:, 24:36]], dim=1))
    return name


def one_row_times_30(module: nn.Module) -> None:
    first_outputs(module)[3] *= 30


def nan_weight(module: nn.Module) -> None:
    first_outputs(module)[2].view(-1)[1] = torch.nan


def epsilon_changed(spot: Spot) -> str:
    name, module = spot.one_of(spot.places.norms)
    setattr(module, "eps" if hasattr(module, "eps") else "variance_epsilon", spot.places.epsilon)
    return name


def epsilon_of_another_norm(spot: Spot) -> str:
    """The norm is another object of the same class, made with another epsilon."""
    name, module = spot.one_of(spot.places.norms)
    size = len(module.weight)
    other = type(module)(size, eps=spot.places.epsilon).eval()
    other.load_state_dict(module.state_dict())
    parent, _, last = name.rpartition(".")
    setattr(spot.model.get_submodule(parent), last, other)
    return name


def grid(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(out: torch.Tensor) -> torch.Tensor:
        step = out.abs().max() / (2 ** (bits - 1) - 1)
        return torch.round(out / step) * step

    return change


def clamped(out: torch.Tensor) -> torch.Tensor:
    bound = out.detach().float().abs().flatten().quantile(0.97).to(out.dtype)
    return out.clamp(-bound, bound)


def through(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: out.to(dtype).to(out.dtype)


def nan_in_one_token(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[0, 5, 0] = torch.nan
    return out


def last_token_dropped(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:, :-1], torch.zeros_like(out[:, -1:])], dim=1)


def shifted(out: torch.Tensor) -> torch.Tensor:
    return out.roll(1, dims=1)


def rope_buffer(spot: Spot) -> str:
    """The inverse frequencies belong to another base."""
    rotary = spot.model.get_submodule(spot.places.rotary)
    rotary.inv_freq.copy_(rotary.inv_freq ** (torch.tensor(500_000.0).log() / torch.tensor(10_000.0).log()))
    return spot.places.rotary


def rope_forward(spot: Spot) -> str:
    """Positions are counted in steps of two; a mere shift of all would be no fault, as only distances matter."""
    rotary = spot.model.get_submodule(spot.places.rotary)
    right = type(rotary).forward
    rotary.forward = MethodType(lambda self, x, position_ids: right(self, x, position_ids * 2), rotary)
    return spot.places.rotary


def attention_scale(spot: Spot) -> str:
    """A scale of 1 / d where the square root was meant; 1 / sqrt(d) where there is none."""
    name = spot.name(spot.places.attention)
    module = spot.model.get_submodule(name)
    module.scaling = 12**-0.5 if module.scaling == 1 else module.scaling**2
    return name


def attention_unscaled(spot: Spot) -> str:
    """No scale at all, or a second one, by a forward that sets it for itself."""
    name = spot.name(spot.places.attention)
    module = spot.model.get_submodule(name)
    right = type(module)

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        before = self.scaling
        self.scaling = 1.0 if before != 1 else 0.5
        try:
            return right.forward(self, *args, **kwargs)
        finally:
            self.scaling = before

    module.__class__ = type(right.__name__, (right,), {"forward": forward})
    return name


def one_later(mask: torch.Tensor) -> torch.Tensor:
    """Every query sees one key more."""
    return torch.cat([torch.zeros_like(mask[..., :1]), mask[..., :-1]], dim=-1)


def mask_hooked(spot: Spot) -> str:
    name = spot.name(spot.places.attention)
    key = "mask" if "SelfAttention" in name else "attention_mask"

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return args, {**kwargs, key: one_later(kwargs[key])}

    spot.model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    return name


def mask_in_forward(spot: Spot) -> str:
    name = spot.name(spot.places.attention)
    key = "mask" if "SelfAttention" in name else "attention_mask"
    module = spot.model.get_submodule(name)
    right = type(module).forward
    module.forward = MethodType(lambda self, *a, **k: right(self, *a, **{**k, key: one_later(k[key])}), module)
    return name


def without_residual(spot: Spot) -> str:
    """The layer's code, written again, forgets one sum."""
    name = spot.name(spot.places.residual)
    layer = spot.model.get_submodule(name)
    layer.__class__ = type(type(layer).__name__, (type(layer),), {"forward": _NO_RESIDUAL[type(layer).__name__]})
    return name


def _decoder(self: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
    hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def _gpt2(self: nn.Module, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    kwargs = {key: value for key, value in kwargs.items() if not key.startswith("encoder_")}
    mask = {"past_key_values": args[0], "attention_mask": args[1]} if args else {}
    hidden_states = self.attn(self.ln_1(hidden_states), **mask, **kwargs)[0] + hidden_states
    return self.mlp(self.ln_2(hidden_states))


def _bert(self: nn.Module, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    return self.LayerNorm(self.dropout(self.dense(hidden_states)))


def _mamba(self: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return self.mixer(self.norm(hidden_states.to(self.norm.weight.dtype)), **kwargs)


def _t5(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return self.dropout(self.DenseReluDense(self.layer_norm(hidden_states)))


def _vit(self: nn.Module, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    hidden_states = self.dropout(self.attention(self.layernorm_before(hidden_states), *args, **kwargs)[0])
    return self.dropout(self.mlp(self.layernorm_after(hidden_states))) + hidden_states


def _conv(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.act(self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))))


_NO_RESIDUAL = {
    "LlamaDecoderLayer": _decoder,
    "MiniMaxM2DecoderLayer": _decoder,
    "GPT2Block": _gpt2,
    "BertSelfOutput": _bert,
    "MambaBlock": _mamba,
    "T5LayerFF": _t5,
    "ViTLayer": _vit,
    "ConvBlock": _conv,
}


def layers_swapped(spot: Spot) -> str:
    """Two entries of the list of layers have changed places; the later ones, as T5's first is made otherwise."""
    layers = spot.model.get_submodule(spot.places.layers)
    layers[1], layers[2] = layers[2], layers[1]
    return f"{spot.places.layers}.1"


def weights_of_layers_swapped(spot: Spot) -> str:
    """The checkpoint's layers were loaded into each other's places."""
    layers = spot.model.get_submodule(spot.places.layers)
    one, other = ({k: v.clone() for k, v in layers[i].state_dict().items()} for i in (1, 2))
    layers[1].load_state_dict(other)
    layers[2].load_state_dict(one)
    return f"{spot.places.layers}.1"


def dropout_on(spot: Spot) -> str:
    name = "dropout" if spot.places.layers == "blocks" else spot.name(spot.places.dropout)
    module = spot.model.get_submodule(name)
    module.training = True
    if not isinstance(module, nn.Dropout):
        module.attention_dropout = 0.1
    return name


def gradient_hooked(spot: Spot) -> str:
    name, module = spot.projection
    module.register_full_backward_hook(lambda module, grad_in, grad_out: tuple(g * 1.3 for g in grad_in))
    return name


class _Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.3


def _attends(places: Places) -> bool:
    return places.attention is not None


def _causal(places: Places) -> bool:
    return places.causal


def _rotates(places: Places) -> bool:
    return places.rotary is not None


def _has_tokens(places: Places) -> bool:
    return places.tokens


def _drops(places: Places) -> bool:
    return places.dropout is not None


def _louder(out: torch.Tensor) -> torch.Tensor:
    return _Louder.apply(out)


def _dropped_out(out: torch.Tensor) -> torch.Tensor:
    return functional.dropout(out, 0.1, training=True)


FAULTS = (
    Fault("scaled-1.05-weights", "scaled", weights(scaled(1.05))),
    Fault("scaled-1.01-parameter", "scaled", weights(new_parameter(1.01))),
    Fault("scaled-1.003-weights", "scaled", weights(scaled(1.003))),
    Fault("scaled-1.01-norm", "scaled", norm_scaled),
    Fault("permuted-rows", "rows", weights(rows_permuted)),
    Fault("permuted-heads", "rows", heads_permuted, needs=_attends),
    Fault("row-times-30", "rows", weights(one_row_times_30)),
    Fault("epsilon-attribute", "epsilon", epsilon_changed),
    Fault("epsilon-module", "epsilon", epsilon_of_another_norm),
    Fault("grid-int8-hook", "grid", output_hooked(grid(8))),
    Fault("grid-int4-forward", "grid", forward_replaced(grid(4))),
    Fault("saturated-output", "saturated", output_hooked(clamped)),
    Fault("saturated-input", "saturated", input_hooked(clamped)),
    Fault("roundtrip-fp16", "roundtrip", output_hooked(through(torch.float16)), dtypes=("fp32",)),
    Fault("roundtrip-bf16", "roundtrip", forward_replaced(through(torch.bfloat16)), dtypes=("fp32", "fp16")),
    Fault("roundtrip-fp8", "roundtrip", subclassed(through(torch.float8_e4m3fn))),
    Fault("nan-output", "nan", output_hooked(nan_in_one_token)),
    Fault("nan-weight", "nan", weights(nan_weight)),
    Fault("dropped-token-output", "tokens", output_hooked(last_token_dropped), needs=_has_tokens),
    Fault("shifted-tokens-output", "tokens", forward_replaced(shifted), needs=_has_tokens),
    Fault("shifted-tokens-input", "tokens", input_hooked(shifted), needs=_has_tokens),
    Fault("rope-buffer", "rope", rope_buffer, needs=_rotates),
    Fault("rope-positions", "rope", rope_forward, needs=_rotates),
    Fault("attention-scale-attribute", "attention-scale", attention_scale, needs=_attends),
    Fault("attention-scale-subclass", "attention-scale", attention_unscaled, needs=_attends),
    Fault("mask-hook", "mask", mask_hooked, needs=_causal),
    Fault("mask-forward", "mask", mask_in_forward, needs=_causal),
    Fault("residual-missing", "residual", without_residual),
    Fault("swapped-modules", "swapped", layers_swapped),
    Fault("swapped-weights", "swapped", weights_of_layers_swapped),
    Fault("dropout-module", "dropout", dropout_on, needs=_drops, random=True),
    Fault("dropout-hook", "dropout", output_hooked(_dropped_out), random=True),
    Fault("gradient-hook", "gradient", gradient_hooked, backward=True),
    Fault("gradient-function", "gradient", subclassed(_louder), backward=True),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def every_case() -> list[Case]:
    """The whole product, less what has no meaning in a model or no effect in a precision."""
    return [
        Case(model, dtype, fault.name)
        for model in architectures.EVERY
        for dtype in DTYPES
        for fault in FAULTS
        if fault.needs(PLACES[model]) and dtype in fault.dtypes
    ]


def pairs(case: Case) -> Iterator[tuple[str, str]]:
    """What a case covers: its kind of fault in its model, its way in its precision, and the two together."""
    yield case.model, case.family
    yield case.dtype, case.fault
    yield case.model, case.dtype


def cover() -> list[Case]:
    """Cases that cover every pair: each time one that adds most, of the model and precision had least so far."""
    left = every_case()
    wanted = {pair for case in left for pair in pairs(case)}
    had: Counter[str] = Counter()
    chosen = []
    while wanted:
        best = max(left, key=lambda case: (len(wanted.intersection(pairs(case))), -had[case.model], -had[case.dtype]))
        wanted.difference_update(pairs(best))
        had.update([best.model, best.dtype])
        chosen.append(best)
    return chosen
