"""`kv_dtype` and `residual_length`: memory, reports, error messages, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import matrix
import pytest
import tiny_folder
import torch
from typer.testing import CliRunner, Result

import foveakv
from foveakv import errors
from foveakv.cli import app

pytestmark = pytest.mark.usefixtures("no_gradients")


# ------------------------------------------------------------------------------------------------------ bytes, reports


def long_prompt(columns: int, dtype: torch.dtype) -> dict[str, Any]:
    parts: list[Any] = []
    for i in range(columns // 32):
        parts += [15, families.Picture(seed=i)]
    inputs = families.encode("llava", [families.Row((*parts, 20))])
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


@pytest.mark.parametrize(("dtype", "kind", "least"), [
    (torch.float32, "int8", 2.4), (torch.float32, "int4", 3.6),
    (torch.bfloat16, "int8", 1.4), (torch.bfloat16, "int4", 2.0),
])  # fmt: skip
def test_memory_shrinks_further(dtype: torch.dtype, kind: str, least: float) -> None:
    """At a tenth of the prompt, head dimension 64: quantization comes on top of what the method saves."""
    model = families.build("llava", dtype=dtype, num_hidden_layers=2, hidden_size=128, head_dim=64)
    inputs = long_prompt(1500, dtype)
    found = {}
    for kv_dtype in (None, kind):
        with foveakv.compress(
            model, foveakv.SnapKV(budget=0.1, window=8), kv_dtype=kv_dtype, residual_length=8
        ) as session:
            output = model.generate(**inputs, **matrix.GREEDY)
        run = matrix.Run(output.sequences, [], session.cache, session)
        matrix.check_storage(run)
        found[kv_dtype] = session.report
    assert found[kind].stored_slots == found[None].stored_slots
    assert found[None].stored_bytes / found[kind].stored_bytes >= least
    assert found[kind].compression >= 9 * least
    assert found[kind].saved_by_quantization == found[None].stored_bytes - found[kind].stored_bytes
    assert found[kind].peak_bytes < found[None].peak_bytes


def test_report_says_how_slots_are_stored() -> None:
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method("snapkv"), kv_dtype="int8", residual_length=4) as session:
        model.generate(**inputs, **matrix.GREEDY)
    data = session.report.to_dict()
    assert (data["kv_dtype"], data["residual_length"]) == ("int8", 4)
    assert data["saved_by_quantization"] > 0
    assert data["notes"] == []
    assert "int8, newest 4 tokens in full precision" in str(session.report)
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        model.generate(**inputs, **matrix.GREEDY)
    data = session.report.to_dict()
    assert (data["kv_dtype"], data["residual_length"], data["saved_by_quantization"]) == (None, None, 0)
    assert "stored as" not in str(session.report)


def test_report_says_when_nothing_is_saved() -> None:
    """A residual window that is longer than what is kept costs more than quantization saves."""
    model, inputs = matrix.model("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method("snapkv"), kv_dtype="int8", residual_length=64) as session:
        model.generate(**inputs, **matrix.GREEDY)
    assert session.report.saved_by_quantization < 0
    assert any("saves no memory" in note for note in session.report.notes)


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(("options", "message"), [
    ({"kv_dtype": "int-8"}, r"unknown kv_dtype 'int-8' \(did you mean 'int8'\?\); choose 'int8', 'int4', or None"),
    ({"kv_dtype": "fp8"}, "unknown kv_dtype 'fp8'"),
    ({"kv_dtype": torch.int8}, "unknown kv_dtype torch.int8"),
    ({"kv_dtype": 8}, "unknown kv_dtype 8"),
    ({"kv_dtype": ["int8"]}, "unknown kv_dtype"),
    ({"kv_dtype": "int8", "residual_length": -1}, "residual_length must be a whole number from 0 to 32767.*got -1"),
    ({"residual_length": 2.5}, "residual_length must be a whole number"),
    ({"residual_length": True}, "residual_length must be a whole number"),
    ({"residual_length": 40_000}, "residual_length must be a whole number"),
])  # fmt: skip
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    model, method = matrix.model("llama"), foveakv.methods.get("full")
    for use in (foveakv.compress, foveakv.cache_for):
        with pytest.raises(errors.MethodError, match=message):
            use(model, method, **options)


def test_an_odd_head_dimension_cannot_be_packed() -> None:
    model = families.build("llama", head_dim=15, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(errors.MethodError, match=r"even head dimensions, got 15.*choose kv_dtype='int8'"):
        foveakv.cache_for(model, foveakv.methods.get("full"), kv_dtype="int4")


# -------------------------------------------------------------------------------------------------------- command line


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_command_line(tmp_path: Path) -> None:
    folder, pictures = tiny_folder.save(tmp_path / "model"), tiny_folder.pictures(tmp_path, 1)
    common = ("--model", folder, "-i", pictures[0], "-p", "Hm?", "--kv-dtype", "int8", "-n", 3)
    out = tmp_path / "out.json"
    done = invoke("generate", *common, "--method", "snapkv", "--set", "window=4", "--json", out)
    assert done.exit_code == 0, done.output
    assert "int8, newest 32 tokens in full precision" in done.stdout
    assert json.loads(out.read_text())["report"]["kv_dtype"] == "int8"
    done = invoke("compare", *common, "--methods", "full", "--json", out)
    assert done.exit_code == 0, done.output
    assert "slots in int8" in done.stdout
    data = json.loads(out.read_text())
    assert data["kv_dtype"] == "int8"
    assert data["rows"][1]["report"]["kv_dtype"] == "int8"


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_command_line_mistakes_are_found_before_the_model_is_loaded(command: str) -> None:
    done = invoke(command, "--model", "no/such/model", "--prompt", "Hm?", "--kv-dtype", "int9")
    assert done.exit_code == 2
    assert "unknown kv_dtype 'int9' (did you mean 'int8'?)" in done.stderr
