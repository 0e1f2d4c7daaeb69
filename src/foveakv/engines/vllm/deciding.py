"""Run a method on a prompt whose keys and values are in the paged cache, and find the one set of tokens it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import PromptMap
from foveakv.engines.vllm.stored import PagedStore, Ranks, Reading
from foveakv.errors import MethodError
from foveakv.methods import Method
from foveakv.methods.views import Decision, PrefillView, PromptEndView, PromptView

_ONLY_KEEP = ("evict", "keys", "values", "offload", "chunks", "stream")


def read_prompt(method: Method, prompt: PromptMap, sizes: Geometry) -> Reading:
    """Return the state of a request before its first chunk; sizes: those of the model, `contexts` is replaced.

    Raises:
        FoveaKVError: the method refuses the prompt, for example because its budget is too small.
    """
    geometry = Geometry(
        1, (prompt.columns,), sizes.layers, sizes.kv_heads, sizes.head_dim, sizes.value_dim, sizes.itemsize
    )
    view = PromptView(prompt, geometry, tuple(range(sizes.layers)), sizes.layers)
    state = method.begin(view)
    budget = getattr(method, "budget", None)
    if budget is not None:
        view.budget_tokens(budget)
    rows = prompt.text[0] if method.observes.queries == "text" else torch.ones(prompt.columns, dtype=torch.bool)
    return Reading(method, view, rows, state)


def decide(reading: Reading, store: PagedStore, blocks: Tensor, scaling: float, ranks: Ranks) -> Tensor:
    """Run the method on every layer of a complete prompt.

    Args:
        reading: the request, with the query rows of the layers that the method observes.
        store: the paged cache; it holds the whole prompt.
        blocks: int64 [entries], the request's blocks in order.
        scaling: the factor of q . k.
        ranks: gathers the heads of all ranks, so that all of them decide alike.

    Returns:
        The tokens to keep, the same for all layers: bool [C].

    Raises:
        MethodError: the method decides about more than which tokens to keep, or not the same for all layers and heads.
        FoveaKVError: the method fails.
    """
    method, view = reading.method, reading.view
    tokens, layers = view.prompt.columns, view.geometry.layers
    positions = torch.arange(tokens)[None]
    kept: list[Tensor | None] = []
    for idx in range(layers):
        keys, values = store.read(idx, blocks, tokens)
        query = reading.queries.pop(idx, None)
        keys, values = ranks.gather_heads(keys), ranks.gather_heads(values)
        if query is None:
            query = keys.new_zeros(0, keys.shape[1], keys.shape[2])
        elif method.needs_queries(idx):
            query = ranks.gather_heads(query)
        layer = PrefillView(
            idx, idx, _heads_first(query), scaling, view, reading.state,
            _heads_first(keys), _heads_first(values), positions, view.prompt, None,
        )  # fmt: skip
        decision = method.prefill(layer)
        kept.append(_keep(method, decision, tokens))
        if decision is not None and decision.earlier is not None:
            kept[:idx] = _earlier(method, decision, kept[:idx], tokens)
    if "after_prefill" in method.decides:
        later = method.after_prefill(PromptEndView(view, reading.state))
        if later is not None:
            kept = [_both(first, _keep(method, each, tokens)) for first, each in zip(kept, later, strict=True)]
    return _same(method, kept, tokens)


def _earlier(method: Method, decision: Decision, kept: list[Tensor | None], tokens: int) -> list[Tensor | None]:
    earlier = list(decision.earlier or ())
    if len(earlier) != len(kept):
        raise MethodError(f"{method.name}: `earlier` must have {len(kept)} decisions, one per earlier layer")
    return [_both(first, _keep(method, each, tokens)) for first, each in zip(kept, earlier, strict=True)]


def _keep(method: Method, decision: Decision | None, tokens: int) -> Tensor | None:
    """Return what one layer keeps: bool [C]; None = everything."""
    if decision is None:
        return None
    for name in _ONLY_KEEP:
        if getattr(decision, name) is not None:
            raise MethodError(f"{method.name}: it decides about {name}; in vLLM a method decides which tokens to keep")
    return None if decision.keep is None else mask_of(method, decision.keep, tokens)


def mask_of(method: Method, keep: Tensor, tokens: int) -> Tensor:
    """Return what all heads of a layer keep of `tokens` tokens: bool [tokens], on the CPU. keep: see `Decision`.

    Raises:
        MethodError: it has another type or shape, or heads keep different tokens.
    """
    if keep.dtype != torch.bool or keep.dim() != 3 or keep.shape[0] != 1 or keep.shape[2] != tokens:
        raise MethodError(
            f"{method.name}: keep must be bool [1, heads or 1, {tokens}], got {keep.dtype} {tuple(keep.shape)}"
        )
    if bool((keep != keep[:, :1]).any()):
        raise MethodError(f"{method.name}: its heads keep different tokens, and vLLM has one block table per request")
    return keep[0, 0].cpu()


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first & second


def _same(method: Method, kept: list[Tensor | None], tokens: int) -> Tensor:
    every = torch.ones(tokens, dtype=torch.bool)
    masks = [every if each is None else each for each in kept]
    for idx, mask in enumerate(masks):
        if not torch.equal(mask, masks[0]):
            raise MethodError(
                f"{method.name}: layers 0 and {idx} keep different tokens, and vLLM has one block table per request"
            )
    if not bool(masks[0].any()):
        raise MethodError(f"{method.name}: it keeps no token of the prompt")
    return masks[0]


def _heads_first(rows: Tensor) -> Tensor:
    """[n, heads, D] -> [1, heads, n, D]."""
    return rows.transpose(0, 1)[None]
