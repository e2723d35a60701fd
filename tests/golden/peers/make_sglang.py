"""Makes the SGLang dump of this folder with SGLang's own `dumper.py`, and beside it what plain torch hooks saw.

    pip download sglang==0.5.23 --no-deps && unzip sglang-*.whl -d unpacked
    python make_sglang.py unpacked /tmp/peers

The dumper is one file of SGLang; the rest of the package needs a GPU, and the names that the file imports from it (the
HTTP control of a server, the parallel state) are stood in for by empty modules. The file itself runs unchanged.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections import Counter
from pathlib import Path

import torch
from torch import nn

EMPTY = {
    "zmq": (),
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.managers": (),
    "sglang.srt.managers.io_struct": ("sock_recv", "sock_send", "wrap_as_pickle"),
    "sglang.srt.runtime_context": ("get_parallel", "get_server_args", "get_serving"),
    "sglang.srt.utils": ("get_device",),
}


def nobody(name, value, **tags):
    """Stands for a dump where there is none."""


class Layer(nn.Module):
    """Gives two tensors, and has a module that is called `output`."""

    def __init__(self):
        super().__init__()
        self.output = nn.Linear(4, 4, bias=False)

    def forward(self, x, *, scale):
        return self.output(x) * scale, x


class Tiny(nn.Module):
    """Dumps a tensor twice under one name; the second is not used, and has no gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x, tell=nobody):
        x, _ = self.layers[0](x, scale=torch.tensor(2.0, dtype=torch.bfloat16))
        tell("residual", x, dims="s h", layer_id=3)
        tell("residual", x + 1, dims="s h", layer_id=3)
        return x * x


def model():
    torch.manual_seed(0)
    return Tiny()


def inputs():
    return torch.arange(8.0).reshape(2, 4)


def seen_by_hooks():
    """Return what the first step computes, by the point and call that a reader should find it under."""
    tiny, seen, calls = model(), {}, Counter()

    def keep(name, value):
        seen[name] = value.detach().clone()

    def layer(_, args, kwargs, output):
        keep("layers.0:input[0] call=0", args[0])
        keep("layers.0:input[scale] call=0", kwargs["scale"])
        keep("layers.0:output[0] call=0", output[0])
        keep("layers.0:output[1] call=0", output[1])

    def linear(_, args, output):
        keep("layers.0.output:input[0] call=0", args[0])
        keep("layers.0.output:output call=0", output)

    def tell(name, value, *, layer_id, dims):
        keep(f"layers.{layer_id}.{name}:output call={calls[name]}", value)
        if not calls[name]:
            value.register_hook(lambda grad: keep(f"layers.{layer_id}.{name}:grad_output call=0", grad))
        calls[name] += 1

    tiny.layers[0].register_forward_hook(layer, with_kwargs=True)
    tiny.layers[0].output.register_forward_hook(linear)
    output = tiny(inputs(), tell)
    output.sum().backward()
    return {
        **seen,
        ".:input[0] call=0": inputs(),
        ".:output call=0": output.detach(),
        "logits:output call=0": torch.ones(3),
    }


def dumper_of(unpacked):
    for name, members in EMPTY.items():
        module = types.ModuleType(name)
        module.__dict__.update(dict.fromkeys(members))
        sys.modules.setdefault(name, module)
    path = Path(unpacked) / "sglang" / "srt" / "debug_utils" / "dumper.py"
    name = "sglang.srt.debug_utils.dumper"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dumper


def dump(unpacked, folder):
    dumper, tiny = dumper_of(unpacked), model()

    def tell(name, value, **tags):
        dumper.configure(enable_grad=True)
        dumper.dump(name, value, **tags)
        dumper.configure(enable_grad=False)

    dumper.configure(enable=True, enable_output_console=False, non_intrusive_mode="all")
    dumper.configure(dir=str(folder), exp_name="dump_tiny")
    dumper.register_non_intrusive_dumper(tiny)
    tiny.forward(inputs(), tell).sum().backward()
    dumper.dump("rids", ["a", "b"])
    dumper.configure(enable_model_value=True)
    dumper.dump_model(tiny)
    dumper.step()
    dumper.dump("logits", torch.ones(3), phase="decode")


def main():
    from safetensors.torch import save_file

    unpacked, folder = sys.argv[1:]
    dump(unpacked, folder)
    save_file(seen_by_hooks(), Path(folder) / "expected.safetensors")


if __name__ == "__main__":
    main()
