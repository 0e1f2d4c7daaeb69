"""docs/performance.md from the result files alone: tables, plots, aims reached and missed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.aims import AIMS
from benchmarks.scale import exponent

REASONS = Path(__file__).parent / "reasons.md"
Content = dict[str, Any]
Rows = list[dict[str, Any]]

TITLES = {
    "decode_attention": "Attention and cache update, per layer and token",
    "generate": "Whole models",
    "story": "HAE's story setting",
    "prefill": "Prefill",
    "memory": "Memory",
    "append": "Appending",
    "kvpress": "Against kvpress",
    "scale": "Growth with context and batch",
}
INTROS = {
    "decode_attention": (
        "One layer with random keys and values of a real geometry; no model around it. `x packed` counts "
        "against SDPA over a preallocated full cache with the query group packed as rows, the best full "
        "path in plain PyTorch; `x default` against DynamicCache and transformers' sdpa. `of read` is the "
        "time of a plain parallel sum over the bytes that the step reads, as a share of the step's time: "
        "100% would be as fast as reading once. Medians hide HAE's evictions, one in 64 steps; `by means` "
        "has them in it."
    ),
    "generate": (
        "All sides hold the same prompt and take turns. A prompt is `read` by the model, which gives the "
        "time to the first token, or `filled` with random keys and values through the same cache code "
        "where reading takes minutes. `x best full` counts against the fastest of transformers' default, "
        "StaticCache and our `full`, by medians. Slices of Qwen2.5-VL have random weights. At batch 1 "
        "most of a token's time is reading weights, which no cache method changes."
    ),
    "story": "`generate` as a whole: 1,024 tokens of KV, recycle bin of 128, 512 new tokens, 5 beams.",
    "prefill": (
        "Slices of a text decoder with random weights. `own work` is the library's time after each "
        "layer's attention as a share of a plain prefill, the less noisy figure; `whole` compares whole "
        "prefills; `drift` is how far the plain prefills of that run lie apart."
    ),
    "memory": (
        "Storage bytes of one prompt: slack, positions, side tensors and digests count as stored. Where "
        "the device is the CPU, the host store is the same memory."
    ),
    "append": (
        "New tokens into a long cache, no attention. DynamicCache copies the cache for each token; ours "
        "writes into slack, and the slowest append is the one that grows it."
    ),
    "kvpress": (
        "A text Llama with random weights, the same in both environments and processes. kvpress' AdaKV "
        "masks what it drops and frees nothing; ObservedAttention needs eager attention and is left out "
        "for long prompts."
    ),
    "scale": (
        "One layer as above, at a share of the context and at a fixed number of tokens per head. The "
        "exponent is the slope on log-log axes: 1 grows in proportion, 0 not at all."
    ),
}


def write(results: Path, page: Path) -> None:
    """The page, and its plots in a folder of its name beside it."""
    contents = [content for content in common.read(results) if content.get("benchmark") in TITLES]
    page.parent.mkdir(parents=True, exist_ok=True)
    folder = page.parent / page.stem
    plots = {}
    if contents:
        from benchmarks import plots as drawing

        folder.mkdir(exist_ok=True)
        plots = drawing.draw(contents, folder)
    page.write_text(text(contents, plots), encoding="utf8")


def text(contents: list[Content], plots: dict[str, list[tuple[str, str]]]) -> str:
    """The page's markdown; plots: benchmark -> (path relative to the page, caption)."""
    parts = [
        "# Performance",
        "Written by `python -m benchmarks report` from the files in `benchmarks/results/`; change those or "
        "`benchmarks/`, not this page. Each section names the command that made its figures. Sides run in turns within "
        "one process; figures are medians, ranges in brackets are quartiles. All settings of all methods are in the "
        "files.",
        _missing(contents),
        "## Aims",
        _aims(contents),
    ]
    for name, title in TITLES.items():
        own = [content for content in contents if content["benchmark"] == name]
        parts += [f"## {title}", INTROS[name]]
        if not own:
            parts.append(f"Not run yet: `python -m benchmarks run {name}`")
        for content in own:
            parts += [_heading(content), _TABLES[name](content["rows"]), _settings(content)]
        parts += [f"![{caption}]({path})" for path, caption in plots.get(name, [])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _missing(contents: list[Content]) -> str:
    done = {content["benchmark"] for content in contents if not content["quick"]}
    notes = [f"`{name}` has not been run" for name in TITLES if name not in done]
    notes += [f"`{content['command']}` was interrupted" for content in contents if not content["complete"]]
    notes += [f"`{content['command']}` is a quick run and no measurement" for content in contents if content["quick"]]
    return "Missing: " + "; ".join(notes) + "." if notes else ""


# ---- aims


def reasons(path: Path = REASONS) -> dict[str, str]:
    """Name of an aim -> why it was missed."""
    sections = re.split(r"^## ", path.read_text(encoding="utf8"), flags=re.M)[1:]
    split = (section.partition("\n") for section in sections)
    return {name.strip(): " ".join(body.split()) for name, _, body in split}


def _aims(contents: list[Content]) -> str:
    lines, misses = [], []
    known = reasons()
    for aim in AIMS:
        rows = [
            row
            for content in contents
            if content["benchmark"] == aim.benchmark and not content["quick"]
            for row in content["rows"]
        ]
        checked = aim.check(rows)
        if checked is None:
            lines.append([aim.text, aim.target_text, "", "not measured"])
            continue
        value, what, reached = checked
        extra = "" if what in aim.text.split(":")[0] else f" ({what})"
        lines.append([aim.text, aim.target_text, aim.show(value) + extra, "reached" if reached else "**missed**"])
        if not reached:
            misses.append(f"- {aim.text}: {aim.show(value)}. {known.get(aim.name, 'No reason is given yet.')}")
    page = table(["aim", "target", "measured", ""], lines)
    return page + ("\n\nMissed:\n\n" + "\n".join(misses) if misses else "")


# ---- one section


def _heading(content: Content) -> str:
    machine = content["machine"]
    versions = machine["versions"]
    loads = [row["load"] for row in content["rows"]]
    load = f"load {min(loads):.1f} to {max(loads):.1f}" if loads else "no rows yet"
    facts = [
        machine["cpu"],
        f"{machine['threads']} of {machine['cores']} cores",
        load,
        f"torch {versions['torch']}",
        f"transformers {versions['transformers']}",
        f"foveakv {versions['foveakv']}" + (f" at {machine['commit']}" if machine["commit"] else ""),
        f"seed {machine['seed']}",
    ]
    for side, found in content.get("versions", {}).items():
        if side not in versions:
            facts.append(f"{side} {found[side]} with transformers {found['transformers']}")
    state = "" if content["complete"] else "\n\n**Interrupted: rows are missing.**"
    state += "\n\n**Quick run on tiny sizes: no measurement.**" if content["quick"] else ""
    return f"`{content['command']}`\n\n{', '.join(facts)}.{state}"


def _settings(content: Content) -> str:
    """Settings of each method, budgets aside, folded away."""
    seen: dict[str, None] = {}
    for label, described in content["methods"].items():
        own = {k: v for k, v in described.items() if k not in ("budget", "target_visual_tokens", "method")}
        values = ", ".join(f"{key}={value}" for key, value in own.items())
        name = re.split(r" (?=[\d.])| at ", label)[0]
        seen[f"- `{name}` ({described['method']}): {values or 'no options'}"] = None
    if not seen:
        return ""
    return "<details><summary>Settings beside the budget</summary>\n\n" + "\n".join(seen) + "\n\n</details>"


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


def ms(value: dict[str, float], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['q1']:.{digits}f}-{value['q3']:.{digits}f})"


