"""Options of a compressed cache, shared by `compress`, `cache_for`, the command line and the evaluation."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        pool: a `foveakv.Pool` that slots are stored in, so that caches share its memory, and forks of a cache share
            slots (see docs/pool.md). None: each layer has buffers of its own.

    Raises:
        MethodError: an invalid value, or options that exclude each other.
    """

    backend: str = "auto"
    trace: bool = False
    max_decode_slots: int | None = None
    kv_dtype: str | None = None
    residual_length: int = 32
    preallocate: int | bool | None = None
    pool: Pool | None = None

    def __post_init__(self) -> None:
        quantizer.check_options(self.kv_dtype, self.residual_length)
        if self.backend != "auto" and (not isinstance(self.backend, str) or self.backend not in BACKENDS):
            raise MethodError(f"no attention backend {self.backend!r}; choose 'auto' or one of {sorted(BACKENDS)}")
        checks.flag("cache options", "trace", self.trace)
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
            "backend": self.backend != "auto",
        }
        for option, given in excluded.items():
            if given:
                raise MethodError(f"preallocate and {option} cannot be combined; remove one of them")

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
