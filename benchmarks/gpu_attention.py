"""Sections of the GPU script that call the attention backends on runs of random keys and values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu_common import Bench, OutOfTimeError, measure
from foveakv import kernels
from foveakv.kernels import reference
from foveakv.memory.layout import slack
from foveakv.memory.runs import Runs

KV_HEADS, DIM = 4, 128  # Qwen2.5-VL-7B
SCALING = DIM**-0.5
LENGTHS = {"ragged": [[1000, 17, 0, 333], [1, 4096, 64, 65]], "uniform": [[2048] * 4] * 2}
RAGGED = (0.2, 0.6, 1.2, 2.0)  # lengths of a layer's heads, relative to their mean
BUDGETS = (0.05, 0.1, 0.2, 0.5)
DEFAULT = "tile 64 warps 4 stages 2 per processor 4"  # what triton_decode chooses for this geometry in 16 bits
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}


def make_runs(lengths: Any, dtype: Any, device: str, dim: int = DIM, poison: bool = False) -> Any:
    """Make runs of lengths [B, H] with free room after each, and NaN in that room if `poison`."""
    batch, heads = lengths.shape
    length = lengths.reshape(-1).to(torch.int64)
    uniform = int(length.min()) == int(length.max())
    room = torch.tensor([slack(n) for n in length.tolist()])
    end = (length + room).cumsum(0)
    start = end - length - room
    rows = int(end[-1])
    keys = torch.randn(rows, dim, device=device, dtype=torch.float32).to(dtype)
    values = torch.randn(rows, dim, device=device, dtype=torch.float32).to(dtype)
    if poison:
        for first, stored, stop in zip(start.tolist(), length.tolist(), end.tolist(), strict=True):
            keys[first + stored : stop] = math.nan
            values[first + stored : stop] = math.nan
    positions = torch.zeros(rows, dtype=torch.int32, device=device)
    return Runs(
        keys, values, positions, start.to(device), length.to(device), batch, heads, int(length.max()), uniform,
        start_host=start, length_host=length,
    )  # fmt: skip


def ragged(batch: int, mean: int) -> Any:
    """Lengths [B, KV_HEADS] with the given mean: the factors of RAGGED, in another order for every sequence."""
    return torch.tensor([[max(1, int(mean * RAGGED[(b + h) % 4])) for h in range(KV_HEADS)] for b in range(batch)])


def attend(backend: str, query: Any, runs: Any) -> Any:
    return kernels.attend(query, runs, SCALING, backend=backend)


def correctness(bench: Bench) -> Iterator[dict[str, Any]]:
    """Largest errors against float64 on the same stored values; `ok` is the tolerance of the tests."""
    for name, dim, kind, q, share in _cases(bench):
        bench.check_time()
        torch.manual_seed(0)
        dtype = getattr(torch, name)
        lengths = torch.tensor([[40, 0], [3, 17]] if bench.smoke else LENGTHS[kind])
        batch, heads = lengths.shape
        runs = make_runs(lengths, dtype, bench.device, dim, poison=True)
        query = torch.randn(batch, heads * bench.group, q, dim, device=bench.device).to(dtype)
        mask = None
        if share is not None:
            mask = torch.rand(batch, 1, q, runs.max_length, device=bench.device) < share
        exact = dataclasses.replace(runs, keys=runs.keys.double(), values=runs.values.double())
        want = reference.attend(query.double(), exact, dim**-0.5, mask, True, True)
        row: dict[str, Any] = {"dtype": name, "dim": dim, "runs": kind, "q": q, "mask": share}
        for backend in ("triton", "blocks"):
            got = kernels.attend(query, runs, dim**-0.5, mask, need_attention_sum=True, need_lse=True, backend=backend)
            row[f"{backend}_ok"] = True
            for what in ("out", "attention_sum", "lse"):
                mine, truth = getattr(got, what).double(), getattr(want, what)
                row[f"{backend}_ok"] &= torch.allclose(mine, truth, rtol=TOLERANCE[name], atol=TOLERANCE[name])
                row[f"{backend}_{what}_error"] = float((mine - truth).nan_to_num(0).abs().max())  # -inf of empty runs
        yield row


def _cases(bench: Bench) -> Iterator[tuple[str, int, str, int, float | None]]:
    """dtype, head dim, kind of runs, new tokens, share of slots that a mask allows. The most likely first."""
    if bench.smoke:
        yield from (("float32", 16, "ragged", 1, share) for share in (None, 0.5))
        return
    for name in ("bfloat16", "float16", "float32"):
        for kind in LENGTHS:
            for q in (1, 3, 40) if name == "bfloat16" else (1, 3):
                for share in (None, 0.5):
                    yield name, DIM, kind, q, share
    for name in ("bfloat16", "float32"):
        for dim in (64, 80, 256):
            yield name, dim, "ragged", 1, 0.5


def graph(bench: Bench) -> Iterator[dict[str, Any]]:
    """A captured triton call, replayed with other queries and with runs that have grown in place."""
    lengths = ragged(1, 40 if bench.smoke else 1600)
    dtype = torch.float32 if bench.smoke else torch.bfloat16
    runs = make_runs(lengths, dtype, bench.device)
    query = torch.randn(1, KV_HEADS * bench.group, 1, DIM, device=bench.device).to(dtype)
    replay, out = _capture(bench, lambda: attend("triton", query, runs)[0])
    for step in range(3):
        query.copy_(torch.randn(query.shape, device=bench.device))
        if step:
            runs.length.add_(1)
            runs.max_length += 1  # for the call to compare with; the captured one knows the old value
        replay()
        eager = attend("triton", query, runs)[0]
        row = {"step": step, "captured": not bench.smoke, "largest": runs.max_length}
        yield row | {"equal": bool(torch.equal(out() if bench.smoke else out, eager))}
    if not bench.smoke:
        yield measure(bench, {"eager": lambda: attend("triton", query, runs), "replayed": replay})


def _capture(bench: Bench, call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """Replays and static output of a captured call; without CUDA the call itself, twice."""
    if bench.smoke:
        return call, call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = call()
    return captured.replay, out


def decode(bench: Bench) -> Iterator[dict[str, Any]]:
    """One layer and token: full-cache attention against compressed runs of each budget, ragged and uniform."""
    dtype = torch.float32 if bench.smoke else torch.bfloat16
    sizes = [(1, 64)] if bench.smoke else [(b, c * 1024) for c in (8, 32, 128) for b in (1, 8)]
    budgets = BUDGETS[-1:] if bench.smoke else BUDGETS
    with torch.inference_mode():
        for batch, context in sizes:
            torch.manual_seed(0)
            query = torch.randn(batch, KV_HEADS * bench.group, 1, DIM, device=bench.device).to(dtype)
            sides, stored = _full_sides(bench, query, context)
            for budget in budgets:
                slots = int(context * budget)
                for kind, lengths in (
                    ("ragged", ragged(batch, slots)),
                    ("uniform", torch.full((batch, KV_HEADS), slots)),
                ):
                    runs = make_runs(lengths, dtype, bench.device)
                    for backend in ("triton", "blocks"):
                        name = f"{backend} {budget:.0%} {kind}"
                        sides[name] = functools.partial(attend, backend, query, runs)
                        stored[name] = int(runs.length.sum()) * DIM * 2 * runs.keys.element_size()
            taken = measure(bench, sides)
            for name, times in taken.items():
                yield {
                    "context": context,
                    "batch": batch,
                    "side": name,
                    "ms": times,
                    "gb_per_s": stored[name] / times["median"] / 1e6,
                    "faster_than_default": taken["full, default sdpa"]["median"] / times["median"],
                    "faster_than_packed": taken["full, packed sdpa"]["median"] / times["median"],
                }
            del sides, runs


def _full_sides(bench: Bench, query: Any, context: int) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Full-cache attention: as transformers calls it, packed, with flash kernels if available, and FoveaKV's own."""
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch = query.shape[0]
    runs = make_runs(torch.full((batch, KV_HEADS), context), query.dtype, bench.device)
    shape = (batch, KV_HEADS, -1, DIM)
    keys, values = (t.view(shape)[:, :, :context] for t in (runs.keys, runs.values))
    packed = query.view(batch, KV_HEADS, bench.group, DIM)
    module = SimpleNamespace(num_key_value_groups=bench.group, is_causal=True, training=False)

    def sdpa(rows: Any, kind: Any = None) -> Any:
        with contextlib.nullcontext() if kind is None else sdpa_kernel(kind):
            return F.scaled_dot_product_attention(rows, keys, values, scale=SCALING)

    sides: dict[str, Callable[[], Any]] = {
        "full, default sdpa": lambda: sdpa_attention_forward(module, query, keys, values, None, scaling=SCALING),
        "full, packed sdpa": lambda: sdpa(packed),
        "full, flash sdpa packed": lambda: sdpa(packed, SDPBackend.FLASH_ATTENTION),
        "full, cudnn sdpa packed": lambda: sdpa(packed, SDPBackend.CUDNN_ATTENTION),
        "full, triton": lambda: attend("triton", query, runs),
    }
    with contextlib.suppress(ImportError):
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

        rows, k, v = (t.transpose(1, 2) for t in (query, keys, values))
        sides["full, flash_attn"] = lambda: flash_attn_with_kvcache(rows, k, v, softmax_scale=SCALING)
    for name in list(sides):
        if "flash" in name or "cudnn" in name:  # may not exist for this device or type
            try:
                sides[name]()
            except Exception as error:
                print(f"  {name}: not available ({str(error).splitlines()[0][:100]})", flush=True)
                del sides[name]
    size = batch * KV_HEADS * context * DIM * 2 * query.element_size()
    return sides, dict.fromkeys(sides, size)


