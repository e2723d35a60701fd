"""Every error layerscope raises, in one small tree.

    LayerscopeError
    ├── BadText          (ValueError)        a pattern, schedule, point or moment that does not parse
    ├── NoSuchPoint      (LookupError)       a pattern or name that matches nothing
    ├── NoSuchMode       (LookupError)       a mode that the model has not
    ├── Ambiguous        (LookupError)       a name that several leaves or moments answer to
    ├── NothingRecorded  (RuntimeError)      forwards ran, and no expected tap fired
    ├── Incomplete       (RuntimeError)      on_error="raise": something asked for is missing
    ├── Stopped          (RuntimeError)      a rule that watches training said stop
    ├── Unsupported      (TypeError)         a dtype, layout or model that is refused, with the reason
    ├── MissingExtra     (ImportError)       an optional library, with its install line
    ├── BadModel         (ValueError)        MODEL or --inputs that cannot be made into one
    ├── Incomparable     (ValueError)        runs that have nothing in common to compare
    ├── NotARun          (ValueError)        a path that holds no run
    ├── NewerFormat      (NotARun)           a run written by a later layerscope
    ├── RunExists        (FileExistsError)   `to=` names a run that is already there
    ├── RunBusy          (RuntimeError)      another process is writing this rank of this run
    └── Damaged          (OSError)           bytes that are not what was written

The message is written for the person who reads it: what was asked, what there is, what to do.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, to be part of a sentence; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class LayerscopeError(Exception):
    """The root: `except LayerscopeError` catches what this package raises on purpose."""


class BadText(LayerscopeError, ValueError):
    """A pattern, schedule, point or moment that does not parse."""


class NoSuchPoint(LayerscopeError, LookupError):
    """A pattern or name that matches nothing."""


class NoSuchMode(LayerscopeError, LookupError):
    """A mode that the model has not; the message lists those it has."""


class Ambiguous(LayerscopeError, LookupError):
    """A name that several leaves or moments answer to; the message lists them."""


class NothingRecorded(LayerscopeError, RuntimeError):
    """Forwards ran, and no expected tap fired."""


class Incomplete(LayerscopeError, RuntimeError):
    """Something asked for is missing, and the caller chose `on_error="raise"`."""


class Stopped(LayerscopeError, RuntimeError):
    """A rule that watches training said stop; the message is its alarm."""


class Unsupported(LayerscopeError, TypeError):
    """A dtype, layout or model that is refused, with the reason and the way out."""


class MissingExtra(LayerscopeError, ImportError):
    """An optional library is not installed; the message has the install line."""


class BadModel(LayerscopeError, ValueError):
    """MODEL or --inputs that cannot be made into a model or its inputs."""


class Incomparable(LayerscopeError, ValueError):
    """Runs that have nothing in common to compare, with the reason for each."""


class NotARun(LayerscopeError, ValueError):
    """A path that holds no run."""


class NewerFormat(NotARun):
    """A run written by a later layerscope than this one."""


class RunExists(LayerscopeError, FileExistsError):
    """`to=` names a run that is already there, and `append=True` was not given."""


class RunBusy(LayerscopeError, RuntimeError):
    """Another process is writing this rank of this run."""


class Damaged(LayerscopeError, OSError):
    """Bytes that are not what was written: a failed checksum, a truncated file."""
