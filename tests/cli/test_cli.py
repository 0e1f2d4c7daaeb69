"""The command line, with a tiny model in a folder; tests marked `demo` use the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import matrix
import pytest
import tiny_folder
from typer.testing import CliRunner, Result

from foveakv.cli import app
from foveakv.cli.settings import parse_assignments
from foveakv.errors import MethodError
from foveakv.util.values import parse_value, type_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return tiny_folder.pictures(tmp_path, 2)


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def succeed(*args: Any) -> Result:
    result = invoke(*args)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def fail(*args: Any) -> str:
    """The error line of a command that must stop with one."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.output
    return lines[0]


# ---- help, lists


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from foveakv.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'PIL'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    for name in ("generate", "compare", "methods", "models", "doctor"):
        assert name in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_version() -> None:
    from foveakv import __version__

    assert succeed("--version").stdout.strip() == f"foveakv {__version__}"


def test_methods_lists_all_with_defaults() -> None:
    from foveakv.methods import available

    text = succeed("methods").stdout
    for name in available():
        assert name in text
    assert "recycle_bin_size=64" in text


def test_models_gives_reasons() -> None:
    text = succeed("models").stdout
    assert "qwen2_5_vl" in text
    assert "not supported" in text


def test_doctor_checks_the_kernels() -> None:
    text = succeed("doctor").stdout
    assert "reference ok, blocks ok" in text
    assert "transformers" in text


# ---- generate


