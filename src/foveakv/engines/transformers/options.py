"""Options of a compressed cache, shared by `compress`, `cache_for`, the command line and the evaluation."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from foveakv.errors import MethodError
from foveakv.kernels import BACKENDS
from foveakv.memory import quantizer
from foveakv.memory.pool import Pool
from foveakv.methods import Method, checks, near
from foveakv.methods.capabilities import Capabilities

DEFAULT_PREALLOCATED = 256
ENGINE = Capabilities(engine="the transformers engine", decode_and_read=False)
"""It reads chunks into slots of their own, which evictions while decoding would move."""
PREALLOCATED = Capabilities(
    engine="a cache with preallocated slots",
    decode_eviction=False,
    retrieval=False,
    attention_sum=False,
    second_pass=False,
)


@dataclass(frozen=True)
class CacheOptions:
    """How a cache stores and reads slots, whichever method decides which slots stay.

    Attributes:
        backend: decode attention kernel, "auto" or a key of `foveakv.kernels.BACKENDS`.
        trace: record the positions that every decode step attends to (`session.trace`).
        max_decode_slots: for methods that do not evict while decoding, the maximum number of decoded tokens stored per
            KV head; the oldest are evicted first. Assisted decoding is refused then. None: no limit, as in a plain
            cache.
        kv_dtype: "int8" or "int4" quantizes slots to about a quarter or an eighth of their float32 size (see
            docs/quantization.md). None: the dtype in which the model computes them.
        residual_length: with a `kv_dtype`, the number of newest tokens per KV head that are also stored in full
            precision and used instead of their quantized copies.
        preallocate: for methods that act at the prompt only, preallocate slots for this number of decoded tokens (True:
            256), so that slots never move and `generate` compiles the decode step on CUDA (see docs/preallocated.md).
            The memory is allocated when the prompt is complete; a token that does not fit raises
            `UnsupportedModeError`. None or False: slots are added as tokens are decoded.
        turns: what happens to a later turn: "compress", as the method says (`Method.further`), or "store" it whole.
            None: "compress" where the method and the cache can.
        chunks: a prompt that is read in chunks is compressed as a "whole", with its last chunk, or chunk by chunk
            ("compress"), which bounds the memory (see docs/contexts.md).
        budget_of: what a share in a budget is of when a further block has been read: the "context" so far, or the first
            "prompt".
        keep_text: whether text of earlier turns, answers included, stays when further blocks are compressed. None:
            True, except with methods that evict while decoding.
        pinned: what further blocks never evict: "none", the text before the first image ("system"), what is stored of
            the "first" prompt, or a number of first tokens.
        pool: a `foveakv.Pool` that slots are stored in, so that caches share its memory, and forks of a cache share
            slots (see docs/pool.md). None: each layer has buffers of its own.
        saveable: record what is read, so that `cache.save` can write the cache to a file (see docs/contexts.md).

    Raises:
        MethodError: an invalid value, or options that exclude each other.
    """

    backend: str = "auto"
    trace: bool = False
    max_decode_slots: int | None = None
    kv_dtype: str | None = None
    residual_length: int = 32
    preallocate: int | bool | None = None
    turns: Literal["compress", "store"] | None = None
    chunks: Literal["whole", "compress"] = "whole"
    budget_of: Literal["context", "prompt"] = "context"
    keep_text: bool | None = None
    pinned: Literal["none", "system", "first"] | int = "none"
    pool: Pool | None = None
    saveable: bool = False

    def __post_init__(self) -> None:
        quantizer.check_options(self.kv_dtype, self.residual_length)
        if self.backend != "auto" and (not isinstance(self.backend, str) or self.backend not in BACKENDS):
            raise MethodError(f"no attention backend {self.backend!r}; choose 'auto' or one of {sorted(BACKENDS)}")
        checks.flag("cache options", "trace", self.trace)
        checks.flag("cache options", "saveable", self.saveable)
        self._check_blocks()
        if self.max_decode_slots is not None:
            checks.whole_number(
                "cache options", "max_decode_slots", self.max_decode_slots, 1, "decoded tokens stored per KV head"
            )
        if self.preallocate is not None and not isinstance(self.preallocate, bool):
            checks.whole_number(
                "cache options", "preallocate", self.preallocate, 1, "decoded tokens; True for the default"
            )
        if self.pool is not None and not isinstance(self.pool, Pool):
            raise MethodError(f'pool must be a foveakv.Pool, such as foveakv.Pool("2GiB"), got {self.pool!r}')
        if self.preallocated is None:
            return
        excluded = {
            "pool": self.pool is not None,
            "kv_dtype": self.kv_dtype is not None,
            "max_decode_slots": self.max_decode_slots is not None,
            "trace": self.trace,
            "saveable": self.saveable,
            "backend": self.backend != "auto",
            'turns="compress"': self.turns == "compress",
            'chunks="compress"': self.chunks == "compress",
        }
        for option, given in excluded.items():
            if given:
                raise MethodError(f"preallocate and {option} cannot be combined; remove one of them")

    def _check_blocks(self) -> None:
        """Raise `MethodError` for an invalid option about further blocks."""
        for name, known in (("turns", (None, "compress", "store")), ("chunks", ("whole", "compress"))):
            if getattr(self, name) not in known:
                raise MethodError(f"{name} must be one of {', '.join(map(repr, known))}; got {getattr(self, name)!r}")
        if self.budget_of not in ("context", "prompt"):
            raise MethodError(f"budget_of must be 'context' or 'prompt'; got {self.budget_of!r}")
        if self.keep_text is not None:
            checks.flag("cache options", "keep_text", self.keep_text)
        if isinstance(self.pinned, str) and self.pinned in ("none", "system", "first"):
            return
        meaning = "first tokens that further blocks never evict; or 'none', 'system', 'first'"
        checks.whole_number("cache options", "pinned", self.pinned, 1, meaning)

    def keeps_text(self, method: Method) -> bool:
        """Whether text of earlier turns stays when further blocks are compressed."""
        return not method.evicts_while_decoding if self.keep_text is None else self.keep_text

    @property
    def preallocated(self) -> int | None:
        """`preallocate` as a number of tokens; None: slots are added as tokens are decoded."""
        if self.preallocate is None or self.preallocate is False:
            return None
        return DEFAULT_PREALLOCATED if self.preallocate is True else self.preallocate

    def check(self, method: Method) -> None:
        """Raises `MethodError` where an option cannot be combined with `method`."""
        if self.max_decode_slots is not None and method.evicts_while_decoding:
            raise MethodError(f"{method.name} bounds what it stores by its budget; leave max_decode_slots out")
        if self.turns == "compress" and method.further == "keep":
            raise MethodError(f'{method.name} stores later turns whole; remove turns="compress"')
        if self.chunks == "compress" and method.further == "keep":
            raise MethodError(f'{method.name} needs a prompt as a whole; remove chunks="compress"')
        if method.evicts_while_decoding:
            for name, given in (("keep_text", self.keep_text is True), ("pinned", self.pinned != "none")):
                if given:
                    raise MethodError(f"{method.name} evicts while decoding, also what {name} names; leave {name} out")
        if self.preallocated is not None:
            PREALLOCATED.check(
                method, "remove preallocate, or use a method that acts at the prompt only (snapkv, adakv, fastv, full)"
            )


def field_types() -> dict[str, Any]:
    """The options and their declared types, for parsers of text."""
    hints = typing.get_type_hints(CacheOptions)
    return {field.name: hints[field.name] for field in dataclasses.fields(CacheOptions)}


def resolve(options: CacheOptions | None, given: Mapping[str, Any]) -> CacheOptions:
    """The options of a call that takes either `options=` or the fields of `CacheOptions` as keyword arguments.

    Raises:
        MethodError: both are given, an unknown keyword argument, or an invalid value.
    """
    known = field_types()
    for name in given:
        if name not in known:
            raise MethodError(f"unknown option {name!r}{near(name, list(known))}; options: {', '.join(known)}")
    if options is None:
        return CacheOptions(**given)
    if not isinstance(options, CacheOptions):
        raise MethodError(f"options must be a foveakv.CacheOptions, got {type(options).__name__}")
    if given:
        raise MethodError(f"{', '.join(given)}: give options either as keyword arguments or in options=, not both")
    return options
