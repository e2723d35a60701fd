"""What a mode does to the quality of a language model: perplexity, next-token agreement, KL divergence, layer errors.

    windows = windows_of(ids, 512)
    evaluate(model, "int8-dynamic", windows).perplexity
    perplexity(model, windows)              # exp of the loss that transformers gives with labels=input_ids

The text is cut into windows, each read from its beginning, and every token but the first of a window is predicted from
those before it. All figures are of the same predictions, against the model as it was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from layerscope.errors import BadText, LayerscopeError, Unsupported
from layerscope.models import Inputs, Loaded
from layerscope.models.inputs import bytes_as_ids
from layerscope.modes.feeding import fitted
from layerscope.modes.layer_taps import stack_of
from layerscope.modes.mode_runs import plain_forward
from layerscope.modes.registry import Mode, Setting, choose, variant
from layerscope.progress import Progress
from layerscope.runtimes.values import leaves

WINDOW = 512  # tokens read at once by default; fewer where the model has no room for them
BYTES = 256
CHUNK = 64  # positions whose distributions are in float64 at once
FORESEEN = 0.1  # of the logits may change with what comes later, by rounding


@dataclass(frozen=True, slots=True)
class Quality:
    """What one mode does, over all predicted tokens.

    `agreement` is the share of predictions whose most likely token is the model's own; `divergence` is KL(model ||
    mode) in nats per token; `layers` are relative L2 errors of the outputs of the decoder layers, by depth.
    """

    mode: str
    tokens: int
    perplexity: float
    agreement: float
    divergence: float
    layers: Mapping[str, float]

    @property
    def last(self) -> float:
        """The relative L2 error of the last decoder layer."""
        return list(self.layers.values())[-1]


def evaluate(
    model: nn.Module,
    mode: Mode | str,
    windows: Sequence[torch.Tensor],
    *,
    setting: Setting | None = None,
    progress: Progress | None = None,
) -> Quality:
    """Run a model and one of its modes on the same windows of token ids; see `Quality`.

    The model runs beside its variant, a window at a time: what is in memory does not grow with the text.
    """
    one = choose([mode], model).modes[0] if isinstance(mode, str) else mode
    other = variant(model, one, setting)
    names = stack_of(model)
    agreed, divergence, loss, tokens = 0, 0.0, 0.0, 0
    off, size = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for at, window in enumerate(windows):
        if progress is not None:
            progress(f"{one.name}: window {at}", at, len(windows))
        with layer_outputs(model, names) as wanted:
            reference = _logits(model, window)
        with layer_outputs(other, names) as got:
            logits = _logits(other, window)
        for name in names:
            off[name] += _square(got[name].double() - wanted[name].double())
            size[name] += _square(wanted[name].double())
        count = window.shape[1] - 1
        tokens += count
        loss += count * _loss(logits, window)
        for p, q in zip(torch.split(reference[0, :-1], CHUNK), torch.split(logits[0, :-1], CHUNK), strict=True):
            agreed += int((p.argmax(-1) == q.to(p.device).argmax(-1)).sum())
            mine, theirs = p.double().log_softmax(-1), q.to(p.device).double().log_softmax(-1)
            divergence += float(F.kl_div(theirs, mine, reduction="sum", log_target=True))
    return Quality(
        one.name,
        tokens,
        _exp(loss / tokens),
        agreed / tokens,
        divergence / tokens,
        {name: math.sqrt(off[name] / size[name]) if size[name] else float(off[name] > 0) for name in names},
    )


def perplexity(model: nn.Module, windows: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None) -> float:
    """Return the perplexity of a model on windows of token ids: exp of the mean loss of all predicted tokens."""
    counts = [window.shape[1] - 1 for window in windows]
    losses = [_loss(_logits(model, window, dtype=dtype), window) for window in windows]
    return _exp(sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts))


# The text ---------------------------------------------------------------------------------------


def text_of(given: str) -> str:
    """Return the text of a file, or the text itself; one word that is no file is taken for a mistyped name."""
    path = Path(given)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # too long for a name, or a NUL in it
        is_file = False
    if not is_file:
        if not given.strip() or not any(letter.isspace() for letter in given.strip()):
            raise BadText(
                f"--evaluate {given!r} is not a file, and no text to predict the words of; give a text file, or a text."
            )
        return given
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BadText(f"--evaluate {given!r} is not text in UTF-8 (byte {error.start}); give a text file.") from error


def ids_of(loaded: Loaded, text: str) -> torch.Tensor:
    """Return the text as the token ids of a model, (1, length): by its own tokenizer, or bytes where 256 are known.

    Raises Unsupported where the model is none that predicts the next token, or reads bytes as if they were tokens.
    """
    try:
        inputs = Inputs.of((loaded.encode or bytes_as_ids)(text))
    except Exception as error:
        if text:
            raise
        raise BadText("--evaluate has no text in it; give a text file, or a text.") from error
    ids = inputs.kwargs["input_ids"] if inputs.kwargs else inputs.args[0]
    assert isinstance(ids, torch.Tensor)
    if ids.shape[1] < 2:
        raise BadText(f"--evaluate is {ids.shape[1]} token long, and the first is given: there is none to predict.")
    _refuse_unlike(loaded, ids, text)
    return ids


def windows_of(ids: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Cut ids, (1, N), into windows of `length`; one token that is left over predicts nothing and is left out."""
    if length < 2:
        raise BadText("a window of 1 token predicts nothing; give --calib_seqlen 2 or more.")
    return [window for window in torch.split(ids, length, dim=1) if window.shape[1] > 1]


