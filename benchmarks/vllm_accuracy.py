"""The offline suite through vLLM and through transformers: scores, and whether kept tokens and answers are the same."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from benchmarks.common import Recorder
from benchmarks.vllm_sides import ROOT, python, sides
from foveakv.evaluation import tasks
from foveakv.evaluation.grading import grade
from foveakv.methods import get

BY = ("task", "side")
METHOD = "hae"


def run(recorder: Recorder) -> None:
    """Answer the same items in both engines; one group of rows per task."""
    settings = recorder.settings
    chosen = [{"ddes": False, "target_visual_tokens": share} for share in settings["shares"]]
    names = ["full", *(f"{METHOD} {share:g}" for share in settings["shares"])]
    for name, options in zip(names[1:], chosen, strict=True):
        recorder.method(name, get(METHOD, **options))
    extras = ["off", *({"method": METHOD, "options": options} for options in chosen)]
    with sides(settings["threads"], vllm={"method": "off", "options": {}, "blocks": None}) as engines:
        recorder.content["versions"] = {"vllm": engines["vllm"].hello["versions"]}
        for task in settings["tasks"]:
            if recorder.has(task=task):
                continue
            items = [tasks.find(task).item(number) for number in range(settings["items"])]
            wanted = [(task, item.number, item.turns[0].max_new_tokens) for item in items]
            ours = engines["vllm"].do("answers", items=wanted, extras=extras)
            theirs = _transformers(settings["threads"], wanted, [None, *chosen])
            turns = [item.turns[0] for item in items]
            recorder.add(
                _row(task, name, turns, [each[i] for each in ours], [each[i] for each in theirs])
                for i, name in enumerate(names)
            )


def _row(task: str, side: str, turns: list[Any], ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    pairs = list(zip(ours, theirs, strict=True))
    count = len(pairs)
    return {
        "task": task,
        "side": side,
        "items": count,
        "vllm": sum(grade(turn, each["text"]) for turn, each in zip(turns, ours, strict=True)) / count,
        "transformers": sum(grade(turn, each["text"]) for turn, each in zip(turns, theirs, strict=True)) / count,
        "same_kept": sum(own["kept"] == other["kept"] for own, other in pairs) / count,
        "same_tokens": sum(own["tokens"] == other["tokens"] for own, other in pairs) / count,
        "stored": sum(len(own["kept"] or range(own["prompt_tokens"])) / own["prompt_tokens"] for own in ours) / count,
    }


def _transformers(threads: int, items: list[Any], choices: list[Any]) -> list[list[dict[str, Any]]]:
    """The same answers by the transformers engine, in a process under the same Python.

    vLLM's Transformers backend changes model classes of transformers in its process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [str(python()), "-m", "benchmarks.vllm_reference", json.dumps([items, choices])],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the transformers engine failed:\n{done.stderr[-3000:]}")
    found: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found
