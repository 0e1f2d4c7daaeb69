"""Every method on every family: settings for prompts of about fifty tokens, and one way to run and to check them.

Methods come from the registry. One without an entry here gets `budget=0.5`, so a new method is covered from its first
day.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import families
import torch
import witness
from masked_reference import Stored, Trace, largest_difference, masked, recorded
from torch import Tensor
from transformers import LogitsProcessor

import foveakv
from foveakv.methods.hae_options import of_stages

METHODS = foveakv.methods.available()

# [layers][KV heads] for `sparsemm`: no file, no model.
HEAD_SCORES = [[0.1, 0.4], [0.0, 0.9], [0.3, 0.2], [0.05, 0.0]]
# Options without which a method cannot be made.
NEEDED: dict[str, dict[str, Any]] = {"sparsemm": {"head_scores": HEAD_SCORES}}
# Options under which a method evicts something from a prompt of fifty tokens, within six decoded ones.
SMALL: dict[str, dict[str, Any]] = {
    "full": {},
    "hae": {"relative": True, "r": 0.9, "alpha": None, "budget": 0.7, "recycle_bin_size": 2},
    # Plain views (`plain_views.py`) score digests as they are, which quantized ones only approximate.
    "hybridkv": {
        "budget": 0.5,
        "window": 4,
        "chunk_size": 4,
        "k_ratio": 0.1,
        "theta": 0.65,
        "digest_dtype": "model",
    },
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
    "tova": {"budget": 10_000},
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
    ("hae", {"dap": False, "r": None, "relative": True}),
    ("hae", {"criterion": "dual+variance"}),
    ("hae", {"compress_prompt": False}),
    ("hae", {"recent": 4, "sink": 2}),
    ("hae", {"prefill_rows": 8}),
    ("hae", {"target_visual_tokens": 5}),
    ("hae", {"score_layer": 0, "rows": "sum"}),
    ("hae", {"score_layer": (0, 1), "target_visual_tokens": 5, "value_norm": False}),
    ("hae", {"score_layer": 1, "early_layers": "own"}),
    ("hae", {"score_layer": 0.9, "early_layers": "first", "ddes": False, "budget": None}),
    ("hae", {"candidates": "prompt"}),
    ("hae", {"scores": "shared"}),
    (
        "hae",
        {"scores": "shared", "candidates": "prompt", "dap": False, "r": None, "relative": True, "score_layer": "0,1"},
    ),
    ("h2o", {"per_head_scores": False}),
    ("hybridkv", {"classify": "all_static"}),
    ("hybridkv", {"classify": "all_dynamic"}),
    ("hybridkv", {"theta_quantile": 0.5}),
    ("hybridkv", {"theta": "auto", "window": "auto"}),
    ("hybridkv", {"rounding": "nearest"}),
    ("hybridkv", {"head_level": False}),
    ("hybridkv", {"type_level": False}),
    ("hybridkv", {"store": "device"}),
    ("hybridkv", {"store": "disk"}),
    ("streaming", {"sink": 0}),
    ("snapkv", {"window": "auto"}),
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
    small = settings(name)
    if name == "hae":  # without settings of a stage that the options disable
        small = of_stages(small, options)
    return foveakv.methods.get(name, **{**small, **options})


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


class Choices(LogitsProcessor):
    """What `generate` chose from at every step; made with an earlier run, it makes `generate` choose what that one did.

    The last digits of a logit depend on the processor, the backend and the batch. Two runs that choose for themselves
    part at the first near tie, and everything after it differs. So runs are compared on the same tokens.
    """

    def __init__(self, beams: int = 1, follow: Run | Tensor | None = None) -> None:
        self.beams = beams
        self.scores: list[Tensor] = []  # as processed by all else that the run asks for, before the choice is forced
        self.contexts: list[Tensor] = []
        self.tokens = follow.tokens if isinstance(follow, Run) else follow
        self.others = follow.choices.contexts if isinstance(follow, Run) and follow.choices else []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores.clone())
        self.contexts.append(input_ids.clone())
        if self.tokens is None:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        if self.beams == 1:
            return forced.scatter(1, self.tokens[:, input_ids.shape[1], None], 0.0)
        if len(self.contexts) == len(self.others):
            return scores  # the last choice: no forward pass comes after it
        step = len(self.contexts)
        for row, wanted in enumerate(self.others[step]):
            place = row % self.beams
            beams = range(row - place, row - place + self.beams)
            parent = next(beam for beam in beams if torch.equal(input_ids[beam], wanted[:-1]))
            # More than all that a beam can have gathered before, so that the places are those of the other run.
            forced[parent, wanted[-1]] = (self.beams + 1.0) ** step * (self.beams - place)
        return forced


@dataclass
class Run:
    """What a run of `generate` gave; `logits` are those of every forward pass.

    With a trace, `stored` is what attention was handed in every forward pass, and `stayed` [B, C] the tokens of the
    prompt that were not pruned from the residual stream (None: all).
    """

    tokens: Tensor
    logits: list[Tensor]
    cache: Any
    session: Any = None
    trace: Trace = ()
    choices: Choices | None = None
    stored: Sequence[dict[int, Stored]] = ()
    stayed: Tensor | None = None
    furthest: float | None = None  # of a replay: between a stored key or value and the plain one


def assisted(options: dict[str, Any]) -> bool:
    return "assistant_model" in options or "prompt_lookup_num_tokens" in options


def choosing(follow: Run | Tensor | None, options: dict[str, Any]) -> tuple[Choices | None, dict[str, Any]]:
    """A record of the choices where one is needed, and what `generate` takes for it."""
    beams = options.get("num_beams", 1)
    if assisted(options) or (follow is None and beams == 1):
        assert follow is None, "drafts cannot be forced"
        return None, {}
    choices = Choices(beams, follow)
    return choices, {"logits_processor": [choices]}


def cache_argument(family: str) -> str:
    """The name under which the family's forward takes a cache in this version of transformers."""
    return "cache" if families.accepts(family, "cache") else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache that `generate` returns; its name differs between versions of transformers."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def plain(model: Any, inputs: dict[str, Any], *, follow: Run | Tensor | None = None, **options: Any) -> Run:
    """The same without compression, on the tokens of another run where one is given."""
    torch.manual_seed(0)
    choices, forcing = choosing(follow, options)
    with recorded(model) as logits:
        output = model.generate(**inputs, **{**GREEDY, **options, **forcing})
    return Run(output.sequences, logits, cache_of(output), choices=choices)


