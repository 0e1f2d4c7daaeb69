"""Every error that FoveaKV raises on purpose. Each message says what to do next."""

from __future__ import annotations


class FoveaKVError(Exception):
    """Base class, so that callers can catch everything that this library raises on purpose."""


class BudgetError(FoveaKVError, ValueError):
    """A budget that cannot be read or that leaves nothing to keep."""


class MethodError(FoveaKVError, ValueError):
    """An unknown method, an unknown option, or an option value that makes no sense."""


class NoVisualTokensError(FoveaKVError, ValueError):
    """A method that only drops visual tokens met a prompt that has none."""


class UnsupportedModelError(FoveaKVError, NotImplementedError):
    """A model whose attention cannot be compressed correctly."""


class UnsupportedModeError(FoveaKVError, NotImplementedError):
    """A generation mode or cache operation that cannot be combined with the method in use."""


class CacheInUseError(FoveaKVError, RuntimeError):
    """A cache, session or method object was used with a model, or in a place, that it does not belong to."""


class InputError(FoveaKVError, ValueError):
    """A prompt or an image that cannot be used: missing file, corrupt picture, wrong number of image tokens."""


class OutputError(FoveaKVError, OSError):
    """A file that cannot be written: a full disk, a read-only or missing folder, a folder in place of a file."""


class StoreError(FoveaKVError, OSError):
    """The backing store on disk cannot be written."""


class MissingDependencyError(FoveaKVError, ImportError):
    """An optional package is needed and not installed; the message has the command that installs it."""


class ModelLoadError(FoveaKVError, RuntimeError):
    """A model could not be found, verified, assembled or loaded."""