def test_generate_answers_and_reports(folder: Path, files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.json"
    result = succeed(
        "generate", "--model", folder, "--image", files[0], "--image", files[1], "--prompt", "What differs?",
        "--method", "hybridkv", "--budget", "0.5", "--set", "theta=0.85", "--set", "window=4",
        "--set", "min_budget=none", "--max-new-tokens", 4, "--json", out,
    )  # fmt: skip
    assert "foveakv report: hybridkv" in result.stdout
    data = json.loads(out.read_text())
    settings = data["report"]["settings"]
    assert settings["theta"] == 0.85
    assert settings["budget"] == 0.5
    assert settings["min_budget"] is None
    assert len(data["tokens"]) == 4
    assert data["environment"]["versions"]["transformers"]
    assert data["environment"]["model"]["class"] == "LlavaForConditionalGeneration"
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_generate_streams_what_it_reports(folder: Path, files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("generate", "--model", folder, "-i", files[0], "-p", "Hm?", "--method", "full", "-n", 6, "--json", out)
    assert succeed(*args).stdout.startswith(json.loads(out.read_text())["answer"].rstrip("\n"))


@pytest.mark.parametrize("budget", ["10%", "16", "0.3", "40kB"])
def test_generate_reads_every_kind_of_budget(folder: Path, files: list[Path], budget: str) -> None:
    args = ("--method", "snapkv", "--budget", budget, "--set", "window=4", "-n", 2)
    assert "evicted" in succeed("generate", "--model", folder, "-i", files[0], "-p", "Hm?", *args).stdout


@pytest.mark.parametrize(("args", "message"), [
    (("--budget", "0"), "budget 0 keeps nothing"),
    (("--budget", "1.5"), "1.5 is over 100%"),
    (("--budget=-0.1",), "budget -0.1 keeps nothing"),
    (("--budget", "ten"), "budget 'ten' cannot be read"),
    (("--method", "hybrydkv"), "unknown method 'hybrydkv' (did you mean 'hybridkv'?)"),
    (("--method", "full", "--budget", "0.5"), "full takes no budget; leave --budget out; it has no options"),
    (("--method", "fastv", "--budget", "0.5"), "fastv takes no budget; leave --budget out; its options: layer"),
    (("--set", "tehta=1"), "hybridkv has no option 'tehta' (did you mean 'theta'?)"),
    (("--set", "theta=high"), "theta=high: expected 'auto' or a number"),
    (("--set", "theta=7"), "theta"),
    (("--set", "theta"), "'theta' is not of the form key=value"),
    (("--set", "theta=1", "--set", "theta=0.5"), "--set gives theta twice"),
    (("--set", "budget=0.2", "--budget", "0.1"), "budget is given twice"),
    (("--set", "classify=never"), "classify=never: expected 'auto' or 'all_static' or 'all_dynamic'"),
])  # fmt: skip
def test_method_mistakes_are_found_before_the_model_is_loaded(args: tuple[str, ...], message: str) -> None:
    assert message in fail("generate", "--model", "no/such/model", "--prompt", "Hm?", *args)


def test_image_mistakes_are_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    common = ("generate", "--model", "no/such/model", "--prompt", "Hm?", "--image")
    assert "image file not found: " in fail(*common, tmp_path / "gone.png")
    cut = tmp_path / "cut.png"
    tiny_folder.picture(size=(200, 200)).save(cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    assert f"{cut} is damaged or truncated" in fail(*common, cut)
    assert "is a folder; give the name of a file" in fail(*common[:-1], "--json", tmp_path)


def test_prompt_mistakes(folder: Path, files: list[Path]) -> None:
    common = ("generate", "--model", folder, "--image", files[0], "--prompt")
    assert "2 <image> marks and 1 image was given" in fail(*common, "<image> or <image>?")
    assert "the prompt is empty" in fail(*common, " ")
    assert "random evicts visual tokens only" in fail(
        "generate", "--model", folder, "--prompt", "No picture.", "--method", "random"
    )


def test_a_failure_leaves_an_older_result_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("precious")
    fail("generate", "--model", folder, "--prompt", "No picture.", "--method", "random", "--json", out)
    assert out.read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_model_that_is_not_there() -> None:
    assert "no/such/folder" in fail("generate", "--model", "./no/such/folder", "--prompt", "Hm?")


def test_debug_shows_the_traceback() -> None:
    result = invoke("generate", "--prompt", "Hm?", "--method", "nope", "--debug")
    assert isinstance(result.exception, MethodError)


def test_remote_code_stays_off_unless_asked(folder: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from foveakv import models

    seen: list[bool] = []
    load = models.load

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["trust_remote_code"])
        return load(*args, **kwargs)

    monkeypatch.setattr(models, "load", watched)
    args = ("generate", "--model", folder, "-i", files[0], "-p", "Hm?", "--method", "full", "-n", 1)
    succeed(*args)
    succeed(*args, "--trust-remote-code")
    assert seen == [False, True]


# ---- compare


def test_compare_prints_and_saves(folder: Path, files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot, kept = tmp_path / "o" / "out.json", tmp_path / "o" / "plot.png", tmp_path / "o" / "kept.png"
    result = succeed(
        "compare", "--model", folder, "--image", files[0], "--image", files[1], "--prompt", "What differs?",
        "--methods", "full,snapkv,random", "--budgets", "0.25,0.5", "--set", "snapkv.window=4", "--max-new-tokens", 4,
        "--dtype", "float64", "--json", out, "--plot", plot, "--kept-png", kept,
    )  # fmt: skip
    labels = ["transformers", "full", "snapkv 0.25", "snapkv 0.5", "random 0.25", "random 0.5"]
    for label in labels:
        assert label in result.stdout
    data = json.loads(out.read_text())
    assert [row["label"] for row in data["rows"]] == labels
    assert data["rows"][1]["prefix_agreement"] == 1.0
    assert data["rows"][2]["settings"]["window"] == 4
    assert sorted(path.name for path in out.parent.iterdir()) == ["kept.png", "out.json", "plot.png"]


def test_compare_goes_on_when_one_method_fails(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = invoke(
        "compare", "--model", folder, "--prompt", "No picture at all, just text.", "--methods", "full,random,snapkv",
        "--set", "snapkv.window=4", "--max-new-tokens", 3, "--json", out,
    )  # fmt: skip
    assert result.exit_code == 2
    assert "random 0.1: NoVisualTokensError" in " ".join(result.stdout.split())
    rows = {row["label"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["random 0.1"]["error"]
    assert rows["snapkv 0.2"]["error"] is None


@pytest.mark.parametrize(("args", "message"), [
    (("--prompt", "x", "--methods", "snapvk"), "did you mean 'snapkv'"),
    (("--prompt", "x", "--methods", ","), "names no method"),
    (("--prompt", "x", "--budgets", "0.1,2.5"), "2.5 is over 100%"),
    (("--prompt", "x", "--set", "window=4"), "not of the form method.key=value"),
    (("--prompt", "x", "--set", "h2o.budget=0.1", "--methods", "full"), "'h2o', which is not one of the methods"),
    (("--prompt", "x", "--set", "snapkv.windw=4", "--methods", "snapkv"), "did you mean 'window'"),
    ((), "give either --prompt (with --image) or --sample N"),
    (("--prompt", "x", "--sample", "4"), "give either --prompt"),
    (("--sample", "4", "--model", "other"), "--sample is a prompt of the embedded model"),
    (("--prompt", "x", "--kept-png", "kept.png"), "--kept-png needs images"),
])  # fmt: skip
def test_compare_mistakes(args: tuple[str, ...], message: str) -> None:
    assert message in fail("compare", *args)


# ---- settings


@pytest.mark.parametrize(("kind", "text", "value"), [
    (int, "3", 3),
    (float, "3", 3.0),
    (float, "1e-3", 0.001),
    (bool, "yes", True),
    (bool, "False", False),
    (str, "a=b", "a=b"),
    (int | None, "none", None),
    (int | None, "4", 4),
    (float | int | str, "0.1", 0.1),
    (float | int | str, "64", 64),
    (float | int | str, "10%", "10%"),
    (Literal["all"] | int, "all", "all"),
    (Literal["all"] | int, "32", 32),
])  # fmt: skip
def test_values_follow_their_types(kind: Any, text: str, value: Any) -> None:
    read = parse_value("key", kind, text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(("kind", "text"), [(int, "3.5"), (bool, "maybe"), (Literal["a", "b"], "c"), (int | None, "x")])
def test_values_of_another_type(kind: Any, text: str) -> None:
    with pytest.raises(MethodError, match=f"key={text}: expected "):
        parse_value("key", kind, text)


def test_types_in_words() -> None:
    assert type_text(int | None) == "none or a whole number"
    assert type_text(Literal["a", "b"]) == "'a' or 'b'"


def test_every_setting_of_every_method_can_be_set_to_its_default() -> None:
    import dataclasses

    from foveakv.methods import available, find, get

    for name in available():
        for setting in dataclasses.fields(find(name)):
            if setting.init and setting.default is not dataclasses.MISSING:
                options = parse_assignments(name, [f"{setting.name}={setting.default}"])
                assert options == {setting.name: setting.default}
                needed = matrix.NEEDED.get(name, {})
                if setting.name not in needed:
                    get(name, **needed, **options)


# ---- the embedded model


@pytest.mark.demo
def test_sample_of_the_embedded_model(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = succeed(
        "compare", "--sample", 4, "--methods", "full,hybridkv", "--budgets", "0.3", "--max-new-tokens", 8,
        "--json", out, "--kept-png", tmp_path / "kept.png",
    )  # fmt: skip
    data = json.loads(out.read_text())
    assert data["visual_tokens"] == 4 * 64
    assert data["rows"][1]["prefix_agreement"] == 1.0
    assert data["expected"] == "7"
    assert "expected" in result.stdout