@functools.cache
def plain_batch(family: str) -> Run:
    """The family's batch in fp32 without compression."""
    return plain(model(family), families.batch(family).inputs)


def compressed(
    model: Any,
    method: Any,
    inputs: dict[str, Any],
    *,
    follow: Run | Tensor | None = None,
    session_options: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Generates inside `compress`, with a trace unless `session_options` say otherwise."""
    torch.manual_seed(0)
    choices, forcing = choosing(follow, options)
    with (
        foveakv.compress(model, method, **{"trace": True, **(session_options or {})}) as session,
        recorded(model) as logits,
        witness.witnessed() as seen,
    ):
        output = model.generate(**inputs, **{**GREEDY, **options, **forcing})
        run = Run(output.sequences, logits, session.cache, session, choices=choices)
        if session.cache.trace is not None:
            run.trace = list(session.trace)
            run.stored, run.stayed = seen.of(run.cache), seen.streams.get(id(run.cache))
        return run


def exact(model: Any, run: Run) -> bool:
    """Whether two ways to the same logits differ by about 1e-14, so that no near tie can part them."""
    return model.dtype == torch.float64 and run.session.report.kv_dtype is None


def replayed(model: Any, run: Run, inputs: dict[str, Any], **options: Any) -> Run:
    """What the plain model says to the compressed run's tokens when it attends to what that run attended to.

    That is what attention was handed; the trace must say the same. With beams and with drafts it chooses for itself
    where the numbers are exact.
    """
    witness.check(run.trace, run.stored)
    trace = [{layer: held[0] for layer, held in step.items()} for step in run.stored]
    after = run.cache.method.prunes_after
    after = 0 if after is None else run.cache.compressed[after].layer_idx
    free = (options.get("num_beams", 1) > 1 or assisted(options)) and exact(model, run)
    stored, dense = run.stored, 0
    if len(run.trace) == len(run.logits) + 1:  # drafts came with the prompt: two passes in one
        trace, stored, dense = trace[1:], stored[1:], run.cache.prompt_columns
    stored = None if run.cache.method.merges else stored
    with masked(model, trace, left=run.stayed, left_after=after, stored=stored, dense_rows=dense) as replay:
        want = plain(model, inputs, follow=None if free else run, **options)
    want.furthest = replay.furthest if replay.compared else None
    return want


def check_choices(run: Run, tolerance: float) -> None:
    """A run on the tokens of another would have chosen the same ones, except in near ties.

    Where both runs' scores differ by less than `tolerance`, two scores further apart than twice that cannot change
    places.
    """
    assert run.choices is not None
    assert run.choices.tokens is not None
    clear = 0
    for step, (context, scores) in enumerate(zip(run.choices.contexts, run.choices.scores, strict=True)):
        tokens = run.choices.tokens[:, context.shape[1]]
        best = scores.topk(2)
        told = (best.values[:, 0] - best.values[:, 1] > 2 * tolerance) & (tokens != families.PAD)  # a row that ended
        clear += int(told.sum())
        assert torch.equal(best.indices[told, 0], tokens[told]), f"another choice in step {step}"
    assert clear > 0, f"all choices are near ties at a tolerance of {tolerance:.3g}"


def check_against_reference(
    model: Any, run: Run, inputs: dict[str, Any], tolerance: float = 1e-6, **options: Any
) -> None:
    """The compressed run's logits are those of the masked plain model on the same tokens, in all steps, and so are its
    choices unless they were drawn; the keys and values that it attended to are those of the plain cache.

    A method that merges stores numbers that the plain model does not have, so only the prompt's logits are compared.
    """
    want = replayed(model, run, inputs, **options)
    steps = comparable(run)
    difference = largest_difference(run.logits[:steps], want.logits[:steps])
    assert difference < tolerance, f"{run.cache.method} differs from the masked reference by {difference:.3g}"
    if want.furthest is not None:
        assert want.furthest < 2 * tolerance, f"keys or values differ from the plain cache by {want.furthest:.3g}"
    if steps is not None:
        return
    if want.choices is None or want.choices.tokens is None:
        assert torch.equal(run.tokens, want.tokens)
    elif options.get("num_beams", 1) == 1 and not options.get("do_sample"):
        check_choices(want, tolerance)


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
