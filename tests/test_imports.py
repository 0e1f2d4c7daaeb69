"""The structure of the code: rooms import downwards only, no import cycles, a light root package, short files.

Imports are read from the syntax tree, so that those inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    "core", "memory", "kernels", "methods", "engines", "models", "streams", "evaluation", "analysis", "serving", "cli",
)  # fmt: skip
"""A room may import itself and those before it. `errors` and `util` may be imported by all."""
BELOW_ALL = ("errors", "util")
METHODS = ("core", "errors", "util", "methods")
"""All that methods may import: an engine passes everything else to them as views."""
MOST_LINES = 400

# What breaks the rules today. These two lists only shrink: an entry that is no longer needed fails a test.
UPWARDS: dict[str, set[str]] = {}
CYCLIC: set[str] = set()


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in (ROOT / "src" / "foveakv").rglob("*.py")}


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that a module names in an import; `foveakv.NAME` for a name of the root package."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules() or node.module == "foveakv" else str(node.module))
    return frozenset(name for name in found if name.split(".")[0] == "foveakv")


def room(module: str) -> str:
    """foveakv.core.budget -> core; foveakv -> ""."""
    return [*module.split("."), ""][1]


def upwards(module: str) -> set[str]:
    """The imports of a module that its room does not allow."""
    own = room(module)
    if own in ("", "__main__"):  # the root package offers names of all rooms, loaded on first use
        return set()
    if own in BELOW_ALL:
        allowed: set[str] = {*BELOW_ALL} if own == "util" else {own}
    elif own == "methods":
        allowed = {*METHODS}
    else:
        assert own in ORDER, f"{module}: no such room"
        allowed = {*BELOW_ALL, *ORDER[: ORDER.index(own) + 1]}
    return {name for name in imports(module) if room(name) not in allowed and name != "foveakv.__version__"}


def cycles() -> list[set[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports(module) & modules().keys():
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(group) > 1 or module in imports(module):
                found.append(group)

    for module in modules():
        if module not in index:
            visit(module)
    return found


def long_files() -> dict[str, int]:
    """Files over the limit, with their lines."""
    folders = ("src", "tests", "benchmarks", "training", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    counts = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf8").splitlines()) for path in paths
              if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)}  # fmt: skip
    return {name: count for name, count in counts.items() if count > MOST_LINES}


def test_rooms_import_downwards() -> None:
    found = {module: upwards(module) for module in sorted(modules()) if upwards(module)}
    new = {module: names - UPWARDS.get(module, set()) for module, names in found.items()}
    assert {module: names for module, names in new.items() if names} == {}
    gone = {module: names - found.get(module, set()) for module, names in UPWARDS.items()}
    assert {module: names for module, names in gone.items() if names} == {}, "remove these from UPWARDS"


def test_no_import_cycles() -> None:
    found = cycles()
    assert [sorted(group) for group in found if not group <= CYCLIC] == []
    assert sorted(CYCLIC - set().union(*found)) == [], "remove these from CYCLIC"


def test_files_are_short() -> None:
    assert long_files() == {}


@pytest.mark.parametrize("statement", ["import foveakv", "import foveakv.errors", "from foveakv import __version__"])
def test_the_root_package_is_light(statement: str) -> None:
    code = f"{statement}; import sys; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
