"""The plugin in vLLM under load: requests in a fixed pool of blocks with and without it, and the time of scoring.

Both sides are engines of their own with the embedded model, and take turns. All requests are sent at once, as in
`vllm bench serve` with an infinite rate.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import Recorder, spread
from benchmarks.vllm_sides import python, sides
from foveakv.methods import get

BY = ("part", "side")
PLAIN = "vllm"
METHOD = "hae"


def run(recorder: Recorder) -> None:
    """Measure all rows of one group: the sides must run in the same hour."""
    settings = recorder.settings
    if recorder.has(part="load") and recorder.has(part="scoring"):
        return
    python()
    options = {"ddes": False, "target_visual_tokens": settings["share"]}
    side = f"{METHOD} {settings['share']:g}"
    recorder.method(side, get(METHOD, **options))
    size, task = settings["requests"], settings["task"]
    given = {"blocks": settings["blocks"]}
    with sides(
        settings["threads"], plain={"method": None, "options": {}, **given},
        plugin={"method": METHOD, "options": options, **given},
    ) as engines:  # fmt: skip
        recorder.content["versions"] = {"vllm": engines["plain"].hello["versions"]}
        recorder.content["machine"]["threads"] = settings["threads"]
        for engine in engines.values():
            engine.do("load", items=[(task, 0)], tokens=2)
        loads: dict[str, list[Any]] = {name: [] for name in engines}
        for repeat in range(settings["repeats"]):
            # New images in each repeat, the same for both sides: vLLM keeps the embeddings of images it has seen.
            items = [(task, 1 + repeat * size + i) for i in range(size)]
            for name, engine in engines.items():
                loads[name].append(engine.do("load", items=items, tokens=settings["tokens"]))
        places = range(10_000, 10_000 + settings["prompts"])
        scoring = engines["plugin"].do("scoring", items=[(task, place) for place in places])
    plain = loads["plain"]
    recorder.add(
        [
            _load(PLAIN, settings, plain, plain),
            _load(side, settings, loads["plugin"], plain),
            _scoring(side, scoring),
        ]
    )


def _load(side: str, settings: dict[str, Any], runs: list[Any], plain: list[Any]) -> dict[str, Any]:
    ratios = [
        own / other
        for run, beside in zip(runs, plain, strict=True)
        for own, other in zip(run["whole_s"], beside["whole_s"], strict=True)
    ]
    return {
        "part": "load",
        "side": side,
        "prompt_tokens": round(statistics.fmean(runs[0]["prompt_tokens"])),
        "side_by_side": statistics.median(run["side_by_side"] for run in runs),
        "preempted": statistics.median(run["preempted"] for run in runs),
        "requests_per_s": spread([settings["requests"] / run["seconds"] for run in runs], scale=1.0),
        "first_s": spread([value for run in runs for value in run["first_s"]], scale=1.0),
        "token_ms": spread([value for run in runs for value in run["token_s"]]),
        "whole_s": spread([value for run in runs for value in run["whole_s"]], scale=1.0),
        # Each request beside the same request without the plugin.
        "whole_over_plain": spread(ratios, scale=1.0),
        "slower": sum(ratio > 1.02 for ratio in ratios) / len(ratios),
        "leaked": max(run["leaked"] for run in runs),
    }


def _scoring(side: str, found: list[dict[str, float]]) -> dict[str, Any]:
    language = [each["prefill_s"] - each["encoder_s"] for each in found]
    return {
        "part": "scoring",
        "side": side,
        "prefill_s": spread([each["prefill_s"] for each in found], scale=1.0),
        "encoder_s": spread([each["encoder_s"] for each in found], scale=1.0),
        "scoring_share": spread(
            [each["scoring_s"] / own for each, own in zip(found, language, strict=True)], scale=1.0
        ),
        "moving_share": spread([each["moving_s"] / own for each, own in zip(found, language, strict=True)], scale=1.0),
    }
