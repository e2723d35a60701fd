"""A Hugging Face checkpoint in a local folder, without network, pickle or remote code.

load_checkpoint(Path("checkpoints/llama"))
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerscope.errors import BadModel, MissingExtra, first_line
from layerscope.models.inputs import bytes_as_ids
from layerscope.models.quiet import quiet
from layerscope.models.tokenizer import has_tokenizer, pretrained
from layerscope.models.weight_files import read_weights, weight_files
from layerscope.report.writing import some

if TYPE_CHECKING:
    from layerscope.models.packed import Packing

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")


class Checkpoint(NamedTuple):
    """A model, and how it reads a prompt."""

    model: Any
    folder: Path

    def encode(self, prompt: str) -> dict[str, Any]:
        """Return the prompt as keyword arguments: by the folder's tokenizer, or as bytes without one."""
        main = getattr(self.model, "main_input_name", "input_ids")
        if main != "input_ids":
            raise BadModel(f"{str(self.folder)!r} takes {main}, not text; give --inputs.")
        inputs = self._tokens(prompt)
        accepted = inspect.signature(self.model.forward).parameters
        inputs = {name: tensor for name, tensor in inputs.items() if name in accepted}
        config = self.model.config
        if getattr(config, "is_encoder_decoder", False):
            start = getattr(config, "decoder_start_token_id", None) or 0
            inputs["decoder_input_ids"] = inputs["input_ids"].new_full((1, 1), start)
        return inputs

    def _tokens(self, prompt: str) -> dict[str, Any]:
        config = self.model.config
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary = int(getattr(text_config, "vocab_size", 256))
        if not has_tokenizer(self.folder):
            return {"input_ids": bytes_as_ids(prompt, vocabulary=vocabulary)}
        with _quiet(_transformers(self.folder)):
            tokens = dict(pretrained(self.folder)(prompt, return_tensors="pt"))
        if not tokens["input_ids"].numel():
            raise BadModel(f"--prompt {prompt!r} has no tokens in {str(self.folder)!r}; give a longer one.")
        return tokens


def is_checkpoint(folder: Path) -> bool:
    """Tell whether the folder has the configuration of a Hugging Face model."""
    try:
        return (folder / "config.json").is_file()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load the model with every weight from its safetensors files, or say what stands in the way.

    Weights that are missing are an error: transformers would draw them at random, and a recording of those
    would look like one of the model.
    """
    config = _config(folder)
    _refuse_without_weights(folder)
    if not any(folder.glob("*.safetensors")):
        read_weights(folder)  # says in a sentence what is wrong with a .bin; transformers reads it by the same means
    if "auto_map" in config:
        raise BadModel(
            f"{str(folder)!r} needs the Python code in its own folder (auto_map), which layerscope does not "
            "run; load it yourself in a file.py:function that returns the model."
        )
    transformers = _transformers(folder)
    from layerscope.models.packed import packing_of

    packing = packing_of(config, folder)
    with _quiet(transformers):
        kind = _class_of(config, folder, transformers)
        try:
            model, info = (
                kind.from_pretrained(
                    folder,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=any(folder.glob("*.safetensors")),
                    dtype="auto",
                    output_loading_info=True,
                )
                if packing is None
                else _unpacked(transformers, kind, folder, packing)
            )
        except BadModel:
            raise
        except Exception as error:
            why = f"transformers {transformers.__version__} cannot load it: {first_line(error)}"
            raise BadModel(f"{str(folder)!r}: {why} (LAYERSCOPE_TRACEBACK=1 shows where).") from error
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise BadModel(
            f"{str(folder)!r} lacks the weights {some(missing)} of {type(model).__name__}; "
            "weights drawn at random would mislead. If that is meant, load it yourself in a file.py:function."
        )
    return Checkpoint(model.eval(), folder)


def _unpacked(transformers: Any, kind: Any, folder: Path, packing: Packing) -> tuple[Any, dict[str, Any]]:
    """Load a GPTQ or AWQ checkpoint as the float model that its weights stand for."""
    import torch

    from layerscope.models.packed import Unpacked, unpacked

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    weights, names = unpacked(read_weights(folder), packing, dtype, folder=folder)
    with torch.device("meta"):
        modules = kind(config).named_modules()
    # GPT-2's own kind of Linear has its weight the other way round; quantisers pack it as any other.
    sideways = {f"{name}.weight" for name, module in modules if type(module).__name__ == "Conv1D"}
    for name in sideways.intersection(names):
        weights[name] = weights[name].t().contiguous()
    model, info = kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, local_files_only=True
    )
    left = sorted(info.get("unexpected_keys") or ())
    if set(left) & set(names):
        raise BadModel(f"{str(folder)!r} has a packed weight {left[0]!r}, which {kind.__name__} has no place for.")
    for name in names:
        path, _, last = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:  # transformers has put it together with others
            continue
        weight = Unpacked(module._parameters[last].data, requires_grad=False)
        weight.packing = str(packing)
        module._parameters[last] = weight
    return model, info


def _transformers(folder: Path) -> Any:
    try:
        with quiet():
            return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtra(
            f"{str(folder)!r} is a Hugging Face checkpoint, and transformers is not installed: "
            "pip install layerscope[hf]"
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise BadModel(f"{str(folder / 'config.json')!r} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise BadModel(f"{str(folder / 'config.json')!r} is not a JSON object.")
    return config


def _class_of(config: dict[str, Any], folder: Path, transformers: Any) -> Any:
    names = config.get("architectures") or ["AutoModel"]
    name = names[0] if isinstance(names, list) else names
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if found is transformers.AutoModel:
        return found
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise BadModel(
            f"{str(folder)!r} has the architecture {name!r}, which transformers {transformers.__version__} "
            "does not know; install one that does, or load it yourself in a file.py:function."
        )
    return found


def _refuse_without_weights(folder: Path) -> None:
    if weight_files(folder):
        return
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        raise BadModel(
            f"{str(folder)!r} has its weights only in {pickled[0]}, which could run code when it is loaded; "
            "save them as safetensors (model.save_pretrained(folder))."
        )
    raise BadModel(
        f"{str(folder)!r} has a config.json and no weights; put model.safetensors beside it "
        "(model.save_pretrained(folder))."
    )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' bars and reports off the page while it loads; what matters of them is told by us."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with quiet():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
