"""Generate with a tiny LLaVA on several tensor-parallel ranks, and print what came out as one line of JSON.

A process of its own, since vLLM then starts workers, which must find the plugin by its entry point.
"""

from __future__ import annotations

import json
import sys

import engines

OPTIONS = {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}


def main(path: str, ranks: int) -> None:
    prompts = [engines.prompt("tiny-llava", count, seed=count) for count in (1, 3, 0)]
    with engines.engine(path, "hae", OPTIONS, tensor_parallel_size=ranks) as llm:
        found = []
        for output in engines.generate(llm, prompts):
            tokens, chosen = engines.chosen(output)
            found.append({"tokens": tokens, "chosen": chosen, "report": output.kv_transfer_params})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
