"""Every benchmark runs in its quick mode, writes its rows as they come, and the report page builds from the files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT, committed
from typer.testing import CliRunner

from benchmarks import common, kvpress, report, vllm_sides
from benchmarks.__main__ import app
from benchmarks.layers import DTYPES, SHAPES, Driver, Packed, Tokens, peaked, read_once, storage
from benchmarks.methods import at_budget

QUICK = {
    "decode_attention": ["--backend", "blocks"],
    "generate": ["--method", "full", "--method", "hae", "--method", "hybridkv"],
    "story": [],
    "prefill": ["--method", "hae", "--method", "hybridkv"],
    "short": ["--method", "hae", "--method", "hybridkv"],
    "memory": [],
    "append": [],
    "scale": ["--method", "full", "--method", "hybridkv"],
}
if importlib.util.find_spec("prometheus_client"):  # of the extra `serve`
    QUICK["serving"] = ["--method", "snapkv"]


def run(name: str, out: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["run", name, "--quick", "--out", str(out), *options])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return json.loads((out / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    for name, options in QUICK.items():
        run(name, out, *options)
    return out


def test_files_say_how_they_were_made(results: Path) -> None:
    contents = common.read(results)
    assert sorted(content["benchmark"] for content in contents) == sorted(QUICK)
    for content in contents:
        assert content["complete"]
        assert content["quick"]
        assert content["rows"]
        machine = content["machine"]
        assert machine["seed"] == common.SEED
        assert machine["threads"] == torch.get_num_threads()
        assert machine["versions"]["transformers"]
        assert all(row["load"] >= 0 for row in content["rows"])
        assert content["methods"] or content["benchmark"] == "kvpress"
        for settings in content["methods"].values():
            assert "method" in settings


def test_report_builds_from_the_files(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "docs" / "performance.md"
    report.write(results, page)
    text = page.read_text()
    for name in QUICK:
        assert f"## {report.TITLES[name]}" in text
    assert "`python -m benchmarks run kvpress`" in text  # says what is missing
    assert "no measurement" in text
    assert "| not measured |" in text
    assert "reached" not in text  # a quick run reaches no aim
    plots = sorted(path.name for path in (tmp_path / "docs" / "performance").iterdir())
    assert {"decode_attention.svg", "generate.svg", "memory.svg", "scale.svg"} <= set(plots)
    for name in plots:
        assert f"performance/{name}" in text


def test_report_builds_from_nothing(tmp_path: Path) -> None:
    report.write(tmp_path / "none", tmp_path / "page.md")
    assert "Not run yet" in (tmp_path / "page.md").read_text()


def test_the_committed_page_matches_the_committed_files() -> None:
    pytest.importorskip("matplotlib")
    files = committed("benchmarks/results/*.json")
    if files is None:
        pytest.skip("not a git checkout: which result files are committed is not known")
    page = ROOT / "docs" / "performance.md"
    contents = [json.loads(file.read_text(encoding="utf8")) for file in files]
    contents = [content for content in contents if content.get("benchmark") in report.TITLES]
    from benchmarks.plots import captions

    assert page.read_text() == report.text(contents, captions(contents, page.stem))


def test_full_paths_of_whole_models_generate_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, where no near tie can part paths that choose for themselves."""
    monkeypatch.setitem(DTYPES, "fp64", torch.float64)
    rows = run("generate", tmp_path, "--method", "full", "--dtype", "fp64")["rows"]
    same = {row["method"]: row["same_tokens"] for row in rows}
    assert same["transformers default"] == same["StaticCache"] == same["full"] == 1


@pytest.mark.slow
@pytest.mark.skipif(not kvpress.PYTHON.exists(), reason="sh benchmarks/peers/install.sh makes kvpress' environment")
def test_kvpress(tmp_path: Path) -> None:
    content = run("kvpress", tmp_path)
    assert {row["side"] for row in content["rows"]} == {"foveakv", "kvpress"}
    assert content["versions"]["kvpress"]["kvpress"] == "0.5.5"
    stored = {row["method"]: row["stored_bytes"] for row in content["rows"]}
    assert stored["SnapKVPress"] < stored["AdaKVPress(SnapKVPress)"] == stored["no press"]


