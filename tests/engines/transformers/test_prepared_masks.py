"""4-D attention masks of the caller: exact over stored slots, or refused before anything runs."""

from __future__ import annotations

from typing import Any

import families
import matrix
import pytest
import torch
from masked_reference import largest_difference
from torch import Tensor

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

STEPS = 3


def causal(rows: range, columns: int) -> Tensor:
    """bool [1, 1, rows, columns]."""
    return torch.arange(columns)[None, None, None] <= torch.tensor(rows)[None, None, :, None]


def striped(rows: range, columns: int, batch: int = 1) -> Tensor:
    """Causal, and every third key is hidden from all others; another third in each row of the batch."""
    keys = torch.arange(columns)[None, None, None]
    queries = torch.tensor(rows)[None, None, :, None]
    hidden = ((keys + torch.arange(batch)[:, None, None, None]) % 3 == 1) & (keys < 18)
    return causal(rows, columns) & (~hidden | (keys == queries))


def additive(mask: Tensor, lowest: float = float("-inf")) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def per_head(mask: Tensor) -> Tensor:
    """Differs between the heads."""
    heads = mask.expand(-1, families.HEADS, -1, -1).clone()
    heads[:, 1, :, 2] = False
    return heads


def alibi(mask: Tensor) -> Tensor:
    """A bias that grows with the distance, another one for each head."""
    distance = torch.arange(mask.shape[-1]).flip(0)[None, None, None]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[None, :, None, None]
    return additive(mask).expand(-1, families.HEADS, -1, -1) - slopes * distance


def loop(model: Any, ids: Tensor, mask: Any, **first: Any) -> list[Tensor]:
    """A prompt and some steps; mask(rows, columns) makes the mask of each pass."""
    columns = ids.shape[1]
    output = model(input_ids=ids, attention_mask=mask(range(columns), columns), use_cache=True, **first)
    logits, cache = [output.logits], matrix.cache_of(output)
    for step in range(STEPS):
        seen = columns + step
        output = model(
            input_ids=torch.full((len(ids), 1), 20 + step),
            attention_mask=mask(range(seen, seen + 1), seen + 1),
            **{matrix.cache_argument("llama"): cache},
        )
        logits.append(output.logits)
    return logits


