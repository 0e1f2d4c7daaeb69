"""Exceptions raised by FoveaKV. Every message says what to do next."""

from __future__ import annotations

from typing import Any


class FoveaKVError(Exception):
    """Base class of all exceptions that FoveaKV raises."""


class BudgetError(FoveaKVError, ValueError):
    """The budget cannot be parsed, or it is too small to keep anything."""


class MethodError(FoveaKVError, ValueError):
    """The method or one of its options is unknown, or the value of an option is invalid."""


class NoVisualTokensError(FoveaKVError, ValueError):
    """The prompt has no visual tokens, and the method evicts visual tokens only."""


class UnsupportedModelError(FoveaKVError, NotImplementedError):
    """The model's attention cannot be compressed correctly."""


class UnsupportedModeError(FoveaKVError, NotImplementedError):
    """The generation mode or cache operation is not supported by the method in use."""


class CacheInUseError(FoveaKVError, RuntimeError):
    """A cache, session or method object is used with the wrong model or at the wrong time."""


class InputError(FoveaKVError, ValueError):
    """A prompt or an image is invalid, such as a missing file, a corrupt image or a wrong number of image tokens."""


class OutputError(FoveaKVError, OSError):
    """A file cannot be written, for example because the disk is full or the folder is missing or read-only."""


class StoreError(FoveaKVError, OSError):
    """The backing store on disk cannot be written."""


class PoolFullError(FoveaKVError, MemoryError):
    """A pool has too little memory left for what a cache is to store; the message says what would fit."""


class MissingDependencyError(FoveaKVError, ImportError):
    """A required optional package is not installed; the message has the command that installs it."""


class ModelLoadError(FoveaKVError, RuntimeError):
    """A model cannot be found, verified, assembled or loaded."""


class MembersFailedError(FoveaKVError, RuntimeError):
    """Some caches of a joined decode step have failed; the step is complete for the others.

    output: the model's output, whose rows of the failed members mean nothing. errors: member number -> its exception.
    """

    def __init__(self, message: str, output: Any, errors: dict[int, Exception]) -> None:
        super().__init__(message)
        self.output = output
        self.errors = errors
