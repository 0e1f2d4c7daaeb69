"""Interrupts: whatever raises, and wherever, the model is restored, the memory is freed, and the next session works.

torch skips forward hooks, those with `always_call=True` included, when a pass is left by a `BaseException` that is no
`Exception`. So these are tried at every place where foreign code runs.
"""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import families
import matrix
import pytest
import torch
import transformers
from attached import fingerprint, used
from torch import Tensor

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

SHORT = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, RuntimeError]


class Fuse:
    """Raises when it is lit for the n-th time."""

    def __init__(self, kind: type[BaseException], after: int) -> None:
        self.kind, self.left = kind, after

    def __call__(self, *unused: Any, **also: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.kind


Place = Callable[[Any, Fuse], Any]


@contextmanager
def _hooked(handle: Any) -> Iterator[dict[str, Any]]:
    try:
        yield {}
    finally:
        handle.remove()


def in_a_layer(model: Any, fuse: Fuse) -> Any:
    return _hooked(model.get_decoder().layers[2].register_forward_pre_hook(fuse))


def in_the_attention_of_a_layer(model: Any, fuse: Fuse) -> Any:
    return _hooked(model.get_decoder().layers[2].self_attn.o_proj.register_forward_pre_hook(fuse))


def in_the_vision_tower(model: Any, fuse: Fuse) -> Any:
    tower = next(module for name, module in model.named_modules() if name.endswith(("vision_tower", "visual")))
    return _hooked(tower.register_forward_pre_hook(fuse))


def before_the_model(model: Any, fuse: Fuse) -> Any:
    return _hooked(model.register_forward_pre_hook(fuse))


def after_the_model(model: Any, fuse: Fuse) -> Any:
    return _hooked(model.register_forward_hook(fuse))


@contextmanager
def in_a_streamer(model: Any, fuse: Fuse) -> Iterator[dict[str, Any]]:
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value: Tensor) -> None:
            fuse()

        def end(self) -> None:
            pass

    yield {"streamer": Streamer()}