def window_of(model: nn.Module) -> int:
    """Return how many tokens a model reads at once: 512, or what it has positions for."""
    config = getattr(model, "config", None)
    room = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return min(WINDOW, room) if isinstance(room, int) and room > 1 else WINDOW


def _refuse_unlike(loaded: Loaded, ids: torch.Tensor, text: str) -> None:
    """Refuse a model that sees what it is to predict, and bytes where tokens are meant."""
    few = ids[:, : min(ids.shape[1], 64, window_of(loaded.model))]
    config = getattr(loaded.model, "config", None)
    known = getattr(config, "vocab_size", None)
    if isinstance(known, int) and known != BYTES and torch.equal(ids, bytes_as_ids(text, vocabulary=known)):
        raise Unsupported(_needs_a_tokenizer(loaded, known))
    try:
        whole = _logits(loaded.model, few)
    except LayerscopeError:
        raise
    except Exception as error:
        raise Unsupported(
            f"{loaded.name!r} does not run on token ids: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if whole.shape[-1] != BYTES and torch.equal(ids, bytes_as_ids(text)):
        raise Unsupported(_needs_a_tokenizer(loaded, whole.shape[-1]))
    half = _logits(loaded.model, few[:, : few.shape[1] // 2])
    seen = whole[:, : half.shape[1]].double()
    if _square(half.double() - seen) > FORESEEN**2 * _square(seen):
        raise Unsupported(
            f"{loaded.name!r} sees the tokens after the one it is to predict: its logits change with them; perplexity "
            "is of models that read from left to right."
        )


def _needs_a_tokenizer(loaded: Loaded, vocabulary: int) -> str:
    return (
        f"{loaded.name!r} knows {vocabulary:,} tokens and came without a tokenizer, and the bytes of a text are "
        "not its tokens; put tokenizer.json and tokenizer_config.json into the checkpoint folder."
    )


# Running ----------------------------------------------------------------------------------------


@contextmanager
def layer_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Fill a dict with the first floating-point tensor that each of these modules gives, until the block ends."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, output: object) -> None:
        tensors = (tensor for _, tensor in leaves(output) if tensor.is_floating_point())
        found[name] = next(tensors).detach().clone()

    with ExitStack() as stack:
        for name in names:
            hook = model.get_submodule(name).register_forward_hook(lambda _m, _a, out, name=name: keep(name, out))
            stack.callback(hook.remove)
        yield found


def _logits(model: nn.Module, window: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Run a window; return the logits, (1, length, vocabulary)."""
    output = plain_forward(model, fitted(Inputs((window,)), model, dtype=dtype))
    found = {path: tensor for path, tensor in leaves(output) if tensor.is_floating_point()}
    logits = found.get(("logits",), next(iter(found.values()), None))
    if logits is None or logits.dim() != 3 or logits.shape[:2] != window.shape or logits.shape[2] <= int(window.max()):
        got = "no tensor" if logits is None else f"one of {list(logits.shape)}"
        raise Unsupported(
            f"{type(model).__name__} gives no logits of the next token: for {window.shape[1]} token ids up to "
            f"{int(window.max())} it returns {got}, not (1, {window.shape[1]}, vocabulary)."
        )
    return logits


def _loss(logits: torch.Tensor, window: torch.Tensor) -> float:
    """Return the mean loss of a window, computed as transformers does: in float32."""
    return float(F.cross_entropy(logits[0, :-1].float(), window[0, 1:].to(logits.device)))


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum())


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
