"""How the CPU kernel is built: once for all processes, without warnings, or with a reason why not."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foveakv.kernels import build, cpu

needs_kernel = pytest.mark.skipif(cpu.problem() is not None, reason=f"no CPU kernel here: {cpu.problem()}")
SOURCE = Path(__file__).parents[2] / "src"

USE = """
import sys
import torch
from foveakv import kernels
from foveakv.memory.segments import Segments
assert kernels.__name__ + ".cpu" not in sys.modules and kernels.__name__ + ".build" not in sys.modules
keys = torch.ones(1, 1, 4, 8)
runs = Segments.from_dense(keys, keys, torch.ones(1, 1, 4, dtype=torch.bool), torch.arange(4)[None]).runs
for _ in range(2):
    out, _ = kernels.decode_attention(keys[:, :, :1], runs, 1.0)
    assert torch.allclose(out, torch.ones(()))
print(kernels.choose(keys, runs))
try:
    kernels.decode_attention(keys[:, :, :1], runs, 1.0, backend="cpu")
except kernels.MethodError as error:
    print(error)
"""


def start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "FOVEAKV_CACHE": str(cache), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", USE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return out, error


@pytest.fixture
def quick_compiler(tmp_path: Path) -> str:
    """A compiler that makes nothing, at once: it copies the library that is there and counts its calls."""
    built = build.find()
    assert built is not None
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nfor last; do :; done\nsleep 0.3\ncp {built} "$last"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == build.instructions() else pytest.param(kind, marks=pytest.mark.slow)
        for kind in build.INSTRUCTIONS
    ],
)
def test_it_compiles_without_warnings(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this processor's instruction set, and as a slow test for the others of its architecture."""
    if kind != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{kind} is not for {platform.machine()}")
    monkeypatch.delenv("CXX", raising=False)
    include = Path(torch.__file__).parent / "include"
    command = [*build._compiler(), *build._flags(kind), "-Wall", "-Wextra", "-Werror", "-isystem", str(include)]
    for source in build.SOURCES:
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(tmp_path / "kernel.o")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@needs_kernel
def test_two_processes_build_once_and_a_spoilt_file_is_replaced(
    tmp_path: Path, quick_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    both = [finish(process) for process in [start(cache, CXX=quick_compiler) for _ in range(2)]]
    assert [out.strip() for out, _ in both] == ["cpu", "cpu"]
    assert sum("building the CPU attention kernel" in error for _, error in both) == 1
    assert len((tmp_path / "calls").read_text().splitlines()) == len(build.SOURCES) + 1  # compile, link
    (library,) = cache.glob("kernels/*.so")
    assert sorted(path.name for path in library.parent.iterdir()) == sorted([library.name, "build.lock"])

    monkeypatch.setenv("FOVEAKV_CACHE", str(cache))
    monkeypatch.setenv("CXX", quick_compiler)
    assert build.find() == library
    library.write_bytes(library.read_bytes()[:5000])
    assert build.Once().problem() is None
    assert build.find() == library
    assert len((tmp_path / "calls").read_text().splitlines()) == 2 * (len(build.SOURCES) + 1)


def test_without_a_compiler_blocks_is_used_and_the_reason_said_once(tmp_path: Path) -> None:
    out, error = finish(start(tmp_path, CXX="/nowhere/c++"))
    reason = "CXX names a compiler that does not exist"
    assert out.startswith("blocks\n")
    assert reason in out  # backend="cpu" raised
    assert error.count(reason) == 1
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "false"}, "false failed: exit code 1"),
        ({"CXX": "", "PATH": "/nowhere"}, "there is no C.. compiler"),
        ({"CXX": "true"}, "cannot load"),
        ({"FOVEAKV_KERNEL": "off"}, "FOVEAKV_KERNEL=off"),
        ({"FOVEAKV_CACHE": __file__}, "set FOVEAKV_CACHE to a folder"),
    ],
)
def test_reasons(tmp_path: Path, variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FOVEAKV_CACHE": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    once = build.Once()
    found = once.problem()
    assert found is not None
    assert re.search(reason, found), found
    assert "\n" not in found
    assert found in once.state
    assert not [path for path in tmp_path.rglob("*") if path.name != "kernels" and path.name != "build.lock"]


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_a_library_without_a_function_is_refused(tmp_path: Path) -> None:
    source, library = tmp_path / "old.cpp", tmp_path / "old.so"
    source.write_text('extern "C" long foveakv_attend() { return 0; }')
    subprocess.run([*build._compiler(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(build.BuildError, match=r"cannot load .*old\.so: .*foveakv_arguments_size"):
        build.load(library)


# ---- the command line


@needs_kernel
def test_kernels_commands() -> None:
    from typer.testing import CliRunner

    from foveakv.cli import app

    done = CliRunner().invoke(app, ["kernels", "list"])
    assert done.exit_code == 0, done.output
    assert f"ready, {build.instructions()}" in done.stdout
    done = CliRunner().invoke(app, ["kernels", "build"])
    assert done.exit_code == 0, done.output
    assert str(build.find()) in done.stdout


def test_kernels_build_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from foveakv.cli import app

    monkeypatch.setenv("FOVEAKV_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    done = CliRunner().invoke(app, ["kernels", "build"])
    assert done.exit_code == 2
    assert "the CPU kernel was not built: false failed" in done.stderr