def _unique(rows: Rows, *keys: str) -> list[Any]:
    found = dict.fromkeys(tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]] for row in rows)
    return list(found)


def _optional(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _decode_attention(rows: Rows) -> str:
    parts = []
    head = ["budget", "method", "ms", "x default", "x packed", "by means", "of read", "GB/s", "stored MB", "hits"]
    for geometry, dtype, backend, context in _unique(rows, "geometry", "dtype", "backend", "context"):
        own = [
            row
            for row in rows
            if (row["geometry"], row["dtype"], row["backend"], row["context"]) == (geometry, dtype, backend, context)
        ]
        lines = [
            [
                f"{row['budget']:.0%}",
                row["method"],
                ms(row["ms"]),
                f"{row['faster_than_default']:.1f}",
                f"{row['faster_than_packed']:.1f}",
                f"{row['faster_than_packed_by_means']:.1f}",
                f"{row['read_share']:.0%}",
                f"{row['gb_per_s']:.1f}",
                f"{row['stored_bytes'] / 1e6:.1f}",
                _optional(row.get("hit_rate"), ".0%"),
            ]
            for row in own
        ]
        parts.append(f"{context:,} tokens, {geometry}, {dtype}, backend {backend}:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def _generate(rows: Rows) -> str:
    parts = []
    head = [
        "method",
        "first token s",
        "ms per token",
        "mean ms",
        "end to end s",
        "x default",
        "x best full",
        "stored MB",
    ]
    for model, context, prompt, batch in _unique(rows, "model", "context", "prompt", "batch"):
        own = [
            row
            for row in rows
            if (row["model"], row["context"], row["prompt"], row["batch"]) == (model, context, prompt, batch)
        ]
        lines = [
            [
                row["method"],
                _optional(row["first_token_s"], ".2f"),
                ms(row["token_ms"], 1),
                f"{row['token_mean_ms']:.1f}",
                _optional(row["end_to_end_s"], ".1f"),
                f"{row['faster_than_default']:.2f}",
                f"{row['faster_than_best_full']:.2f}",
                f"{row['stored_bytes'] / 1e6:.1f}",
            ]
            for row in own
        ]
        many = f", batch {batch}" if batch > 1 else ""
        budget = f"{own[0]['budget']:.0%}"
        parts.append(f"{model}, {context:,} tokens {prompt}{many}, budget {budget}:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def _story(rows: Rows) -> str:
    head = ["method", "end to end s", "ms per token", "x default", "x best full", "stored MB", "flushes"]
    lines = [
        [
            row["method"],
            f"{row['end_to_end_s']['median']:.1f}",
            ms(row["token_ms"], 1),
            f"{row['faster_than_default']:.2f}",
            f"{row['faster_than_best_full']:.2f}",
            f"{row['stored_bytes'] / 1e6:.1f}",
            _optional(row["flushes"], ",d"),
        ]
        for row in rows
    ]
    intro = (
        f"{rows[0]['model']}, {rows[0]['context']:,} prompt tokens, {rows[0]['new_tokens']} new ones:" if rows else ""
    )
    return f"{intro}\n\n{table(head, lines)}"


def _prefill(rows: Rows) -> str:
    parts = []
    for part, context in _unique(rows, "part", "context"):
        own = [row for row in rows if (row["part"], row["context"]) == (part, context)]
        first = own[0]
        lines = []
        for row in own:
            whole = row.get("over_plain")
            faster = row.get("faster_than_plain")
            lines.append(
                [
                    row["method"],
                    ms(row["ms"], 0),
                    _optional(row.get("own_share"), ".2%"),
                    f"{whole:+.1%}" if whole is not None else f"{faster:.2f}x faster" if faster is not None else "",
                ]
            )
        parts.append(
            f"{context:,} tokens, {first['visual']:,} of them visual, {first['layers']} layers, drift "
            f"{first['plain_drift']:.0%}:\n\n{table(['method', 'ms', 'own work', 'whole'], lines)}"
        )
    return "\n\n".join(parts)


def _memory(rows: Rows) -> str:
    parts = []
    head = ["method", "full / stored", "stored MB", "full MB", "on the host MB", "peak / (layer + stored)"]
    for geometry, context, budget, layers in _unique(rows, "geometry", "context", "budget", "layers"):
        own = [row for row in rows if (row["geometry"], row["context"], row["budget"]) == (geometry, context, budget)]
        lines = [
            [
                row["method"],
                f"{row['full_over_stored']:.2f}",
                f"{row['stored_bytes'] / 1e6:.1f}",
                f"{row['full_bytes'] / 1e6:.1f}",
                f"{row['host_bytes'] / 1e6:.1f}" if row["host_bytes"] else "",
                f"{row['peak_over_layer_plus_stored']:.2f}",
            ]
            for row in own
        ]
        parts.append(f"{geometry}, {context:,} tokens, {layers} layers, budget {budget:.0%}:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def _append(rows: Rows) -> str:
    head = ["context", "cache", "tokens", "ms per append", "slowest ms", "all ms", "x DynamicCache"]
    lines = [
        [
            f"{row['context']:,}",
            row["method"],
            f"{row['tokens']:,}",
            ms(row["ms"], 3),
            f"{row['ms']['high']:.1f}",
            f"{row['total_ms']:,.0f}",
            f"{row['faster_than_dynamic']:,.0f}",
        ]
        for row in rows
    ]
    return table(head, lines)


def _kvpress(rows: Rows) -> str:
    head = ["context", "method", "side", "first token s", "ms per token", "stored MB", "attention"]
    lines = [
        [
            f"{row['context']:,} at {row['budget']:.0%}",
            row["method"],
            row["side"],
            f"{row['first_token_s']['median']:.2f}",
            ms(row["token_ms"], 1),
            f"{row['stored_bytes'] / 1e6:.2f}",
            row["attention"],
        ]
        for row in rows
    ]
    return table(head, lines)


def exponents(rows: Rows) -> dict[str, float]:
    """Exponent over context per method; methods with fewer than three contexts have none."""
    found = {}
    for method in _unique(rows, "method"):
        own = [row for row in rows if row["axis"] == "context" and row["method"] == method]
        if len(own) > 2:
            found[method] = exponent([row["context"] for row in own], [row["ms"]["median"] for row in own])
    return found


def _scale(rows: Rows) -> str:
    parts = []
    fitted = exponents(rows)
    for axis, over in (("context", "context"), ("batch", "batch")):
        own = [row for row in rows if row["axis"] == axis]
        if not own:
            continue
        sizes = _unique(own, over)
        head = ["method", *[f"ms at {size:,}" if axis == "context" else f"ms, batch {size}" for size in sizes]]
        head += ["exponent"] if axis == "context" else []
        lines = []
        for method in _unique(own, "method"):
            found = {row[over]: row["ms"] for row in own if row["method"] == method}
            line = [method, *[f"{found[size]['median']:.2f}" if size in found else "" for size in sizes]]
            lines.append(line + ([_optional(fitted.get(method), ".2f")] if axis == "context" else []))
        intro = "Batch 1:" if axis == "context" else f"{own[0]['context']:,} tokens per sequence:"
        parts.append(f"{intro}\n\n{table(head, lines)}")
    return "\n\n".join(parts)


_TABLES: dict[str, Callable[[Rows], str]] = {
    "decode_attention": _decode_attention,
    "generate": _generate,
    "story": _story,
    "prefill": _prefill,
    "memory": _memory,
    "append": _append,
    "kvpress": _kvpress,
    "scale": _scale,
}
