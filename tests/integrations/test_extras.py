"""Without its library, the file of a training loop says its install line; without any, the package can be looked at."""

import importlib
import subprocess
import sys

import pytest

from layerscope.errors import MissingExtra


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("huggingface", "transformers", "hf"),
        ("lightning", "lightning", "lightning"),
        ("accelerate", "accelerate", "accelerate"),
    ],
)
def test_the_missing_library_is_named_with_its_install_line(name, library, extra, without, monkeypatch):
    without(library)
    monkeypatch.delitem(sys.modules, f"layerscope.integrations.{name}", raising=False)
    with pytest.raises(MissingExtra, match=rf"pip install 'layerscope\[{extra}\]'"):
        importlib.import_module(f"layerscope.integrations.{name}")


def test_importing_the_package_and_the_sinks_imports_no_library():
    names = "tensorboard, layerscope.integrations.wandb, layerscope.integrations.parquet"
    code = f"import sys, layerscope.integrations, layerscope.integrations.{names}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "tensorboard", "wandb", "pyarrow", "pandas", "lightning"} & set(done.stdout.split())
