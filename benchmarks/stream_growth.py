"""What grows with all tokens that a stream has read: `python -m benchmarks.stream_growth` prints milliseconds.

For a block of 800 tokens after 10,000 to 1,000,000 that were read, with 4,096 slots stored per head, one thread: the
map of the context (once per block), and the columns over which a layer decides (once per layer and block).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from foveakv.core.prompt import IMAGE, PromptMap
from foveakv.engines.transformers.blocks import Union

BLOCK, SLOTS, HEADS = 800, 4096, 4


def best(run: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of 15 runs."""
    times = []
    for _ in range(15):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def main() -> None:
    """Print a line for each length."""
    torch.set_num_threads(1)
    new = PromptMap(torch.full((1, BLOCK), IMAGE, dtype=torch.int8))
    for read in (10_000, 100_000, 1_000_000):
        before = PromptMap(torch.full((1, read), IMAGE, dtype=torch.int8))
        block: Any = SimpleNamespace(context=before.concat(new), mode="context", start=read)
        stored = torch.arange(0, read, read // SLOTS)[:SLOTS]
        slots = torch.cat([stored, torch.arange(read, read + BLOCK)]).expand(1, HEADS, -1)
        segments: Any = SimpleNamespace(positions=slots.clone)
        maps, layer = best(lambda b=before: b.concat(new)), best(lambda s=segments, b=block: Union.of(s, b))  # type: ignore[misc]
        print(f"{read:>9,} tokens read: {maps:.2f} ms per block, {layer:.2f} ms per layer and block")


if __name__ == "__main__":
    main()
