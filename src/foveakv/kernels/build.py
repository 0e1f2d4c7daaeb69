"""Compile the CPU kernel, once per machine, with the installed compiler.

A direct compiler call instead of torch.utils.cpp_extension: the kernel needs only torch's thread pool and takes plain
pointers. That compiles in a third of the time, needs no ninja and no Python headers, and loads in a millisecond.

The library calls torch's threads through at::parallel_for, which is OpenMP. It is compiled with -fopenmp but linked
against libtorch_cpu alone, so that it uses whichever OpenMP runtime torch itself runs on: two of them in one process
stall each other.

There is one library per instruction set, chosen at run time (torch's own detection). Its compiler flags are part of
the file's name, so that machines of different kinds may share a cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from foveakv.util.cache_folder import cache_folder

SOURCES = tuple(Path(__file__).with_name(f"cpu_{name}.cpp") for name in ("decode", "columns", "chunks"))
HEADERS = (Path(__file__).with_name("vectors.h"),)
FUNCTIONS = (
    "foveakv_attend", "foveakv_arguments_size", "foveakv_rank", "foveakv_ranking_size", "foveakv_add_columns",
    "foveakv_largest", "foveakv_relevance", "foveakv_choose",
)  # fmt: skip
"""What a library offers, all of which return an int64."""
SWITCH = "FOVEAKV_KERNEL"
FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wall", "-Wextra")
LINK_FLAGS = ("-shared", "-Wl,--no-as-needed")
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
TIMEOUT = 300  # seconds for the compiler, and for another process's


class BuildError(Exception):
    """Why there is no CPU kernel, in one line; `foveakv.kernels` falls back to `blocks` or raises MethodError."""


def folder() -> Path:
    """`$FOVEAKV_CACHE/kernels`, else `$XDG_CACHE_HOME/foveakv/kernels`, else `~/.cache/foveakv/kernels`."""
    return cache_folder("kernels")


def instructions() -> str:
    """The best of INSTRUCTIONS on this processor, as torch sees it (`ATEN_CPU_CAPABILITY` lowers it)."""
    found = torch.backends.cpu.get_cpu_capability()
    return found if found in INSTRUCTIONS else "portable"


def switched_off() -> bool:
    """Whether FOVEAKV_KERNEL=off (or 0, no, false) forbids building and loading."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")


def find(where: Path | None = None) -> Path | None:
    """The library for this machine, None if it is not built. Incomplete files are deleted."""
    for path in (where or folder()).glob(f"{_stem(instructions())}-*.so"):
        try:
            if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
                return path
            path.unlink(missing_ok=True)
        except OSError:
            continue
    return None


def build(where: Path | None = None, *, force: bool = False) -> Path:
    """The library's path, compiled if it does not exist; safe to call from several processes at once.

    BuildError: with the reason, on one line.
    """
    target = where or folder()
    if not force and (found := find(target)) is not None:
        return found
    if switched_off():
        raise BuildError(f"{SWITCH}=off is set")
    if not sys.platform.startswith("linux"):
        raise BuildError(f"it is built on Linux only, not on {sys.platform}")
    compiler = _compiler()
    from filelock import FileLock, Timeout

    try:
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(str(target / "build.lock"), timeout=TIMEOUT):
            if not force and (found := find(target)) is not None:  # another process built it while we waited
                return found
            return _compile(compiler, target)
    except Timeout:
        raise BuildError(
            f"another process has been building it for {TIMEOUT} s; delete {target} to start again"
        ) from None
    except OSError as error:
        raise BuildError(
            f"cannot write {target}: {error.strerror or error}; set FOVEAKV_CACHE to a folder that you can"
        ) from error


def load(path: Path) -> ctypes.CDLL:
    """Load a built library. BuildError: it cannot be loaded, or lacks a function."""
    try:
        library = ctypes.CDLL(str(path))
        for name in FUNCTIONS:
            getattr(library, name).restype = ctypes.c_int64
        return library
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {path}: {error}") from error


class Once:
    """The loaded library of this process, or the reason why there is none; the first caller builds, others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._reason: str | None = None
        self.path: Path | None = None
        # A thread that builds does not exist in a forked child: a lock that it held would never be free again.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def library(self) -> ctypes.CDLL:
        """The library, built and loaded on the first call.

        BuildError: there is none; the reason stays the same for the life of the process.
        """
        if self._library is not None:
            return self._library
        with self._lock:
            if self._library is None and self._reason is None:
                try:
                    if switched_off():
                        raise BuildError(f"{SWITCH}=off is set")
                    path = build()
                    self._library, self.path = load(path), path
                except (BuildError, OSError, RuntimeError, ValueError) as error:  # "auto" must be able to go on
                    self._reason = str(error) or type(error).__name__
            if self._library is None:
                raise BuildError(self._reason)
            return self._library

    @property
    def loaded(self) -> ctypes.CDLL | None:
        """The library, if this process uses it already; builds and loads nothing."""
        return self._library

    def problem(self) -> str | None:
        """None if the kernel can be used, else the reason. Builds and loads it on the first call."""
        if self._library is not None:
            return None
        try:
            self.library()
        except BuildError as error:
            return str(error)
        return None

    @property
    def state(self) -> str:
        """What is known without building anything."""
        if self._library is None and (self._reason is not None or switched_off()):
            return f"unavailable: {self._reason or f'{SWITCH}=off is set'}"
        try:
            built = self._library is not None or find() is not None
        except (OSError, RuntimeError) as error:
            return f"unavailable: {error}"
        if built:
            return f"ready, {instructions()}"
        return "not built yet: done on first use, or by `foveakv kernels build`"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _flags(kind: str) -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [*FLAGS, *INSTRUCTIONS[kind], f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]


def _stem(kind: str) -> str:
    """A file name made of everything that the library depends on; the digest of its own content follows."""
    texts = [path.read_text(encoding="utf8") for path in (*SOURCES, *HEADERS)]
    made_of = [*texts, torch.__version__, platform.machine(), *_flags(kind), *LINK_FLAGS]
    return f"cpu-{kind.lower()}-{_digest(chr(0).join(made_of).encode())}"


def _compiler() -> list[str]:
    if own := os.environ.get("CXX"):
        command = shlex.split(own)
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"CXX names a compiler that does not exist: {own}")
        return command
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError("there is no C++ compiler; install g++ or clang++, or set CXX")


def _compile(compiler: list[str], target: Path) -> Path:
    """Compiles beside the place where the library goes and moves it there whole. The caller holds the lock."""
    kind = instructions()
    for left_over in target.glob(".build-*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    print("foveakv: building the CPU attention kernel, once, about 20 s", file=sys.stderr, flush=True)
    started = time.perf_counter()
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target) as work:
        linked, compiled = Path(work) / "kernel.so", [str(Path(work) / f"{source.stem}.o") for source in SOURCES]
        include = ["-isystem", str(home / "include")]  # torch's headers are not checked for warnings
        for source, made in zip(SOURCES, compiled, strict=True):
            _run([*compiler, *_flags(kind), *include, "-c", str(source), "-o", made])
        _run([*compiler, *LINK_FLAGS, *compiled, f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(linked)])
        load(linked)  # before anybody relies on it
        path = target / f"{_stem(kind)}-{_digest(linked.read_bytes())}.so"
        linked.replace(path)
    print(f"foveakv: built in {time.perf_counter() - started:.0f} s: {path}", file=sys.stderr, flush=True)
    return path


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {TIMEOUT} s") from None
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise BuildError(f"{command[0]} failed: {lines[0].strip() if lines else f'exit code {done.returncode}'}")


KERNEL = Once()
