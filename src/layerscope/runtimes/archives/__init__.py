"""What a TorchScript or .pt2 file says of its modules, read from its archive without torch and without running it."""

from layerscope.runtimes.archives.exports import read_export
from layerscope.runtimes.archives.scripts import read_script

__all__ = ["read_export", "read_script"]
