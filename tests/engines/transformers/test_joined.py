"""Decode steps of several requests in one batch equal those of each request alone, whatever joins and leaves."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import weakref
from typing import Any

import families
import matrix
import pytest
import torch
from torch import Tensor

import foveakv
from foveakv import methods
from foveakv.engines.transformers.joined import JoinedCache
from foveakv.errors import CacheInUseError, MembersFailedError, UnsupportedModeError, UnsupportedModelError

STEPS = 6
FAMILIES = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl"]


@functools.cache
def model_of(family: str) -> Any:
    return families.build(family, dtype=torch.float64)


def supported(family: str) -> list[str]:
    """The methods that can be used with this family."""
    found = []
    for name in matrix.METHODS:
        with contextlib.suppress(UnsupportedModelError):
            foveakv.cache_for(model_of(family), matrix.method(name))
            found.append(name)
    return found


class Request:
    """A request: its prompt, the tokens that follow, and what the model says after each when it is alone."""

    def __init__(self, family: str, method: Any, inputs: dict[str, Any], **options: Any) -> None:
        self.model = model_of(family)
        self.name, self.method, self.inputs, self.options = matrix.cache_argument(family), method, inputs, options
        batch = inputs["input_ids"].shape[0]
        self.tokens = torch.randint(
            families.TEXT_IDS.start, families.TEXT_IDS.stop, (STEPS, batch, 1),
            generator=torch.Generator().manual_seed(int(inputs["input_ids"].sum())),
        )  # fmt: skip
        self.alone = self.read()
        self.expected = [self.step(self.alone, at) for at in range(STEPS)]

    def read(self) -> Any:
        """A cache that has read the prompt."""
        cache = foveakv.cache_for(self.model, self.method, **self.options)
        self.model(**self.inputs, **{self.name: cache})
        return cache

    def step(self, cache: Any, at: int) -> Tensor:
        """Step number `at` alone, with the mask of the whole context and the positions that `generate` would pass."""
        mask = self.inputs["attention_mask"]
        mask = torch.cat([mask, mask.new_ones(len(mask), at + 1)], -1)
        more: dict[str, Any] = {"attention_mask": mask}
        offsets = [value for value in cache.model_state if value is not None]
        if offsets:
            more["position_ids"] = (mask.sum(-1, keepdim=True) - 1 + offsets[0]).expand(3, -1, -1)
        elif "position_ids" in self.inputs:
            more["position_ids"] = self.inputs["position_ids"].amax(-1, keepdim=True) + at + 1
        return self.model(input_ids=self.tokens[at], **more, **{self.name: cache}).logits[:, -1]


def join(members: list[tuple[Request, Any, int]]) -> list[Tensor]:
    """One joined step; members: the request, its cache, and the number of its step."""
    joined = JoinedCache([cache for _, cache, _ in members])
    ids = torch.cat([request.tokens[at] for request, _, at in members])
    first = members[0][0]
    logits = first.model(input_ids=ids, **{first.name: joined}).logits[:, -1]
    return list(logits.split([len(request.tokens[0]) for request, _, _ in members]))


def check(members: list[tuple[Request, Any, int]]) -> None:
    for (request, _, at), logits in zip(members, join(members), strict=True):
        torch.testing.assert_close(logits, request.expected[at], atol=1e-9, rtol=0)


def same_state(one: Any, other: Any) -> None:
    for layer in one.compressed:
        assert torch.equal(one.kept(layer.layer_idx), other.kept(layer.layer_idx))
    assert one.stored_nbytes == other.stored_nbytes
    assert len(one.steps) == len(other.steps)
    assert [layer.counts for layer in one.compressed] == [layer.counts for layer in other.compressed]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_method_in_company(family: str) -> None:
    requests = [
        Request(family, matrix.method(name), families.prompt(family, 1 + seed % 3, dtype=torch.float64, seed=seed))
        for seed, name in enumerate(supported(family))
    ]
    caches = [request.read() for request in requests]
    done = [0] * len(requests)
    # Requests join late, pause, and leave early.
    for turn in range(3 * STEPS):
        taking = [i for i in range(len(requests)) if done[i] < STEPS and turn >= i % 4 and (turn + i) % 5]
        if not taking:
            break
        check([(requests[i], caches[i], done[i]) for i in taking])
        for i in taking:
            done[i] += 1
    assert min(done) == STEPS  # every request has had all of its steps
    for request, cache in zip(requests, caches, strict=True):
        same_state(cache, request.alone)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_vl", "glm4v", "llama"])
@torch.no_grad()
def test_padded_batches_and_other_options(family: str) -> None:
    batch = families.batch(family, dtype=torch.float64)
    inputs = dict(batch.inputs)
    if family not in ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "glm4v"):  # these derive positions from the mask themselves
        mask = inputs["attention_mask"]
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    requests = [
        Request(family, matrix.method("snapkv"), inputs, trace=True),
        Request(family, matrix.method("h2o"), batch.singles[0], kv_dtype="int8", residual_length=2),
        Request(family, matrix.method("hybridkv"), inputs),
        Request(family, matrix.method("full"), batch.singles[1], max_decode_slots=3),
    ]
    caches = [request.read() for request in requests]
    for at in range(STEPS):
        check([(request, cache, at) for request, cache in zip(requests, caches, strict=True)])
    for request, cache in zip(requests, caches, strict=True):
        same_state(cache, request.alone)
    for mine, other in zip(caches[0].trace, requests[0].alone.trace, strict=True):
        assert all(torch.equal(mine[layer], other[layer]) for layer in other)


@torch.no_grad()
def test_prompts_of_generate_are_continued() -> None:
    family = "qwen2_5_vl"
    model, batch = model_of(family), families.batch(family, dtype=torch.float64)
    caches, following, expected = [], [], []
    for inputs in (batch.inputs, batch.singles[2]):
        runs = []
        for new in (3, 4):
            cache = foveakv.cache_for(model, matrix.method("hybridkv"))
            output = model.generate(
                **inputs, max_new_tokens=new, do_sample=False, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True, **{matrix.cache_argument(family): cache},
            )  # fmt: skip
            runs.append((cache, output))
        caches.append(runs[0][0])
        following.append(runs[0][1].sequences[:, -1:])
        expected.append(runs[1][1].logits[-1])
    logits = model(input_ids=torch.cat(following), **{matrix.cache_argument(family): JoinedCache(caches)}).logits
    torch.testing.assert_close(logits[:, -1].float(), torch.cat(expected), atol=1e-5, rtol=0)


@torch.no_grad()
def test_padding_of_a_later_turn() -> None:
    family = "llava"
    batch = families.batch(family, dtype=torch.float64)
    request = Request(family, matrix.method("snapkv"), batch.inputs)
    other = Request(family, matrix.method("h2o"), batch.singles[0])
    more, mask = torch.full((3, 4), 20), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    whole = torch.cat([batch.inputs["attention_mask"], mask], -1)
    caches = [request.read() for _ in range(2)]
    for cache in caches:
        request.model(input_ids=more, attention_mask=whole, **{request.name: cache})
    mask = torch.cat([whole, whole.new_ones(3, 1)], -1)
    alone = request.model(input_ids=request.tokens[0], attention_mask=mask, **{request.name: caches[0]}).logits[:, -1]
    logits = join([(other, other.read(), 0), (request, caches[1], 0)])[1]
    torch.testing.assert_close(logits, alone, atol=1e-9, rtol=0)


@dataclasses.dataclass
class Failing(methods.find("h2o")):  # type: ignore[misc]
    """Fails at the second decode step, in one layer."""

    def decode(self, view: Any) -> Any:
        if view.compressed_idx == 1 and view.seen == self.fails_at:
            raise ArithmeticError("no")
        return super().decode(view)

    fails_at: int = 0


@torch.no_grad()
def test_a_member_that_fails_leaves_the_others_alone() -> None:
    good = [
        Request("llava", matrix.method(n), families.prompt("llava", 1, dtype=torch.float64)) for n in ("full", "hae")
    ]
    length = good[0].inputs["input_ids"].shape[1]
    bad = Request("llava", Failing(budget=0.5, fails_at=0), good[0].inputs)
    failing = foveakv.cache_for(bad.model, Failing(budget=0.5, fails_at=length + 2))
    bad.model(**bad.inputs, **{bad.name: failing})
    caches = [request.read() for request in good]
    members = [(good[0], caches[0], 0), (bad, failing, 0), (good[1], caches[1], 0)]
    check(members)
    members = [(request, cache, 1) for request, cache, _ in members]
    with pytest.raises(MembersFailedError, match=r"1 of 3 .* \(number 1\).* ArithmeticError: no") as caught:
        join(members)
    assert list(caught.value.errors) == [1]
    for row, request in ((0, good[0]), (2, good[1])):
        torch.testing.assert_close(caught.value.output.logits[row], request.expected[1], atol=1e-9, rtol=0)
    with pytest.raises(CacheInUseError, match="drop it"):
        JoinedCache([caches[0], failing])
    for at in range(2, STEPS):
        check([(request, cache, at) for request, cache in zip(good, caches, strict=True)])


@torch.no_grad()
def test_a_pass_that_fails() -> None:
    request = Request("llava", matrix.method("snapkv"), families.prompt("llava", 1, dtype=torch.float64))
    cache, model = request.read(), request.model
    with pytest.raises(IndexError):  # before anything is stored
        model(input_ids=torch.tensor([[10**6]]), **{request.name: JoinedCache([cache])})
    check([(request, cache, 0)])
    layer = model.get_decoder().layers[2]
    handle = layer.register_forward_pre_hook(lambda *unused: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            join([(request, cache, 1)])
    finally:
        handle.remove()
    with pytest.raises(CacheInUseError, match="failed"):
        JoinedCache([cache])
    other = request.read()
    for at in range(2):
        check([(request, other, at)])


@torch.no_grad()
def test_what_cannot_be_joined() -> None:
    request = Request("llava", matrix.method("snapkv"), families.prompt("llava", 1, dtype=torch.float64))
    cache, model, name = request.read(), request.model, request.name
    another = families.build("llama", dtype=torch.float64)
    stranger = foveakv.cache_for(another, matrix.method("full"))
    another(input_ids=torch.tensor([[5, 6, 7]]), **{matrix.cache_argument("llama"): stranger})
    fixed = foveakv.cache_for(model, matrix.method("snapkv"), preallocate=8)
    model(**request.inputs, **{name: fixed})
    for members, error, text in (
        ([], CacheInUseError, "at least one"),
        ([cache, cache], CacheInUseError, "only once"),
        ([cache, stranger], CacheInUseError, "same model"),
        ([cache, foveakv.cache_for(model, matrix.method("full"))], CacheInUseError, "no complete prompt"),
        ([cache, fixed], UnsupportedModelError, "preallocate"),
        ([torch.nn.Identity()], CacheInUseError, "Identity"),
    ):
        with pytest.raises(error, match=text):
            JoinedCache(members)  # type: ignore[arg-type]
    joined = JoinedCache([cache])
    one = torch.tensor([[5]])
    for inputs, wrong, text in (
        ({"input_ids": one.expand(1, 2)}, UnsupportedModeError, "one new token"),
        ({"input_ids": one.expand(2, 1)}, CacheInUseError, "1 sequences, but the inputs have 2"),
        ({"input_ids": one, "attention_mask": one}, UnsupportedModeError, "attention_mask"),
        ({"input_ids": one, "use_cache": False}, UnsupportedModeError, "use_cache"),
        ({"input_ids": one, "output_hidden_states": True}, UnsupportedModeError, "output_hidden_states"),
    ):
        with pytest.raises(wrong, match=text):
            model(**inputs, **{name: joined})
    with pytest.raises(CacheInUseError, match="another model"):
        another(input_ids=one, **{matrix.cache_argument("llama"): joined})
    check([(request, cache, 0)])


@torch.no_grad()
def test_copies_join_each_other() -> None:
    request = Request("qwen2_5_vl", matrix.method("hae"), families.prompt("qwen2_5_vl", 2, dtype=torch.float64))
    first = request.read()
    members = [first, copy.deepcopy(first), copy.deepcopy(first)]
    for at in range(STEPS):
        check([(request, cache, at) for cache in members])


@torch.no_grad()
def test_members_are_freed_at_once() -> None:
    request = Request("llava", matrix.method("snapkv"), families.prompt("llava", 1, dtype=torch.float64))
    cache = request.read()
    freed = weakref.ref(cache)
    gc.disable()
    try:
        join([(request, cache, 0)])
        del cache
        assert freed() is None
    finally:
        gc.enable()


def test_models_with_other_state_are_refused() -> None:
    for family in ("qwen3_5", "lfm2_vl"):
        if family in families.FAMILIES:
            break
    else:
        pytest.skip("this transformers has no family with linear attention here")
    model, inputs, name = families.build(family), families.prompt(family, 1), matrix.cache_argument(family)
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    with torch.no_grad():
        model(**inputs, **{name: cache})
    with pytest.raises(UnsupportedModelError, match="one cache at a time"):
        JoinedCache([cache])


def test_embeddings_of_a_batch_are_recorded() -> None:
    model = matrix.model("llama", torch.float64)
    ids = torch.tensor([families.words(20, 0), families.words(20, 1)])
    cache = foveakv.cache_for(model, matrix.method("snapkv"), saveable=True)
    model(input_ids=ids, **{matrix.cache_argument("llama"): cache})
    embeds = model.get_input_embeddings()(torch.tensor([[11], [12]]))
    model(inputs_embeds=embeds, **{matrix.cache_argument("llama"): JoinedCache([cache])})
    assert cache.token_ids[:, -1].tolist() == [-1, -1]