@contextmanager
def in_a_logits_processor(model: Any, fuse: Fuse) -> Iterator[dict[str, Any]]:
    class Processor(transformers.LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            fuse()
            return scores

    yield {"logits_processor": transformers.LogitsProcessorList([Processor()])}


# The place, and at which time its code runs it raises: while the prompt is read, and while decoding.
PLACES: list[tuple[Place, int]] = [
    (in_a_layer, 1),
    (in_a_layer, 3),
    (in_the_attention_of_a_layer, 1),
    (in_the_attention_of_a_layer, 2),
    (in_the_vision_tower, 1),
    (before_the_model, 1),
    (before_the_model, 2),
    (after_the_model, 1),
    (after_the_model, 3),
    (in_a_streamer, 1),
    (in_a_streamer, 3),
    (in_a_logits_processor, 1),
    (in_a_logits_processor, 2),
]
places = pytest.mark.parametrize(("place", "after"), PLACES, ids=[f"{p.__name__}-{n}" for p, n in PLACES])


def interrupt(model: Any, method: Any, place: Place, kind: type[BaseException], after: int, **options: Any) -> Any:
    """Runs one interrupted session and returns weak references to what it made."""
    made: list[Any] = []
    begin = foveakv.CompressedCache.begin_forward

    def watched(cache: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(weakref.ref(cache))
        return begin(cache, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foveakv.CompressedCache, "begin_forward", watched)
        with place(model, Fuse(kind, after)) as arguments:
            try:
                with foveakv.compress(model, method, **options):
                    model.generate(**families.prompt(model.family), **SHORT, **arguments)
            except BaseException as error:
                if not isinstance(error, kind):
                    raise
                traceback.clear_frames(error.__traceback__)
            else:
                pytest.fail("nothing was raised")
    return made


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest) -> Any:
    built = used(request.param)
    built.family = request.param
    return built


@places
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_restored_and_the_memory_freed(
    model: Any, collected: None, place: Place, after: int, kind: type[BaseException]
) -> None:
    inputs = families.prompt(model.family)
    before, want = model.generate(**inputs, **SHORT), fingerprint(model)
    caches = interrupt(model, matrix.method("snapkv"), place, kind, after)
    assert fingerprint(model) == want
    gc.collect()
    assert [cache() for cache in caches] == [None] * len(caches)
    assert torch.equal(model.generate(**inputs, **SHORT), before)
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        model.generate(**inputs, **SHORT)
        assert session.report.evicted > 0
    assert fingerprint(model) == want


@places
@pytest.mark.parametrize(
    ("name", "options", "call"),
    [
        ("hae", {"drop_hidden_states": True, "ddes": False, "budget": None}, {}),
        ("hybridkv", {}, {}),
        ("snapkv", {}, {"preallocate": 8}),
        ("h2o", {}, {"kv_dtype": "int8"}),
    ],
)
def test_other_methods_and_options(
    model: Any, place: Place, after: int, name: str, options: dict[str, Any], call: dict[str, Any]
) -> None:
    want = fingerprint(model)
    interrupt(model, matrix.method(name, **options), place, KeyboardInterrupt, after, **call)
    assert fingerprint(model) == want


@places
def test_a_traceback_that_is_kept_does_not_keep_the_model_attached(model: Any, place: Place, after: int) -> None:
    """Notebooks keep the last traceback, and so all of its frames."""
    want = fingerprint(model)
    with (
        place(model, Fuse(KeyboardInterrupt, after)) as arguments,
        pytest.raises(KeyboardInterrupt) as kept,
        foveakv.compress(model, matrix.method("snapkv")),
    ):
        model.generate(**families.prompt(model.family), **SHORT, **arguments)
    assert fingerprint(model) == want
    assert kept.traceback


@places
def test_a_cache_of_ones_own(model: Any, collected: None, place: Place, after: int) -> None:
    want = fingerprint(model)
    cache = foveakv.cache_for(model, matrix.method("snapkv"))
    with place(model, Fuse(KeyboardInterrupt, after)) as arguments:
        try:
            model.generate(**families.prompt(model.family), **SHORT, **arguments, past_key_values=cache)
        except KeyboardInterrupt as error:
            traceback.clear_frames(error.__traceback__)
    del cache
    gc.collect()
    assert fingerprint(model) == want


def test_a_pass_that_is_left_half_way_drops_its_cache(model: Any) -> None:
    """An interrupt between two passes keeps the results so far; one inside of a pass leaves nothing to report."""
    inputs = families.prompt(model.family)
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        with in_a_streamer(model, Fuse(KeyboardInterrupt, 3)) as arguments, pytest.raises(KeyboardInterrupt):
            model.generate(**inputs, **SHORT, **arguments)
        assert session.report.evicted > 0
        with in_a_layer(model, Fuse(KeyboardInterrupt, 2)), pytest.raises(KeyboardInterrupt):
            model.generate(**inputs, **SHORT)
        with pytest.raises(errors.CacheInUseError, match="nothing has been generated"):
            _ = session.report
        model.generate(**inputs, **SHORT)
        assert session.report.evicted > 0


def test_an_interrupt_between_two_instructions_of_the_wrapper(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst place: the call is registered, and the wrapper's own clean-up does not run."""
    from foveakv.engines.transformers.attachment import Attachment

    def entered(self: Attachment, call: Any) -> Any:
        if call is not None:
            call.finish = self.hold(call)
        raise KeyboardInterrupt

    want = fingerprint(model)
    monkeypatch.setattr(Attachment, "entered", entered)
    with pytest.raises(KeyboardInterrupt) as kept, foveakv.compress(model, matrix.method("snapkv")):
        model.generate(**families.prompt(model.family), **SHORT)
    assert fingerprint(model) == want
    assert kept.traceback


def test_hooks_of_users_that_are_set_inside_of_the_block_stay(model: Any) -> None:
    """Only what was attached is taken away again."""
    original = model.generate
    with foveakv.compress(model, matrix.method("snapkv")):
        inner = model.generate

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        model.generate = wrapped
        model.generate(**families.prompt(model.family), **SHORT)
    try:
        assert model.generate is wrapped
        want = original(**families.prompt(model.family), **SHORT)
        assert torch.equal(model.generate(**families.prompt(model.family), **SHORT), want)  # plain by now
        with foveakv.compress(model, matrix.method("snapkv")) as session:
            model.generate(**families.prompt(model.family), **SHORT)
            assert len(session.caches) == 1
            assert session.report.evicted > 0
        assert model.generate is wrapped
    finally:
        del model.generate
