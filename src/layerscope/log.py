"""Messages while a user's model runs, to the logger `layerscope`; a handler that raises never reaches the model.

log.warning("%s is not recorded: %s", point, why)
"""

from __future__ import annotations

import logging
from contextlib import suppress

_logger = logging.getLogger("layerscope")


class _Quiet:
    """The logger, without the errors of the handlers and filters that others hang on it."""

    def debug(self, text: str, *args: object) -> None:
        """Log what helps to find a fault."""
        self._say(logging.DEBUG, text, args)

    def warning(self, text: str, *args: object) -> None:
        """Say what is not as asked."""
        self._say(logging.WARNING, text, args)

    def error(self, text: str, *args: object) -> None:
        """Say what is lost."""
        self._say(logging.ERROR, text, args)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (as a Logger calls it)
        """Tell whether a handler would show it."""
        return _logger.isEnabledFor(level)

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        with suppress(Exception):
            _logger.log(level, text, *args, stacklevel=3)


log = _Quiet()
