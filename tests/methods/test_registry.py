"""The registry finds methods by their files, without importing them."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import families
import matrix
import pytest

import foveakv
from foveakv import methods
from foveakv.errors import MethodError
from foveakv.methods import registry

ROOT = Path(__file__).parents[2]


def declared() -> list[str]:
    """Names of the methods that the modules of the folder define, found by importing them."""
    files = [each.name for each in pkgutil.iter_modules(methods.__path__)]
    modules = [importlib.import_module(f"foveakv.methods.{file}") for file in files]
    classes = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    return sorted({each.name for each in classes if issubclass(each, methods.Method) and each.name})


BUILT_IN = declared()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Registered methods, and what was read of the folder, are forgotten again."""
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)
    registry._built_in.cache_clear()


@pytest.fixture
def source() -> str:
    """The method of the documentation."""
    page = (ROOT / "docs/adding-a-method.md").read_text(encoding="utf8")
    found = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[0]
    assert len(found.splitlines()) <= 40
    return found


def imported(statement: str) -> set[str]:
    """Modules of the package that a statement loads in a fresh interpreter."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name for name in json.loads(done.stdout) if name.startswith("foveakv")}


def test_built_in_methods() -> None:
    assert {"full", "hae", "hybridkv"} <= set(BUILT_IN)
    assert [name for name in methods.available() if name not in registry._REGISTERED] == BUILT_IN
    for name in BUILT_IN:
        cls = methods.find(name)
        assert cls.name == name
        assert cls.__module__ == registry._built_in()[name][0]
        assert getattr(foveakv, cls.__name__) is cls
        assert cls.__name__ in dir(foveakv)


def test_methods_are_imported_when_they_are_asked_for() -> None:
    modules = {module for module, _ in registry._built_in().values()}
    loaded = imported("from foveakv.methods import available, find; available(); find('streaming')")
    assert loaded & modules == {"foveakv.methods.streaming"}
    assert imported("import foveakv; foveakv.Streaming; dir(foveakv)") & modules == {"foveakv.methods.streaming"}
    assert imported("from foveakv.methods import available; available()") & modules == set()


@pytest.mark.parametrize("decorated", [True, False])
def test_a_file_in_the_folder_is_a_method(
    source: str, decorated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file, no list to edit, and no import to find it."""
    folder = tmp_path / "methods"
    shutil.copytree(Path(registry.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if not decorated:
        source = source.replace("@register\n", "").replace(", register", "")
    (folder / "keynorm.py").write_text(source, encoding="utf8")
    monkeypatch.setattr(registry, "__file__", str(folder / "registry.py"))
    registry._built_in.cache_clear()
    assert methods.available() == sorted([*BUILT_IN, "keynorm"])
    assert registry.class_names()["KeyNorm"] == "foveakv.methods.keynorm"
    if decorated:
        return  # in the folder, @register would name a built-in method a second time
    monkeypatch.setattr(methods, "__path__", [str(folder)])
    try:
        cls = methods.find("keynorm")
        with pytest.raises(MethodError, match="'keynorm' is a built-in method; choose another name"):
            methods.register(cls)
    finally:
        sys.modules.pop("foveakv.methods.keynorm", None)


def test_a_registered_method_runs(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_keynorm.py").write_text(source, encoding="utf8")
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("own_keynorm").KeyNorm
    assert methods.find("keynorm") is cls
    assert methods.available() == sorted([*BUILT_IN, "keynorm"])
    model, inputs = matrix.model("llava"), families.prompt("llava", images=3)
    run = matrix.compressed(model, methods.get("keynorm", budget=0.5), inputs)
    assert run.session.report.evicted > 0
    matrix.check_against_reference(model, run, inputs, 1e-4)


def test_names_that_cannot_be_registered() -> None:
    class Nameless(methods.Method):
        pass

    class Taken(methods.Method):
        name = "snapkv"

    with pytest.raises(MethodError, match="Nameless needs a class attribute `name`"):
        methods.register(Nameless)
    with pytest.raises(MethodError, match="'snapkv' is a built-in method; choose another name for Taken"):
        methods.register(Taken)
    with pytest.raises(MethodError, match=r"unknown method 'snapvk' \(did you mean 'snapkv'"):
        methods.find("snapvk")


@pytest.mark.parametrize("options", [{"name": "x"}, {"preset": [1]}, {"preset": {}}, {"preset": 3}])
def test_any_option_is_checked(options):
    with pytest.raises(MethodError):
        registry.get("hae", **options)
