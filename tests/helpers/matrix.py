"""Every method on every family: settings for prompts of about fifty tokens, and one way to run and to check them.

Methods come from the registry. One without an entry here gets `budget=0.5`, so a new method is covered from its first
day.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import families
import torch
from masked_reference import Trace, largest_difference, masked, recorded, stayed
from torch import Tensor

import foveakv

METHODS = foveakv.methods.available()

# [layers][KV heads] for `sparsemm`: no file, no model.
HEAD_SCORES = [[0.1, 0.4], [0.0, 0.9], [0.3, 0.2], [0.05, 0.0]]
# Options without which a method cannot be made.
NEEDED: dict[str, dict[str, Any]] = {"sparsemm": {"head_scores": HEAD_SCORES}}
# Options under which a method evicts something from a prompt of fifty tokens, within six decoded ones.
SMALL: dict[str, dict[str, Any]] = {
    "full": {},
    "hae": {"relative": True, "r": 0.9, "alpha": None, "budget": 0.7, "recycle_bin_size": 2},
    "hybridkv": {"budget": 0.5, "window": 4, "chunk_size": 4, "k_ratio": 0.1, "theta": 0.65},
    "snapkv": {"budget": 0.5, "window": 6},
    "adakv": {"budget": 0.5, "window": 6},
    "pyramidkv": {"budget": 0.5, "window": 6},
    "sparsemm": {"budget": 0.5, "window": 6, "head_scores": HEAD_SCORES},
    "mixkv": {"budget": 0.5, "window": 6},
    "quest": {"budget": 0.5, "page_size": 4, "full_layers": 1},
    "fastv": {"layer": 1, "ratio": 0.6},
    "mustdrop": {"layers": "0,2", "target_visual_tokens": 0.3},
    "random": {"budget": 0.7},
}
# Options under which nothing is evicted; None where a method has no such options.
EVERYTHING: dict[str, dict[str, Any] | None] = {
    "hae": {"r": 0.0},
    "h2o": {"budget": 10_000},
    "streaming": {"budget": 10_000},
    "fastv": {"layer": 1, "ratio": 1e-9},
    "mustdrop": {"layers": "0,2", "r": 0.0},
}
# More options of the methods that have them, each checked on a few families.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("hae", {"mode": "mark"}),
    ("hae", {"mode": "mark", "restore": False}),
    ("hae", {"score": "frequency+importance"}),
    ("hae", {"per_head_scores": True}),
    ("hae", {"ddes": False, "budget": None}),
    ("hae", {"dap": False, "r": None, "relative": False}),
    ("hae", {"criterion": "dual+variance"}),
    ("hae", {"compress_prompt": False}),
    ("hae", {"recent": 4, "sink": 2}),
    ("hae", {"prefill_rows": 8}),
    ("hae", {"target_visual_tokens": 5}),
    ("h2o", {"per_head_scores": False}),
    ("hybridkv", {"classify": "all_static"}),
    ("hybridkv", {"classify": "all_dynamic"}),
    ("hybridkv", {"theta_quantile": 0.5}),
    ("hybridkv", {"rounding": "nearest"}),
    ("hybridkv", {"head_level": False}),
    ("hybridkv", {"type_level": False}),
    ("hybridkv", {"store": "device"}),
    ("hybridkv", {"store": "disk"}),
    ("streaming", {"sink": 0}),
    ("sparsemm", {"ratio": 0.0}),
    ("mixkv", {"intrinsic": "key_norm"}),
    ("mixkv", {"intrinsic": "none"}),
    ("quest", {"full_layers": 0}),
    ("mustdrop", {"decode_stage": False}),
    ("mustdrop", {"target_visual_tokens": None, "r": 1.0, "alpha": 1.0, "protect": 0.5}),
    ("vlcache", {"recent": 0.0, "threshold": 0.3}),
    ("prefixkv", {"sink": 0, "recent": 0}),
    ("lookm", {"merge": "none"}),
]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}


def fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(foveakv.methods.find(name))}


def settings(name: str) -> dict[str, Any]:
    """Options under which the method evicts on the prompts of `families`."""
    if name in SMALL:
        return dict(SMALL[name])
    return {"budget": 0.5} if "budget" in fields(name) else {}


def method(name: str, **options: Any) -> Any:
    """The method with small settings, changed by `options`."""
    return foveakv.methods.get(name, **{**settings(name), **options})


def default(name: str) -> Any:
    """The method with its default settings."""
    return foveakv.methods.get(name, **NEEDED.get(name, {}))


def keeps_everything(name: str) -> Any | None:
    """The method with settings under which it evicts nothing; None when it always evicts."""
    options = EVERYTHING.get(name, {"budget": 1.0} if "budget" in fields(name) else {})
    if options is None:
        return None
    small = {key: value for key, value in settings(name).items() if key in ("window", "head_scores")}
    return foveakv.methods.get(name, **{**small, **options})


@functools.cache
def _model(name: str) -> Any:
    return families.build(name)


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the family, shared by the tests of a process while nothing is left attached to it.

    In half precision it is a fresh one: on the way back the shared weights would have lost half their digits.
    """
    if dtype not in (torch.float32, torch.float64):
        return families.build(name, dtype=dtype)
    shared = _model(name)
    if "foveakv" in str(shared.get_decoder().config._attn_implementation) or "generate" in vars(shared):
        _model.cache_clear()
        shared = _model(name)
    return shared.to(dtype)


