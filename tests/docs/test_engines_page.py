"""docs/engines.md says what methods and engines declare, and a test is behind every cell."""

from __future__ import annotations

import engine_tables
import matrix


def test_the_tables_are_those_of_the_code() -> None:
    text = engine_tables.PAGE.read_text(encoding="utf8")
    assert engine_tables.page(text) == text, "run: PYTHONPATH=src:tests/helpers python -m engine_tables"


def test_every_cell_has_a_test() -> None:
    missing = [mode for mode in engine_tables.tests() if not engine_tables.is_there(mode.test)]
    assert not missing, f"name a test in engine_tables.py for {missing}"
    assert not engine_tables.is_there("tests/docs/test_engines_page.py::test_nothing")


def test_a_mode_is_refused_only_by_the_change() -> None:
    assert not engine_tables.refused({})
    assert engine_tables.refused({"lora_config": object()})


def test_variants_are_tested_in_transformers() -> None:
    for name, choices in engine_tables.VARIANTS.items():
        tested = [options for other, options in matrix.VARIANTS if other == name]
        for more in choices:
            assert any(more.items() <= options.items() for options in tested)