def tune(bench: Bench) -> Iterator[dict[str, Any]]:
    """The launch settings around the default, for few and for many slots."""
    from foveakv.kernels import triton_decode

    dtype = torch.float32 if bench.smoke else torch.bfloat16
    sizes = [(1, 64)] if bench.smoke else [(1, 800), (1, 13_000), (8, 6500), (1, 64_000)]
    choices = [(16, 4, 2, 1)] if bench.smoke else [
        (tile, warps, stages, per) for per in (4, 2, 8) for tile in (64, 32, 128) for warps in (4, 2, 8)
        for stages in (2, 3)
    ]  # fmt: skip
    for batch, mean in sizes:
        runs = make_runs(ragged(batch, mean), dtype, bench.device)
        query = torch.randn(batch, KV_HEADS * bench.group, 1, DIM, device=bench.device).to(dtype)
        processors = triton_decode._processors(query.device)
        sides: dict[str, Callable[[], Any]] = {}
        for tile, warps, stages, per in choices:
            slots = runs.keys.shape[0] * triton_decode.PROGRAMS_PER_PROCESSOR // per
            split = triton_decode.split_size(slots, tile, processors)
            settings: dict[str, Any] = {"tile": tile, "warps": warps, "stages": stages, "split": split}
            call = functools.partial(triton_decode.attend_with_lse, query, runs, SCALING, **settings)
            name = f"tile {tile} warps {warps} stages {stages} per processor {per}"
            try:
                bench.check_time()
                call()
            except OutOfTimeError:
                break
            except Exception as error:  # too much shared memory for this device
                print(f"  {name}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            sides[name] = call
        if not sides:
            raise OutOfTimeError
        until, bench.until = bench.until, math.inf  # what was compiled is also measured
        taken = sorted(measure(bench, sides).items(), key=lambda item: item[1]["median"])
        bench.until = until
        best = {"best": taken[0][0], "ms": taken[0][1], "tried": len(taken)}
        default = next((times for name, times in taken if name == DEFAULT), taken[0][1])
        yield {"batch": batch, "mean_slots": mean} | best | {"default": default, "all": dict(taken)}
