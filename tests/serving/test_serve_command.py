"""`foveakv serve` and the commands of docs/serving.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import command_lines
import pytest
import served
import tiny_folder
from checkout import ROOT
from served import httpx
from typer.testing import CliRunner

from foveakv.cli import app
from foveakv.serving.vllm_command import environment, vllm_command

PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf8")


def start(arguments: list[str], **more: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return its process and address."""
    environment = {**os.environ, "PYTHONPATH": str(command_lines.SOURCE), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "foveakv", "serve", *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"(http://\S+) \(page\)", line):
            return process, found[1]
    raise AssertionError("".join(lines))


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (0, -signal.SIGINT, 130)


def example(index: int) -> str:
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[index]


def serve_command(page: str = PAGE) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith("foveakv serve"))
    return shlex.split(line)[2:]


def test_the_command_serves_a_folder(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "model", chat=True)
    arguments = [str(folder), "--port", "0", "--method", "snapkv", "--set", "window=4", "--budget", "50%"]
    process, address = start(
        [*arguments, "--served-model-name", served.MODEL, "--max-new-tokens", "5"], FOVEAKV_API_KEY="k"
    )
    try:
        assert httpx.get(f"{address}/v1/models").status_code == 401
        body = {"model": served.MODEL, "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(
            f"{address}/v1/chat/completions", json=body, headers={"authorization": "Bearer k"}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert answer.json()["usage"]["foveakv"]["settings"]["window"] == 4
    finally:
        stop(process)


@pytest.mark.demo
def test_the_two_commands_of_the_documentation(tmp_path: Path) -> None:
    arguments = serve_command()
    arguments[arguments.index("--port") + 1] = "0"
    process, address = start(arguments)
    try:
        scope: dict[str, Any] = {}
        for i in range(2):
            exec(compile(example(i).replace("http://127.0.0.1:8000", address), "example", "exec"), scope)
            assert scope["reply"].usage.foveakv["stored_bytes"] > 0
        assert scope["reply"].usage.foveakv["kept"]["grids"] == [[8, 8]] * 4
    finally:
        stop(process)


@pytest.mark.demo
def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf8")
    (example,) = re.findall(r"^```py\n(.*?)^```$", readme, re.M | re.S)
    arguments = serve_command(readme)
    arguments[arguments.index("--port") + 1] = "0"
    process, address = start(arguments)
    try:
        scope: dict[str, Any] = {}
        exec(compile(example.replace("http://127.0.0.1:8000", address), "example", "exec"), scope)
    finally:
        stop(process)
    answer, share = capsys.readouterr().out.split()
    assert answer.startswith(scope["card"].answer)
    assert 0 < float(share) < 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["--method", "nothing"],
        ["--budget", "much"],
        ["--method", "full", "--budget", "0.1"],
        ["--set", "window"],
        ["--engine", "sglang"],
        ["--kv-bytes", "0.5"],
        ["--max-body-bytes", "lots"],
        ["--allow-methods", "nothing"],
        ["--max-budget", "2"],
        ["--image-root", "/nowhere"],
        ["--kv-dtype", "int2"],
        ["--request-seconds", "0"],
        ["--host", "300.1.1.1"],
        ["--print-command"],
        ["--engine", "vllm", "--method", "random", "--kv-dtype", "int8"],
        ["--engine", "vllm", "--method", "random", "--max-images", "4"],
        ["--engine", "vllm", "--method", "snapkv"],
    ],
    ids=" ".join,
)
def test_mistakes_are_known_before_a_model_is_loaded(wrong: list[str]) -> None:
    command_lines.error_of(CliRunner().invoke(app, ["serve", "/there/is/no/model", *wrong]))


def test_a_port_in_use(tmp_path: Path) -> None:
    with served.socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(app, ["serve", "/no/model", "--port", str(taken.getsockname()[1])])
        assert "cannot listen" in command_lines.error_of(result)


def test_the_command_of_vllm() -> None:
    arguments = ["serve", "org/model", "--engine", "vllm", "--method", "hae", "--set", "ddes=false", "--port", "9000"]
    more = ["--served-model-name", "m", "--api-key", "secret", "--dtype", "bfloat16", "--vllm-arg=--max-model-len=99"]
    result = CliRunner().invoke(app, [*arguments, *more, "--print-command"])
    assert result.exit_code == 0, result.output
    command = shlex.split(result.stdout)
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"]
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    settings = {"method": "hae", "options": {"ddes": False}, "per_request": True}
    assert transfer == {"kv_connector": "FoveaKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    for name, value in (("--port", "9000"), ("--served-model-name", "m"), ("--dtype", "bfloat16")):
        assert command[command.index(name) + 1] == value
    assert command[-1] == "--max-model-len=99"
    assert "secret" not in result.stdout
    assert environment("secret")["VLLM_API_KEY"] == "secret"


def test_vllm_fetches_no_urls_unless_told() -> None:
    arguments = ["serve", "org/model", "--engine", "vllm", "--method", "random", "--print-command"]
    command = shlex.split(CliRunner().invoke(app, arguments).stdout)
    assert command[command.index("--allowed-media-domains") + 1].endswith(".invalid")
    assert "--allowed-media-domains" not in CliRunner().invoke(app, [*arguments, "--allow-private-urls"]).stdout


@pytest.mark.demo
def test_the_embedded_model_in_vllm() -> None:
    command = vllm_command("demo", method="random", options={}, host="::1", port=1)
    assert (Path(command[command.index("--model") + 1]) / "config.json").exists()
    assert command[command.index("--served-model-name") + 1] == "demo"


def test_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else find(name, *more))
    result = CliRunner().invoke(app, ["serve", "org/model", "--engine", "vllm", "--method", "random"])
    assert "vLLM is not installed" in command_lines.error_of(result)


def test_values_of_the_budget_reach_vllm_as_numbers() -> None:
    command = vllm_command("m", method="random", options={"budget": 0.25}, host="::1", port=1)
    assert '"budget": 0.25' in command[command.index("--kv-transfer-config") + 1]
