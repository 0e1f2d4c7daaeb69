"""The project's performance aims, checked against result rows. reasons.md explains the missed ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import serving_table

Row = dict[str, Any]
Found = tuple[float, str] | None  # the figure and its label; None = not measured


@dataclass(frozen=True)
class Aim:
    """One aim. `name` is its heading in reasons.md; `find` receives all rows of the benchmark."""

    name: str
    benchmark: str
    text: str
    target: float
    unit: str  # "x" or "%"
    at_least: bool
    find: Callable[[list[Row]], Found]

    def check(self, rows: list[Row]) -> tuple[float, str, bool] | None:
        """Return the figure, its label, and whether it reaches the target; None if nothing was measured."""
        found = self.find(rows)
        if found is None:
            return None
        value, what = found
        return value, what, value >= self.target if self.at_least else value <= self.target

    def show(self, value: float) -> str:
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f}x"

    @property
    def target_text(self) -> str:
        number = f"{self.target:.0%}" if self.unit == "%" else f"{self.target:g}x"
        return f"{'at least' if self.at_least else 'at most'} {number}"


def _where(rows: Iterable[Row], **fields: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


def _field(name: str, **fields: Any) -> Callable[[list[Row]], Found]:
    """Take a field of the row that has the given fields."""

    def find(rows: list[Row]) -> Found:
        found = [row for row in _where(rows, **fields) if row.get(name) is not None]
        return (found[0][name], found[0]["method"]) if found else None

    return find


def _worst(name: str, **fields: Any) -> Callable[[list[Row]], Found]:
    """Take the highest value of a field, and the method that has it."""

    def find(rows: list[Row]) -> Found:
        found = [row for row in _where(rows, **fields) if row.get(name) is not None]
        if not found:
            return None
        row = max(found, key=lambda row: row[name])
        return row[name], f"highest: {row['method']}"

    return find


def _lesser(name: str, other: str, **fields: Any) -> Callable[[list[Row]], Found]:
    """Take the lower of two fields of the row that has the given fields."""

    def find(rows: list[Row]) -> Found:
        found = _where(rows, **fields)
        return (min(found[0][name], found[0][other]), found[0]["method"]) if found else None

    return find


PEERS = {"snapkv": "SnapKVPress", "adakv": "AdaKVPress(SnapKVPress)", "h2o": "ObservedAttentionPress"}


def _against_kvpress(value: Callable[[Row], float]) -> Callable[[list[Row]], Found]:
    """Take the lowest ratio kvpress / FoveaKV over all methods and contexts that both sides have."""

    def find(rows: list[Row]) -> Found:
        ratios = []
        for method, press in PEERS.items():
            for own in _where(rows, side="foveakv", method=method):
                same = {"context": own["context"], "budget": own["budget"]}
                ratios += [
                    (value(peer) / value(own), f"lowest: {method} at {own['context']:,}")
                    for peer in _where(rows, side="kvpress", method=press, **same)
                ]
        return min(ratios) if ratios else None

    return find


def _per_token(model: str, method: str) -> Callable[[list[Row]], Found]:
    """Take the lower of the speed-ups by median and by mean; the mean includes HAE's flushes."""

    def find(rows: list[Row]) -> Found:
        found = _where(rows, model=model, asked=32768, budget=0.1, method=method, batch=1)
        if not found:
            return None
        row = found[0]
        by_median, by_mean = row["faster_than_best_full"], row["faster_than_best_full_by_means"]
        return min(by_median, by_mean), f"against {row['best_full_path']}"

    return find


def _side_by_side(rows: list[Row]) -> Found:
    """Take the median ratio of requests side by side with and without the plugin."""
    plain = {row["repeat"]: row for row in _where(rows, part="load", side="vllm")}
    own = [row for row in _where(rows, part="load") if row["side"] != "vllm"]
    ratios = [row["side_by_side"] / plain[row["repeat"]]["side_by_side"] for row in own]
    return (statistics.median(ratios), own[0]["side"]) if ratios else None


def _of_plugin(name: str, which: str, part: str) -> Callable[[list[Row]], Found]:
    """Take the highest "median" or "high" of a field of the plugin's rows."""

    def find(rows: list[Row]) -> Found:
        own = [row for row in _where(rows, part=part) if row["side"] != "vllm"]
        return (max(row[name][which] for row in own), own[0]["side"]) if own else None

    return find


