"""FoveaKV's side of the kvpress benchmark, in its own process."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import transformers
from text_llama import build, decode, main, prompt

import foveakv
from foveakv import methods
from foveakv.engines.transformers import compat


def measure(spec: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    model, ids = build(spec), prompt(spec)
    model(ids[:, :64], use_cache=True)
    argument = compat.cache_argument(model)
    budget = spec["budget"]
    chosen = {
        "full": methods.get("full"),
        "snapkv": methods.get("snapkv", budget=budget, window=32, kernel=5),
        "adakv": methods.get("adakv", budget=budget, window=32),
        "h2o": methods.get("h2o", budget=budget),
        "hybridkv": methods.get("hybridkv", budget=budget),
    }
    for name, method in chosen.items():
        with foveakv.compress(model, method) as session:
            start = time.perf_counter()
            logits = model(ids, use_cache=True, logits_to_keep=1).logits
            first = time.perf_counter() - start
            cache = session.cache

            def step(token: torch.Tensor, position: torch.Tensor, cache: Any = cache) -> torch.Tensor:
                return model(token, **{argument: cache}, position_ids=position).logits

            times = decode(step, logits, spec["context"], spec["tokens"])
            stored = cache.stored_nbytes
        rows.append(
            {
                "method": name,
                "first_token_s": first,
                "token_ms": times,
                "stored_bytes": stored,
                "attention": "sdpa",
                "settings": method.describe(),
            }
        )
        del cache, session
        gc.collect()
    return rows


if __name__ == "__main__":
    main(
        measure,
        {
            "foveakv": foveakv.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )
