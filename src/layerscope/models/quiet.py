"""Libraries that talk while they are imported, kept off the page.

    with quiet():
        import transformers

torchao says which of its kernels do not fit this machine, and torch which of torchao's calls are deprecated. With
torchao installed, transformers imports it as soon as one of its models is asked for.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_TALKATIVE = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Let errors of these libraries through, and neither their warnings nor those of Python, until the block ends."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
