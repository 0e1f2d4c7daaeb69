"""Methods from a file of one's own: `load_file("keynorm.py")` runs it, and what it registers is known by name."""

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
    """Runs a Python file once and gives the names of the methods that it registers (`@foveakv.methods.register`).

    The file is code, and runs with all your rights. MethodError: there is no such file, it raises, or it registers
    nothing.
    """
    file = Path(path).expanduser().resolve()
    if file in _FILES:
        return _of(_FILES[file])
    if not file.is_file():
        raise MethodError(f"{file} is no file; give a Python file that registers a method")
    # Files of equal names in two folders are two modules.
    name = f"foveakv_methods_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise MethodError(f"{file} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    before = dict(registry._REGISTERED)
    try:
        spec.loader.exec_module(module)
        if not _of(name):
            raise MethodError(f"{file} registers no method; put @foveakv.methods.register above its class")
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
    """The files that were loaded, as absolute paths, so that other processes can load them too."""
    return tuple(map(str, _FILES))


def version_of(cls: type) -> str | None:
    """A digest of the file that a class was loaded from, as it is now; None for classes from elsewhere."""
    for file, module in _FILES.items():
        if module == cls.__module__:
            return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return None


def _of(module: str) -> list[str]:
    return [name for name, cls in registry._REGISTERED.items() if cls.__module__ == module]
