"""Compare methods on streams of cards: `python -m foveakv.evaluation.streams --out FOLDER`.

Every method reads the same streams, block by block, under budgets of a few frames' tokens, and is then asked about
them. Finished streams are in FOLDER/results.jsonl and are not run again, so that a run can be continued or enlarged.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foveakv.errors import InputError
from foveakv.evaluation.stream_items import FRAMES, TASKS, StreamItem, draw, score
from foveakv.methods import get
from foveakv.streams import stream

METHODS = ("infinipotv", "newest_frames", "uniform_frames", "streaming", "snapkv", "random")
BLOCK = 2
"""Frames that are read at once."""


def run_item(model: Any, processor: Any, item: StreamItem, method: str, budget: int | None) -> dict[str, Any]:
    """Read one stream and ask its questions; budget: tokens per head, None for `full`.

    Returns:
        Plain values: the mean score of every task, bytes, the frames with a token left, and seconds of reading.
    """
    opened = stream(model, processor, get(method), budget=budget, block=BLOCK)
    begun = time.perf_counter()
    opened.feed(item.frames, captions=item.captions)
    seconds = time.perf_counter() - begun
    scores: dict[str, list[float]] = {task: [] for task in TASKS}
    replies: dict[str, str] = {}
    for task, turn in item.questions:
        if turn.text not in replies:
            replies[turn.text] = opened.ask(turn.text, max_new_tokens=turn.max_new_tokens)
        scores[task].append(score(task, turn, replies[turn.text]))
    report = opened.report
    return {
        "item": item.number,
        "method": method,
        "budget": budget,
        "scores": {task: sum(found) / len(found) for task, found in scores.items()},
        "bytes": report.bytes,
        "highest_bytes": report.highest_bytes,
        "tokens": report.tokens,
        "kept_frames": len(report.kept_frames),
        "seconds": round(seconds, 2),
        "replies": replies,
    }


def frame_tokens(model: Any, processor: Any, item: StreamItem) -> int:
    """Tokens of one frame with its caption, the most of a stream's."""
    opened = stream(model, processor, get("full"), block=1)
    most, before = 0, 0
    for image, caption in list(zip(item.frames, item.captions, strict=True))[:3]:
        opened.feed(image, captions=[caption])
        most, before = max(most, opened.report.tokens - before), opened.report.tokens
    return most


def table(results: Sequence[dict[str, Any]]) -> str:
    """Means in percent by method and budget, as a Markdown table; only streams that all of them have read."""
    settings = sorted({(r["budget"] is not None, r["blocks"] or 0, r["method"]) for r in results})
    by_setting = {
        key: {r["item"]: r for r in results if (r["budget"] is not None, r["blocks"] or 0, r["method"]) == key}
        for key in settings
    }
    shared = sorted(set.intersection(*(set(found) for found in by_setting.values()))) if by_setting else []
    if not shared:
        raise InputError("no stream has been read by all methods yet")
    lines = [
        f"| method | frames' worth | {' | '.join(TASKS)} | MB | highest MB |",
        f"|{' --- |' * (len(TASKS) + 4)}",
    ]
    for key in settings:
        found = [by_setting[key][item] for item in shared]
        cells = [f"{100 * sum(r['scores'][task] for r in found) / len(found):.0f}" for task in TASKS]
        size = [f"{sum(r[name] for r in found) / len(found) / 1e6:.1f}" for name in ("bytes", "highest_bytes")]
        lines.append(f"| {key[2]} | {key[1] or 'all'} | {' | '.join([*cells, *size])} |")
    return "\n".join([*lines, "", f"{len(shared)} streams of {FRAMES} cards, blocks of {BLOCK}."])


def _run(
    todo: Sequence[tuple[int, str, int | None]], name: str, split: str, minutes: float | None
) -> Iterator[dict[str, Any]]:
    """Results of (stream, method, budget in frames) triples; stops after a stream once the time is over."""
    if not todo:
        return
    from foveakv.models import load

    model, processor = load(name)
    size = frame_tokens(model, processor, draw(0, split=split))
    begun, item = time.monotonic(), None
    for number, method, blocks in todo:
        if item is None or item.number != number:
            if minutes is not None and time.monotonic() - begun > 60 * minutes:
                return
            item = draw(number, split=split)
        budget = None if blocks is None else blocks * size
        yield {**run_item(model, processor, item, method, budget), "blocks": blocks}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module's first lines."""
    parser = argparse.ArgumentParser(prog="python -m foveakv.evaluation.streams", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--items", type=int, default=12, help="streams to read")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas; full is added")
    parser.add_argument("--blocks", default="4,8", help="budgets in frames' tokens, separated by commas")
    parser.add_argument("--model", default="demo", help="model name; others must know the form of the questions")
    parser.add_argument("--split", default="test", choices=("test", "validation"))
    parser.add_argument("--minutes", type=float, default=None, help="start no further stream after this time")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "results.jsonl"
    results = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()] if file.exists() else []
    budgets = [int(text) for text in given.blocks.split(",")]
    settings = [("full", None), *((name, blocks) for blocks in budgets for name in given.methods.split(","))]
    done = {(r["item"], r["method"], r["blocks"]) for r in results}
    todo = [(number, *each) for number in range(given.items) for each in settings if (number, *each) not in done]
    for made in _run(todo, given.model, given.split, given.minutes):
        results.append(made)
        with file.open("a", encoding="utf8") as stored:
            stored.write(json.dumps(made) + "\n")
    print(table([r for r in results if (r["method"], r["blocks"]) in settings]))


if __name__ == "__main__":
    main()
