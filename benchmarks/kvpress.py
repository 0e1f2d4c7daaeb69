"""Compare with kvpress 0.5.5 on a text Llama with random weights: time to first token and per token, stored bytes.

kvpress does not run with the transformers version that FoveaKV needs, so each side runs in its own environment and
process, alternately, with the same weights, prompt and budgets. kvpress' AdaKV masks what it evicts and frees no
memory. Its closest match to H2O is ObservedAttention, which needs eager attention weights and is left out for long
prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Recorder, spread

PEERS = Path(__file__).parent / "peers"
PYTHON = PEERS / ".venv-kvpress" / "bin" / "python"
BY = ("side", "context", "budget", "method")
LIMIT = 1800  # seconds per process


def run(recorder: Recorder) -> None:
    """Measure one group of rows per context and budget."""
    if not PYTHON.exists():
        raise SystemExit(f"kvpress needs its own environment; run: sh {PEERS / 'install.sh'}")
    settings = recorder.settings
    for context in settings["contexts"]:
        for budget in settings["budgets"]:
            if not recorder.has(context=context, budget=budget):
                recorder.add(_group(recorder, context, budget))


def _group(recorder: Recorder, context: int, budget: float) -> list[dict[str, Any]]:
    settings = recorder.settings
    spec = {key: settings[key] for key in ("sizes", "layers", "tokens", "dtype", "seed")}
    spec |= {"context": context, "budget": budget, "threads": torch.get_num_threads()}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(settings["repeats"]):
        for side, python in (("foveakv", Path(sys.executable)), ("kvpress", PYTHON)):
            answer = _process(python, PEERS / f"run_{side}.py", spec)
            recorder.content.setdefault("versions", {})[side] = answer["versions"]
            for row in answer["rows"]:
                found.setdefault((side, row["method"]), []).append(row)
                if "settings" in row:
                    recorder.content["methods"][f"{row['method']} {budget:g}"] = row["settings"]
    rows = []
    for (side, name), runs in found.items():
        rows.append(
            {
                "side": side,
                "context": context,
                "budget": budget,
                "method": name,
                "attention": runs[-1]["attention"],
                "first_token_s": spread([run["first_token_s"] for run in runs], scale=1.0),
                "token_ms": spread([value for run in runs for value in run["token_ms"]], scale=1.0),
                "stored_bytes": runs[-1]["stored_bytes"],
            }
        )
    return rows


def _process(python: Path, script: Path, spec: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(python), str(script), json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