@dataclass
class Run:
    """What a run of `generate` gave; `logits` are those of every forward pass."""

    tokens: Tensor
    logits: list[Tensor]
    cache: Any
    session: Any = None
    trace: Trace = ()


def cache_argument(family: str) -> str:
    """The name under which the family's forward takes a cache in this version of transformers."""
    return "cache" if families.accepts(family, "cache") else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache that `generate` returns; its name differs between versions of transformers."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def plain(model: Any, inputs: dict[str, Any], **options: Any) -> Run:
    """The same without compression."""
    torch.manual_seed(0)
    with recorded(model) as logits:
        output = model.generate(**inputs, **{**GREEDY, **options})
    return Run(output.sequences, logits, cache_of(output))


@functools.cache
def plain_batch(family: str) -> Run:
    """The family's batch in fp32 without compression."""
    return plain(model(family), families.batch(family).inputs)


def compressed(model: Any, method: Any, inputs: dict[str, Any], **options: Any) -> Run:
    """Generates inside `compress`, with a trace."""
    torch.manual_seed(0)
    with foveakv.compress(model, method, trace=True) as session, recorded(model) as logits:
        output = model.generate(**inputs, **{**GREEDY, **options})
        return Run(output.sequences, logits, session.cache, session, list(session.trace))


def replayed(model: Any, run: Run, inputs: dict[str, Any], **options: Any) -> Run:
    """What the plain model says when it attends to what the compressed run attended to."""
    left, after = None, run.cache.method.prunes_after
    if after is not None:
        after = run.cache.compressed[after].layer_idx
        left = stayed(run.trace, inputs["input_ids"].shape[1], after)
    torch.manual_seed(0)
    with masked(model, run.trace, left=left, left_after=after or 0), recorded(model) as logits:
        output = model.generate(**inputs, **{**GREEDY, **options})
    return Run(output.sequences, logits, cache_of(output))


def check_against_reference(
    model: Any, run: Run, inputs: dict[str, Any], tolerance: float = 1e-6, **options: Any
) -> None:
    """The compressed run's logits are those of the masked plain model, in all steps.

    A method that merges stores numbers that the plain model does not have, so only the prompt's logits are compared.
    """
    want = replayed(model, run, inputs, **options)
    steps = comparable(run)
    difference = largest_difference(run.logits[:steps], want.logits[:steps])
    assert difference < tolerance, f"{run.cache.method} differs from the masked reference by {difference:.3g}"
    assert steps is not None or torch.equal(run.tokens, want.tokens)


def comparable(run: Run) -> int | None:
    """How many forward passes a masked plain model can follow; None = all."""
    return 1 if run.cache.method.merges else None


def positions_held(run: Run) -> list[Tensor]:
    """For every compressed layer the positions held at the end, [B, H, M]."""
    return [run.cache.kept(layer.layer_idx) for layer in run.cache.compressed]


def storage(root: Any) -> dict[int, int]:
    """Storages of all tensors that can be reached from an object: address -> bytes. Follows containers and objects of
    this package and of transformers' cache module, and no weak references."""
    found: dict[int, int] = {}
    todo, seen = [root], OrderedDict[int, Any]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            memory = item.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif type(item).__module__.startswith(("foveakv", "transformers.cache_utils")):
            todo += getattr(item, "__dict__", {}).values()
            todo += [
                getattr(item, slot)
                for cls in type(item).__mro__
                for slot in getattr(cls, "__slots__", ())
                if hasattr(item, slot)
            ]
    found.pop(0, None)  # empty tensors have no address
    return found


def check_storage(run: Run) -> None:
    """The report's bytes are those of the tensors that the cache holds, and nothing large hides elsewhere."""
    report, cache = run.session.report, run.cache
    layers = storage([list(cache.layers), cache.state])
    runs = len(run.tokens) * cache.geometry.kv_heads * len(cache.compressed)
    uncounted = sum(layers.values()) - report.stored_bytes - report.host_bytes
    assert 0 <= uncounted <= 64 * runs, "more than a few numbers of bookkeeping per run is not in the report"
    cache.trace = None
    elsewhere = sum(size for address, size in storage(cache).items() if address not in layers)
    assert elsewhere <= 64 * len(run.tokens) * cache.seen + 1024, "the cache holds memory outside its layers"