def test_kvpress_without_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpress, "PYTHON", tmp_path / "python")
    result = CliRunner().invoke(app, ["run", "kvpress", "--quick", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "install.sh" in str(result.exception)


# ---- result files


def recorder(folder: Path, **options: Any) -> common.Recorder:
    return common.Recorder("test", ("context", "method"), {"repeats": 3}, folder=folder, **options)


def test_interrupted_runs_lose_nothing_and_go_on(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    first.add([{"context": 1, "method": "a"}, {"context": 1, "method": "b"}])
    content = json.loads((tmp_path / "test.json").read_text())
    assert not content["complete"]
    assert len(content["rows"]) == 2
    second = recorder(tmp_path, resume=True)
    assert second.has(context=1)
    assert not second.has(context=2)
    second.add([{"context": 2, "method": "a"}])
    content = second.finish()
    assert content["complete"]
    assert [row["context"] for row in content["rows"]] == [1, 1, 2]
    assert len(content["resumed"]) == 1
    assert not recorder(tmp_path).rows  # without --resume it begins anew


def test_resume_refuses_other_settings(tmp_path: Path) -> None:
    recorder(tmp_path).add([{"context": 1, "method": "a"}])
    with pytest.raises(SystemExit, match="repeats"):
        common.Recorder("test", (), {"repeats": 4}, folder=tmp_path, resume=True)
    with pytest.raises(SystemExit, match="quick"):
        recorder(tmp_path, resume=True, quick=True)


def test_rows_name_their_group(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method"):
        recorder(tmp_path).add([{"context": 1}])


def test_spread() -> None:
    found = common.spread([0.001, 0.002, 0.003, 0.004, 0.005])
    assert found == pytest.approx({"median": 3, "mean": 3, "q1": 2, "q3": 4, "low": 1, "high": 5, "runs": 5})
    assert common.spread([0.002])["median"] == common.spread([0.002])["q3"] == 2


# ---- what is measured


def test_sides_compute_the_same() -> None:
    """The packed baseline and a full compressed cache give the same attention: the comparison is between equals."""
    shape = SHAPES["qwen2.5-vl-3b"]
    tensors = peaked(shape, 64, dtype=torch.float64)
    token = Tokens(shape, 1, dtype=torch.float64)[0]
    driver = Driver(shape, at_budget(0.5, 64, names=("full",))["full"], 64)
    driver.prefill(tensors)
    packed = Packed(shape, *tensors[1:], room=4).step(*token)  # [1, H, G, D]
    ours = driver.step(*token)  # [1, 1, Hq, D]
    torch.testing.assert_close(ours.view(-1), packed.reshape(-1), rtol=1e-10, atol=1e-10)


def test_queries_drift() -> None:
    tokens = Tokens(SHAPES["demo"], 1, correlation=0.9)
    a, b = tokens[0][0].flatten(), tokens[1][0].flatten()
    assert 0.8 < torch.nn.functional.cosine_similarity(a, b, dim=0) < 0.97
    assert torch.equal(Tokens(SHAPES["demo"], 1)[1][1], tokens[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_covers_every_byte(dtype: torch.dtype) -> None:
    shape = SHAPES["demo"]
    driver = Driver(shape, at_budget(0.5, 64, names=("hybridkv",))["hybridkv"], 64)
    driver.prefill(peaked(shape, 64, dtype=dtype))
    runs = driver.cache.compressed[0].segments.runs
    assert storage(driver.read) >= runs.keys.nbytes + runs.values.nbytes
    read_once(driver.read)


@pytest.mark.parametrize("name", ["vllm", "vllm_accuracy"])
def test_vllm_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(vllm_sides, "PYTHON", tmp_path / "python")
    find = vllm_sides.importlib.util.find_spec
    monkeypatch.setattr(vllm_sides.importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    result = CliRunner().invoke(app, ["run", name, "--quick", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert ".venv-vllm" in str(result.exception)