MASKS: dict[str, Any] = {
    "causal": causal,
    "striped": striped,
    "additive": lambda rows, columns: additive(striped(rows, columns)),
    "lowest": lambda rows, columns: additive(striped(rows, columns), torch.finfo(torch.float32).min),
    "expanded": lambda rows, columns: striped(rows, columns).expand(-1, families.HEADS, -1, -1),
    "equal heads": lambda rows, columns: striped(rows, columns).repeat(1, families.HEADS, 1, 1),
    "batch": lambda rows, columns: striped(rows, columns, batch=2),
}
# Each with a word of the error.
REFUSED: dict[str, tuple[Any, str]] = {
    "per head": (lambda rows, columns: per_head(striped(rows, columns)), "differs between heads"),
    "additive per head": (lambda rows, columns: additive(per_head(striped(rows, columns))), "differs between heads"),
    "alibi": (lambda rows, columns: alibi(causal(rows, columns)), "bias such as ALiBi"),
    "one bias": (lambda rows, columns: additive(causal(rows, columns)) - 0.5, "bias such as ALiBi"),
    "integers": (lambda rows, columns: causal(rows, columns).long(), "boolean or additive"),
    "too short": (lambda rows, columns: causal(rows, columns)[..., :-1], "must cover"),
    "too long": (lambda rows, columns: causal(rows, columns + 1), "must cover"),
    "three dimensions": (lambda rows, columns: causal(rows, columns)[0], "3 dimensions"),
    "other object": (lambda rows, columns: object(), "as a object"),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_with_everything_kept_it_is_the_plain_model(implementation: str, kind: str) -> None:
    model = families.build("llama")
    model.set_attn_implementation(implementation)
    if implementation == "eager" and kind not in ("additive", "lowest"):
        pytest.skip("eager attention adds masks, so it takes additive ones only")
    ids = torch.stack([torch.tensor(families.words(12, seed)) for seed in range(2)])
    want = loop(model, ids, MASKS[kind])
    with foveakv.compress(model, foveakv.Full()):
        got = loop(model, ids, MASKS[kind])
    assert largest_difference(got, want) < 1e-5


@pytest.mark.parametrize("name", ["snapkv", "streaming", "adakv", "pyramidkv"])
def test_hidden_keys_stay_hidden_after_an_eviction(name: str) -> None:
    """Tokens that no later query may attend to change nothing, whatever else is stored.

    The scores of these methods come from the last six rows, none of which is hidden.
    """
    model = families.build("llama")
    ids = torch.tensor(families.words(24, 0))[None]
    other = ids.clone()
    hidden = (torch.arange(24) % 3 == 1) & (torch.arange(24) < 18)
    other[0, hidden] = torch.tensor(families.words(24, 5))[hidden]
    logits = []
    for prompt in (ids, other):
        with foveakv.compress(model, matrix.method(name)) as session:
            logits.append(loop(model, prompt, MASKS["striped"]))
            assert session.report.evicted > 0
    ends = [[step[:, -1] for step in steps] for steps in logits]
    assert largest_difference(*ends) < 1e-5


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", ["full", "snapkv", "h2o", "hybridkv"])
def test_refused_before_anything_runs(name: str, kind: str) -> None:
    model = families.build("llama")
    ids = torch.tensor(families.words(12, 0))[None]
    mask, message = REFUSED[kind]
    cache = foveakv.cache_for(model, matrix.method(name))
    argument = {matrix.cache_argument("llama"): cache}
    with pytest.raises(errors.UnsupportedModeError, match=message):
        model(input_ids=ids, attention_mask=mask(range(12), 12), **argument)
    assert cache.seen == 0
    model(input_ids=ids, **argument)
    kept = cache.kept(0)
    with pytest.raises(errors.UnsupportedModeError, match=message):
        model(input_ids=ids[:, :1], attention_mask=mask(range(12, 13), 13), **argument)
    assert torch.equal(cache.kept(0), kept)
    model(input_ids=ids[:, :1], **argument)  # the cache is as good as before
    assert cache.seen == 13


def test_masks_by_kind_of_layer() -> None:
    """transformers takes a dict of masks for models with several kinds of layers; only full attention is compressed."""
    model = families.build("gemma3")
    ids = torch.tensor(families.words(12, 0))[None]
    ones = torch.ones(1, 12, dtype=torch.long)

    def masks(full: Tensor) -> dict[str, Tensor]:
        return {"full_attention": full, "sliding_attention": causal(range(12), 12)}

    want = model(input_ids=ids, attention_mask=ones).logits
    with foveakv.compress(model, matrix.method("snapkv")):
        got = model(input_ids=ids, attention_mask=masks(causal(range(12), 12))).logits
        with pytest.raises(errors.UnsupportedModeError, match="differs between heads"):
            model(input_ids=ids, attention_mask=masks(per_head(causal(range(12), 12))))
    assert largest_difference([got], [want]) < 1e-5


def test_combinations_that_are_refused() -> None:
    model = families.build("llava")
    inputs = families.prompt("llava")
    columns = inputs["input_ids"].shape[1]
    inputs["attention_mask"] = causal(range(columns), columns)
    for method, options, message in (
        (matrix.method("fastv", drop_hidden_states=True), {}, "drop_hidden_states"),
        (matrix.method("snapkv"), {"preallocate": 8}, "2-D"),
    ):
        with (
            foveakv.compress(model, method, **options),
            pytest.raises(errors.UnsupportedModeError, match=message),
        ):
            model(**inputs)
    text = families.build("llama")
    ids = torch.tensor(families.words(12, 0))[None]
    with (
        foveakv.compress(text, matrix.method("snapkv")) as session,
        session.chunked_prefill(12),
        pytest.raises(errors.UnsupportedModeError, match="rows of one chunk"),
    ):
        text(input_ids=ids[:, :6], attention_mask=causal(range(6), 6))
