"""Answer items of the evaluation with transformers, for `benchmarks.vllm_accuracy`; prints one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from foveakv.evaluation import tasks
from foveakv.evaluation.decoding import GreedyDecoder
from foveakv.evaluation.replay import read
from foveakv.methods import get
from foveakv.models import build_inputs, load


def main(items: list[tuple[str, int, int]], choices: list[dict[str, Any] | None]) -> list[list[dict[str, Any]]]:
    """items: task, number, most tokens. choices: options of HAE; None = a full cache."""
    model, processor = load("demo", dtype="float32")
    decoder = GreedyDecoder(model, processor)
    found = []
    for task, number, tokens in items:
        item = tasks.find(task).item(number)
        inputs = build_inputs(processor, item.turns[0].text, item.images, model=model)
        own = []
        for options in choices:
            cache, logits = read(model, inputs, get("full") if options is None else get("hae", **options))
            kept = None if options is None or not item.images else cache.kept(0)[0, 0].tolist()
            replies, _ = decoder.reply_all([cache], [logits], tokens)
            own.append({"tokens": replies[0], "text": decoder.text(replies[0]), "kept": kept})
        found.append(own)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*json.loads(sys.argv[1]))))
