"""Slots in pages of a pool against slots in contiguous buffers: decode attention, and what changes the slots.

    python -m benchmarks.pages --context 8192 --context 32768

All sides take turns in one run. "paged" is a cache in a pool of its own, whose pages are neighbours; "paged, used pool"
one in a pool after 300 other caches of different lengths came and went; "paged, scattered" one that found single free
pages only, the worst case. With a `kv_dtype` the last two pools were used by caches that are not quantized.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import common
from benchmarks.layers import SHAPES, Shape
from foveakv.kernels import attend, prepare
from foveakv.memory.paged import PagedSegments
from foveakv.memory.pool import Pool
from foveakv.memory.segments import Segments

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIES = 3  # layers of each side, so that none stays in the processor's caches
PLAIN = "contiguous"


@torch.inference_mode()
def measure(
    shape: Shape, context: int, dtype: torch.dtype, page_size: int, kv_dtype: str | None, repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Rows of one context and page size."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    heads, dim = shape.kv_heads, shape.head_dim
    dense = torch.randn(2, 1, heads, context, dim).to(dtype)
    keep, positions = torch.ones(1, 1, context, dtype=torch.bool), torch.arange(context)[None]
    pools = {
        PLAIN: None,
        "paged": Pool(page_size=page_size),
        "paged, used pool": _used(rng, heads, dim, dtype, page_size, context),
        "paged, scattered": _scattered(heads, dim, dtype, page_size, context),
    }
    sides: dict[str, list[Segments]] = {}
    for name, pool in pools.items():
        make: Any = Segments.from_dense
        if pool is not None:
            make = functools.partial(PagedSegments.from_dense, pool=pool)
        sides[name] = [make(*dense, keep, positions, kv_dtype=kv_dtype) for _ in range(COPIES)]
    query = torch.randn(1, shape.query_heads, 1, dim).to(dtype)
    new = torch.randn(1, heads, 1, dim).to(dtype)
    at = torch.tensor([[context]], dtype=torch.int32)

    def each(action: Callable[[Segments], Any]) -> dict[str, Callable[[], None]]:
        return {name: lambda held=held: [action(segments) for segments in held] for name, held in sides.items()}  # type: ignore[misc]

    def steady(segments: Segments) -> None:
        segments.append(new, new, at)
        segments.evict(context // 2, [1])

    def flush(segments: Segments) -> None:
        segments.append(*[new.expand(-1, -1, 64, -1)] * 2, at.expand(-1, 64))
        mask = torch.ones(1, 1, segments.max_length, dtype=torch.bool)
        mask[..., 100 : 100 + 64] = False
        segments.keep(mask)

    rows = []
    actions: dict[str, Callable[[Segments], Any]] = {
        "attend": lambda segments: attend(query, segments.runs, shape.scaling),
        "attend + append": lambda segments: (
            segments.append(new, new, at), attend(query, segments.runs, shape.scaling),
        ),
        "append": lambda segments: segments.append(new, new, at),
        "append + evict one": steady,
        "append 64 + flush 64": flush,
        "reorder 5 beams": lambda segments: segments.select_sequences(torch.tensor([0, 0, 2, 3, 3])),
    }  # fmt: skip
    for what, action in actions.items():
        if what.startswith("reorder"):
            for held in sides.values():
                for segments in held:
                    segments.select_sequences(torch.zeros(5, dtype=torch.int64))
        times = common.in_turns(each(action), repeats, warmup=3)
        plain = sorted(times[PLAIN])[repeats // 2]
        rows += [
            {
                "context": context, "page_size": page_size, "dtype": str(dtype), "kv_dtype": kv_dtype,
                "what": what, "side": name, "ms": common.spread(seconds, 1e3 / COPIES),
                "times_contiguous": sorted(seconds)[repeats // 2] / plain,
                "times_contiguous_by_lowest": min(seconds) / min(times[PLAIN]),
                "overhead_share": sides[name][0].overhead_nbytes / sides[name][0].nbytes,
            }
            for name, seconds in times.items()
        ]  # fmt: skip
    return rows


def _used(rng: random.Random, heads: int, dim: int, dtype: torch.dtype, page_size: int, context: int) -> Pool:
    """A pool after many caches, which grew in turns; a few are still there."""
    pool = Pool(page_size=page_size)
    members: list[PagedSegments] = []
    for _ in range(300):
        length = rng.randint(context // 64, context // 8)
        dense = torch.zeros(1, heads, length, dim, dtype=dtype)
        keep = torch.ones(1, 1, length, dtype=torch.bool)
        members.append(PagedSegments.from_dense(dense, dense, keep, torch.arange(length)[None], pool=pool))
        for member in members:
            more = dense[:, :, : rng.randint(0, page_size)]
            member.append(more, more, torch.zeros(1, more.shape[2], dtype=torch.int64))
        if len(members) > 12:
            del members[rng.randrange(len(members))]
    pool.kept = members[:4]  # type: ignore[attr-defined]  # in between
    return pool


def _scattered(heads: int, dim: int, dtype: torch.dtype, page_size: int, context: int) -> Pool:
    """A pool in which no two free pages are neighbours."""
    pool = Pool(page_size=page_size)
    pages = (context // page_size + 2) * heads * (COPIES + 1)
    space = pool.space(torch.device("cpu"), dtype, dim, dim)
    taken = space.take(2 * pages)
    space.keys[: 2 * pages * page_size] = 0
    space.values[: 2 * pages * page_size] = 0
    space.release(taken[::2])
    take = space.take

    def scattered(count: int) -> torch.Tensor:
        found = take(count)
        return found[torch.randperm(count)]

    space.take = scattered  # type: ignore[method-assign]
    return pool


def main(
    context: Annotated[list[int] | None, typer.Option(help="Slots of every run; repeat for several.")] = None,
    page_size: Annotated[list[int] | None, typer.Option(help="Repeat for several.")] = None,
    geometry: Annotated[str, typer.Option(help="As in the other benchmarks.")] = "qwen2.5-vl-7b",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    kv_dtype: Annotated[str | None, typer.Option(help="int8 or int4.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds in which every side runs once.")] = 70,
    seed: Annotated[int, typer.Option()] = common.SEED,
    out: Annotated[Path | None, typer.Option(help="Write all rows to this JSON file.")] = None,
) -> None:
    """Compare slots in pages with slots in contiguous buffers."""
    prepare("cpu", itemsize=DTYPES[dtype].itemsize)
    rows: list[dict[str, Any]] = []
    for slots in context or [8192, 32768]:
        for size in page_size or [64]:
            rows += measure(SHAPES[geometry], slots, DTYPES[dtype], size, kv_dtype, repeats, seed)
            _show(rows[-24:], size)
    if out is not None:
        out.write_text(
            json.dumps({"command": common.command(), "machine": common.machine(seed), "rows": rows}, indent=1)
        )


def _show(rows: list[dict[str, Any]], size: int) -> None:
    table = Table(title=f"{rows[0]['context']} slots, pages of {size}: ms, and times contiguous (median, lowest)")
    names = list(dict.fromkeys(row["side"] for row in rows))
    for name in ("", *names):
        table.add_column(name)
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = [
            f"{row['ms']['median']:.3f}  {row['times_contiguous']:.2f} {row['times_contiguous_by_lowest']:.2f}"
            for row in rows
            if row["what"] == what
        ]
        table.add_row(what, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