_DECODE = {"geometry": "qwen2.5-vl-7b", "dtype": "fp32", "context": 32768, "budget": 0.1}

AIMS: list[Aim] = [
    *[
        Aim(
            f"decode-{method}",
            "decode_attention",
            f"{method}: attention and cache update at 32k and 10% against packed SDPA over the full cache",
            target,
            "x",
            True,
            _lesser("faster_than_packed", "faster_than_packed_by_means", method=method, **_DECODE),
        )
        for method, target in (("hae", 8), ("snapkv", 8), ("adakv", 7), ("hybridkv", 4))
    ],
    *[
        Aim(
            f"read-{method}",
            "decode_attention",
            f"{method}: bytes per second of the step at 32k and 10%, as a share of a plain sum over the same bytes",
            0.6,
            "%",
            True,
            _field("read_share", method=method, **_DECODE),
        )
        for method in ("full", "hae", "snapkv", "adakv", "hybridkv")
    ],
    *[
        Aim(
            f"token-{method}-{model}",
            "generate",
            f"{method}: time per token of the whole model ({model}) at 32k and 10% against the best full path",
            1.52,
            "x",
            True,
            _per_token(model, method),
        )
        for model in ("demo", "qwen2.5-vl-7b")
        for method in ("hybridkv", "hae")
    ],
    Aim(
        "story-hae",
        "story",
        "hae: 512 new tokens with 5 beams, end to end, against the faster full cache",
        1.5,
        "x",
        True,
        _field("faster_than_best_full", method="hae", beams=5),
    ),
    *[
        Aim(
            f"prefill-{size}-{method}",
            "prefill",
            f"{method}: own work as a share of a plain prefill of {size} tokens",
            target,
            "%",
            False,
            _field("own_share", part="overhead", context=context, method=method),
        )
        for context, size, target in ((2048, "2k", 0.05), (8192, "8k", 0.03))
        for method in ("hae", "hybridkv", "snapkv", "adakv", "h2o")
    ],
    Aim(
        "prefill-drop",
        "prefill",
        "hae with drop_hidden_states, 75% of the visual tokens of 8k dropped, against a plain prefill",
        1.5,
        "x",
        True,
        _field("faster_than_plain", part="drop", context=8192),
    ),
    *[
        Aim(
            f"serving-{name}-{tokens}",
            "serving",
            f"{what}, answers of {tokens} tokens, every method at 10%",
            target,
            "x",
            True,
            serving_table.lowest(field, tokens, against),
        )
        for name, what, target, field, against in (
            ("together", "requests side by side against full caches in the same memory", 5, "side_by_side", "full"),
            ("speed", "tokens per second against one request at a time", 3, "tokens_per_second", "one at a time"),
        )
        for tokens in (96, 256)
    ],
    Aim(
        "memory-peak",
        "memory",
        "peak during prefill over (one full layer + stored bytes), every method at 10%",
        1.15,
        "x",
        False,
        _worst("peak_over_layer_plus_stored", budget=0.1),
    ),
    Aim(
        "memory-hybridkv",
        "memory",
        "hybridkv: full bytes over device bytes at 10%, digests counted",
        8.5,
        "x",
        True,
        _field("full_over_stored", budget=0.1, method="hybridkv"),
    ),
    Aim(
        "kvpress-time",
        "kvpress",
        "kvpress' time per token over FoveaKV's, same method, context and budget",
        1.0,
        "x",
        True,
        _against_kvpress(lambda row: row["token_ms"]["median"]),
    ),
    Aim(
        "kvpress-bytes",
        "kvpress",
        "kvpress' stored bytes over FoveaKV's, same method, context and budget",
        1.0,
        "x",
        True,
        _against_kvpress(lambda row: row["stored_bytes"]),
    ),
    Aim(
        "vllm-side-by-side",
        "vllm",
        "hae in vLLM at a quarter of the visual tokens: requests side by side in the same pool, against vLLM alone",
        2.0,
        "x",
        True,
        _side_by_side,
    ),
    Aim(
        "vllm-scoring",
        "vllm",
        "hae in vLLM: scoring as a share of the prefill, image encoder excluded",
        0.03,
        "%",
        False,
        _of_plugin("scoring_share", "median", "scoring"),
    ),
    Aim(
        "vllm-slower",
        "vllm",
        "hae in vLLM: the slowest request against the same request without the plugin, under load",
        1.0,
        "x",
        False,
        _of_plugin("whole_over_plain", "high", "load"),
    ),
]
