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

BY = ("part", "repeat", "side")
PLAIN = "vllm"
METHOD = "hae"


def run(recorder: Recorder) -> None:
    """Measure a group of rows per repeat, so that a run can be resumed."""
    settings = recorder.settings
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
        for repeat in range(settings["repeats"]):
            if recorder.has(part="load", repeat=repeat):
                continue
            # New images in each repeat, the same for both sides: vLLM keeps the embeddings of images it has seen.
            items = [(task, 1 + repeat * size + i) for i in range(size)]
            names = list(engines) if repeat % 2 == 0 else list(reversed(engines))
            runs = {name: engines[name].do("load", items=items, tokens=settings["tokens"]) for name in names}
            plain = runs["plain"]
            rows = [_load(PLAIN, plain, plain), _load(side, runs["plugin"], plain)]
            recorder.add({"part": "load", "repeat": repeat, **row} for row in rows)
        if not recorder.has(part="scoring"):
            places = range(10_000, 10_000 + settings["prompts"])
            found = engines["plugin"].do("scoring", items=[(settings["scored"], place) for place in places])
            recorder.add([{"part": "scoring", "repeat": 0, **_scoring(side, found)}])


def _load(side: str, run: Any, plain: Any) -> dict[str, Any]:
    ratios = [own / other for own, other in zip(run["whole_s"], plain["whole_s"], strict=True)]
    return {
        "side": side,
        "prompt_tokens": round(statistics.fmean(run["prompt_tokens"])),
        "side_by_side": run["side_by_side"],
        "preempted": run["preempted"],
        "requests_per_s": len(ratios) / run["seconds"],
        "first_s": spread(run["first_s"], scale=1.0),
        "token_ms": spread(run["token_s"]),
        "whole_s": spread(run["whole_s"], scale=1.0),
        # Each request beside the same request without the plugin.
        "whole_over_plain": spread(ratios, scale=1.0),
        "slower": sum(ratio > 1 for ratio in ratios) / len(ratios),
        "leaked": run["leaked"],
    }


def _scoring(side: str, found: list[dict[str, float]]) -> dict[str, Any]:
    language = [each["prefill_s"] - each["encoder_s"] for each in found]
    return {
        "side": side,
        "prefill_s": spread([each["prefill_s"] for each in found], scale=1.0),
        "encoder_s": spread([each["encoder_s"] for each in found], scale=1.0),
        "scoring_share": spread(
            [each["scoring_s"] / own for each, own in zip(found, language, strict=True)], scale=1.0
        ),
        "moving_share": spread([each["moving_s"] / own for each, own in zip(found, language, strict=True)], scale=1.0),
    }
