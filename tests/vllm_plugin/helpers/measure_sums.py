"""Measure the attention sums of one layer and one request, beside vLLM's attention kernel for the same step.

    OMP_NUM_THREADS=1 python tests/vllm_plugin/helpers/measure_sums.py

One thread, blocks of 128 slots, random keys and values. Prints the best of 15 times in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

HEADS, GROUP, DIM, SIZE = 4, 7, 128, 128  # Qwen2.5-VL-7B
LENGTHS = (512, 2048, 8192, 32768)


def best(function: Callable[[], Any]) -> float:
    """Return the best time of a call, in milliseconds."""
    times = []
    for _ in range(18):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[3:])


def measure(dtype: torch.dtype, tokens: int) -> tuple[float, float]:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from foveakv.engines.vllm.cpu_store import CPUStore, _halves
    from foveakv.engines.vllm.decoding import attention_sums

    isa, blocks, name = _get_attn_isa(dtype, SIZE, DIM, "auto"), tokens // SIZE, "layers.0.attn"
    cache = torch.randn(blocks, HEADS, SIZE, 2 * DIM).to(dtype)
    store = CPUStore({name: SimpleNamespace(isa=isa)}, {name: cache}, SIZE)
    table, query = torch.randperm(blocks), torch.randn(1, HEADS * GROUP, DIM).to(dtype)
    output, ends = torch.empty_like(query), torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, seq_lens=lengths, dtype=dtype,
        query_start_loc=ends, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True, dynamic_causal=None,
        kv_cache_dtype="auto",
    )  # fmt: skip
    keys, values = _halves(cache)

    def kernel() -> None:
        ops.cpu_attention_with_kv_cache(
            query=query, key_cache=keys, value_cache=values, output=output, query_start_loc=ends, seq_lens=lengths,
            scale=DIM**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=table[None].int(),
            softcap=0, scheduler_metadata=plan, s_aux=None, dynamic_causal=None,
        )  # fmt: skip

    def sums() -> torch.Tensor:
        return attention_sums(store.dot(0, table, tokens, query) * DIM**-0.5, HEADS)

    return best(kernel), best(sums)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in (torch.float32, torch.bfloat16):
        for count in LENGTHS:
            print(f"{each}, {count} tokens: kernel %.2f ms, attention sums %.2f ms" % measure(each, count))
