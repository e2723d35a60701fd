"""MODEL on a command line, made into a live model and what to call it with.

loaded = load_model("file.py:make", seed=0)
for inputs in loaded.batches(prompt="hello"):
    loaded.model(*inputs.args, **inputs.kwargs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerscope.errors import BadModel
from layerscope.models.functions import function_at, is_function
from layerscope.models.huggingface import is_checkpoint, load_checkpoint
from layerscope.models.inputs import DEFAULT_PROMPT, FORMS, Inputs, batches_of, bytes_as_ids, read_inputs
from layerscope.runtimes.model_files import SUFFIXES, is_file, kind_of, opened

if TYPE_CHECKING:
    import torch


class BuiltIn(NamedTuple):
    """A model that comes with layerscope; `build` imports what it needs when it is called."""

    build: Callable[[int], torch.nn.Module]
    about: str
    takes_weights: bool = False  # of a checkpoint folder, in place of its own


def _tiny_transformer(seed: int) -> torch.nn.Module:
    from layerscope.models.tiny import tiny_transformer

    return tiny_transformer(seed=seed)


def _quamba_small(seed: int) -> torch.nn.Module:
    from layerscope.models.mamba.built_in import quamba_small

    return quamba_small()


def _quamba_130m(seed: int) -> torch.nn.Module:
    from layerscope.models.mamba.built_in import quamba_130m

    return quamba_130m(seed=seed)


def _minimax_m2(seed: int) -> torch.nn.Module:
    from layerscope.models.minimax import minimax_m2

    return minimax_m2(seed=seed)


BUILT_IN: dict[str, BuiltIn] = {
    "tiny-transformer": BuiltIn(_tiny_transformer, "8 decoder layers over bytes, weights drawn from the seed"),
    "quamba-small": BuiltIn(
        _quamba_small, "Mamba over bytes, 24 layers, 128 wide, trained; the seed changes nothing", takes_weights=True
    ),
    "quamba-130m-w8a8": BuiltIn(
        _quamba_130m, "Mamba over bytes, 24 layers, 768 wide, weights drawn from the seed", takes_weights=True
    ),
    "minimax-m2": BuiltIn(_minimax_m2, "mixture of experts over bytes, 62 layers, 64 wide, drawn from the seed"),
    "minimax-m2-tiny": BuiltIn(_minimax_m2, "another name of minimax-m2"),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, where it came from, and how to call it by default."""

    name: str
    model: Any  # a torch.nn.Module, or what a file of a compiled one holds
    seed: int
    given: object = None  # the inputs its function returned with it
    encode: Callable[[str], object] | None = None  # how it reads a prompt
    speaks: bool = False  # it takes text, so that a default prompt makes sense

    def batches(self, *, inputs: str | None = None, prompt: str | None = None) -> Iterator[Inputs]:
        """Yield the arguments of each forward: `inputs` names a file or function, `prompt` is text.

        The random state is seeded first, so that inputs drawn at random are the same for every model.
        """
        import torch

        if inputs is not None and prompt is not None:
            raise BadModel("--inputs and --prompt are two ways to say one thing; give one of them.")
        torch.manual_seed(self.seed)
        if inputs is not None:
            return batches_of(read_inputs(inputs))
        if prompt is not None or (self.given is None and self.speaks):
            text = DEFAULT_PROMPT if prompt is None else prompt
            return batches_of((self.encode or bytes_as_ids)(text))
        if self.given is None:
            raise BadModel(
                f"{self.name!r} came without inputs; return (model, inputs) from the function, "
                f"or give --prompt TEXT or --inputs {FORMS}."
            )
        return batches_of(self.given)


def is_model(text: str) -> bool:
    """Tell whether the text has one of the forms of a MODEL, without loading it."""
    return text in BUILT_IN or is_function(text) or is_checkpoint(Path(text)) or is_file(text)


def load_model(text: str, *, seed: int = 0) -> Loaded:
    """Return the model that `text` names: a built-in, a function's, a local Hugging Face checkpoint's, or a file's.

    A folder may also be one that `compiled.save(folder)` wrote.
    """
    import torch

    torch.manual_seed(seed)
    if text in BUILT_IN:
        return Loaded(text, BUILT_IN[text].build(seed), seed, encode=bytes_as_ids, speaks=True)
    if is_function(text):
        return _from_function(text, seed)
    folder = Path(text)
    if is_checkpoint(folder):
        from layerscope.models.mamba.checkpoint import is_state_spaces

        if is_state_spaces(folder):
            return load_own_mamba(text, folder, seed=seed)
        checkpoint = load_checkpoint(folder)
        return Loaded(text, checkpoint.model, seed, encode=checkpoint.encode, speaks=True)
    if folder.suffix.lower() in SUFFIXES and folder.is_file():
        return Loaded(text, opened(folder), seed)
    if kind_of(folder) == "compiled":
        from layerscope.compile_taps import load_compiled

        return Loaded(text, load_compiled(folder), seed)
    raise BadModel(f"{text!r} {_why_not(folder)}; {_forms(text)}")


def load_own_mamba(name: str, folder: Path, *, seed: int) -> Loaded:
    """Return the Mamba of a folder as layerscope's own, whose prompts its tokenizer reads where there is one."""
    import torch

    from layerscope.models.mamba.checkpoint import load_mamba
    from layerscope.models.tokenizer import tokens_of

    model, tokens = load_mamba(folder), tokens_of(folder)

    def encode(prompt: str) -> dict[str, torch.Tensor]:
        if tokens is None:
            return {"input_ids": bytes_as_ids(prompt, vocabulary=model.config.vocab_size)}
        ids = tokens(prompt)
        if not ids:
            raise BadModel(f"--prompt {prompt!r} has no tokens in {str(folder)!r}; give a longer one.")
        return {"input_ids": torch.tensor([ids])}

    return Loaded(name, model, seed, encode=encode, speaks=True)


def _from_function(text: str, seed: int) -> Loaded:
    import torch

    made: Any = function_at(text)()
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"{text!r} returned {_described(made)}; it should return a torch.nn.Module, or (model, inputs).")
    return Loaded(text, model, seed, given=given)


def _described(made: object) -> str:
    if isinstance(made, tuple):
        return f"a tuple of ({', '.join(type(m).__name__ for m in made)})"
    return "None" if made is None else f"a {type(made).__name__}"


def _why_not(path: Path) -> str:
    try:
        if (path / "run.json").is_file():
            return "is a run, not a model (`layerscope show` and `layerscope points` read it)"
        if path.is_dir():
            return "is a folder without a config.json or a taps.json"
        if path.is_file():
            return f"is a {path.suffix or 'nameless kind of'} file, which layerscope cannot make a model of"
    except (OSError, ValueError):
        pass
    return "is not a model layerscope can find"


def _forms(text: str) -> str:
    near = get_close_matches(text, BUILT_IN, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"{meant}A MODEL is a built-in name ({', '.join(BUILT_IN)}), file.py:function, "
        "package.module:function, a local Hugging Face checkpoint folder, a file "
        "(TorchScript .pt, .pt2 of torch.export, .onnx), or a folder that a compiled model was saved to."
    )
