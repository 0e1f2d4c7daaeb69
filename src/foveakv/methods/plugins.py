"""Methods from user files: `load_file("keynorm.py")` runs a file and makes the methods it registers available."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from os import PathLike
from pathlib import Path

from foveakv.errors import MethodError
from foveakv.methods import registry

_FILES: dict[Path, str] = {}


def load_file(path: str | PathLike[str]) -> list[str]:
    """Run a Python file, once, and return the names of the methods it registers (`@foveakv.methods.register`).

    The file is arbitrary code that runs with your permissions.

    Raises:
        MethodError: the file is missing, raises an exception, or registers no method or a name that is taken.
    """
    file = Path(path).expanduser().resolve()
    if file in _FILES:
        return _of(_FILES[file])
    if not file.is_file():
        raise MethodError(f"{file} is not a file; give a Python file that registers a method")
    # Files with the same name in two folders are two modules.
    name = f"foveakv_methods_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise MethodError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    before = dict(registry._REGISTERED)
    try:
        spec.loader.exec_module(module)
        if not _of(name):
            raise MethodError(f"{file} registers no method; decorate its class with @foveakv.methods.register")
        taken = [each for each in _of(name) if each in before]
        if taken:
            raise MethodError(f"{file} registers {taken[0]!r}, which another file has registered; choose another name")
    except Exception as error:
        del sys.modules[name]
        registry._REGISTERED.clear()
        registry._REGISTERED.update(before)
        if isinstance(error, MethodError):
            raise
        raise MethodError(f"{file} failed: {type(error).__name__}: {error}") from error
    _FILES[file] = name
    return _of(name)


def loaded_files() -> tuple[str, ...]:
    """Return the absolute paths of all loaded files, so that other processes can load them too."""
    return tuple(map(str, _FILES))


def version_of(cls: type) -> str | None:
    """Return a digest of the current content of the file that a class was loaded from; None for other classes."""
    for file, module in _FILES.items():
        if module == cls.__module__:
            return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return None


def _of(module: str) -> list[str]:
    return [name for name, cls in registry._REGISTERED.items() if cls.__module__ == module]
