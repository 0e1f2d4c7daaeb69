"""A session belongs to the thread that opened it; worker threads join it explicitly; other threads run plainly."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import families
import matrix
import pytest
import torch
from attached import fingerprint, used
from masked_reference import largest_difference
from transformers import TextIteratorStreamer

import foveakv
from foveakv import errors

pytestmark = pytest.mark.usefixtures("no_gradients")

SHORT = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def elsewhere(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread of its own."""

    def quietly() -> Any:
        with torch.no_grad():
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(quietly).result()


@pytest.mark.parametrize("options", [{}, {"preallocate": 8}], ids=["growing", "preallocated"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llama"])
def test_another_threads_calls_are_plain_and_change_nothing(family: str, options: dict[str, Any]) -> None:
    model, inputs, other = used(family), families.prompt(family), families.prompt(family, seed=5)
    plain = matrix.plain(model, other)
    with foveakv.compress(model, matrix.method("snapkv"), **options) as session:
        first = model.generate(**inputs, **SHORT)
        cache, kept = session.cache, session.kept(0)
        theirs = elsewhere(lambda: matrix.plain(model, other))
        assert torch.equal(theirs.tokens, plain.tokens)
        assert largest_difference(theirs.logits, plain.logits) < 1e-5
        assert not isinstance(theirs.cache, foveakv.CompressedCache)
        loop = elsewhere(lambda: model(**other, use_cache=True))
        assert largest_difference([loop.logits[:, -1]], [plain.logits[0][:, -1]]) < 1e-5
        assert not isinstance(matrix.cache_of(loop), foveakv.CompressedCache)
        assert session.cache is cache
        assert torch.equal(session.kept(0), kept)
        assert torch.equal(model.generate(**inputs, **SHORT), first)


def test_another_thread_may_ask_for_what_a_compressed_call_may_not() -> None:
    model, inputs = used("llama"), families.prompt("llama")
    with foveakv.compress(model, matrix.method("snapkv")):
        elsewhere(lambda: model.generate(**inputs, **SHORT, use_cache=False))
        elsewhere(lambda: model.generate(**inputs, **SHORT, cache_implementation="static", disable_compile=True))
        elsewhere(lambda: model.generate(**inputs, **SHORT, past_key_values=foveakv.engines.transformers.compat.Cache(
            layers=foveakv.engines.transformers.compat.default_layers(model.config))))  # fmt: skip
        with pytest.raises(errors.UnsupportedModeError):
            model.generate(**inputs, **SHORT, use_cache=False)


def test_a_streamers_thread_joins_the_session() -> None:
    model, inputs = used("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method("snapkv")) as session:
        want = model.generate(**inputs, **SHORT)
        before = session.cache
        streamer = TextIteratorStreamer(_Decoder(), timeout=60)
        worker = threading.Thread(target=_no_grad(session.generate), kwargs={**inputs, **SHORT, "streamer": streamer})
        worker.start()
        text = "".join(streamer)
        worker.join()
        assert text.split() == [str(token) for token in want[0].tolist()]
        assert session.cache is not before
        assert session.report.evicted > 0


def test_a_hand_written_loop_in_a_worker() -> None:
    model, inputs = used("llava"), families.prompt("llava")
    with foveakv.compress(model, matrix.method("snapkv")) as session:

        def work() -> Any:
            with session.in_this_thread():
                return matrix.cache_of(model(**inputs, use_cache=True))

        made = elsewhere(work)
        assert isinstance(made, foveakv.CompressedCache)
        assert session.cache is made


def test_one_session_for_each_thread() -> None:
    model, inputs = used("llava"), families.prompt("llava")
    names = ["snapkv", "streaming", "hae", "full"]
    alone = {name: matrix.compressed(model, matrix.method(name), inputs).tokens for name in names}
    want, gate = fingerprint(model), threading.Barrier(len(names))

    def work(name: str) -> bool:
        with torch.no_grad(), foveakv.compress(model, matrix.method(name)) as session:
            gate.wait(60)
            for _ in range(3):
                output = model.generate(**inputs, **matrix.GREEDY)
                assert session.cache.method.name == name
                assert torch.equal(output.sequences, alone[name])
            gate.wait(60)
        return True

    with ThreadPoolExecutor(len(names)) as pool:
        assert all(pool.map(work, names))
    assert fingerprint(model) == want


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_sessions_that_open_and_close_beside_running_calls(family: str) -> None:
    """The model is attached and detached while a plain call is under way; two others shorten the residual stream."""
    model, inputs = used(family), families.prompt(family)
    options = {"drop_hidden_states": family == "llava", "ddes": False, "budget": None}
    alone = matrix.compressed(model, matrix.method("hae", **options), inputs).tokens
    plain, want = matrix.plain(model, inputs).tokens, fingerprint(model)

    def work(compress: bool) -> bool:
        same = []
        with torch.no_grad():
            for _ in range(8):
                if compress:
                    with foveakv.compress(model, matrix.method("hae", **options)):
                        same.append(torch.equal(model.generate(**inputs, **matrix.GREEDY).sequences, alone))
                else:
                    same.append(torch.equal(model.generate(**inputs, **matrix.GREEDY).sequences, plain))
        return all(same)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(work, [True, True, False]))
    finally:
        sys.setswitchinterval(interval)
    assert fingerprint(model) == want


def test_a_worker_that_comes_too_late() -> None:
    model, inputs = used("llava"), families.prompt("llava")
    session = foveakv.compress(model, matrix.method("snapkv"))
    with pytest.raises(errors.CacheInUseError, match="not open"):
        session.generate(**inputs, **SHORT)
    with session:
        pass
    with pytest.raises(errors.CacheInUseError, match="join threads"):
        elsewhere(lambda: session.generate(**inputs, **SHORT))


def test_a_block_that_ends_while_a_worker_generates() -> None:
    """The worker's call goes on as it began; the model is restored when it is done."""
    model, inputs = used("llava"), families.prompt("llava")
    want, started, go = fingerprint(model), threading.Event(), threading.Event()
    alone = matrix.compressed(model, matrix.method("snapkv"), inputs).tokens

    class Wait(families.hf.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            started.set()
            assert go.wait(60)
            return scores

    with ThreadPoolExecutor(1) as pool:
        with foveakv.compress(model, matrix.method("snapkv")) as session:
            future = pool.submit(_no_grad(session.generate), **inputs, **matrix.GREEDY, logits_processor=[Wait()])
            assert started.wait(60)
        assert fingerprint(model) != want
        go.set()
        assert torch.equal(future.result().sequences, alone)
    assert fingerprint(model) == want


def test_a_session_that_another_thread_closes() -> None:
    model = used("llava")
    want = fingerprint(model)
    session = foveakv.compress(model, matrix.method("snapkv"))
    session.__enter__()
    elsewhere(lambda: session.__exit__(None, None, None))
    assert fingerprint(model) == want
    with foveakv.compress(model, matrix.method("streaming")) as other:
        model.generate(**families.prompt("llava"), **SHORT)
        assert other.cache.method.name == "streaming"


class _Decoder:
    """A tokenizer whose text is the ids."""

    def decode(self, ids: Any, **unused: Any) -> str:
        return "".join(f"{int(token)} " for token in ids)


def _no_grad(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return run
