"""The method of a request, within what the operator allows."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foveakv.core.budget import Geometry, parse_budget
from foveakv.engines.transformers.options import CacheOptions
from foveakv.errors import FoveaKVError, MethodError
from foveakv.methods import Method, available, find, get
from foveakv.serving.errors import ApiError
from foveakv.serving.schema import FoveaKVOptions
from foveakv.util.values import field_types

OPERATORS = ("store", "store_dir", "head_scores")
"""Options that name files or memory of the server: only the operator sets them."""


@dataclass(frozen=True)
class Choice:
    """The method and cache options of a request. chosen: the client named the method."""

    method: Method
    options: CacheOptions
    chosen: bool = False


@dataclass(frozen=True)
class Policy:
    """The default method, and what requests may choose.

    method: used where a request names none. options: the default's options, its budget included. kv_dtype,
    residual_length: of the caches. allowed: methods that requests may name; None: all that the server can make.
    max_budget: the largest share of the prompt that a request may keep. per_request: whether requests may choose at
    all. allow_options: whether requests may set options of methods other than `preset`; some values make a prefill
    arbitrarily slow, so this is for clients that are trusted.

    Raises:
        MethodError: the default method or one of the allowed ones does not exist or cannot be made.
    """

    method: str = "hybridkv"
    options: Mapping[str, Any] = field(default_factory=dict)
    kv_dtype: str | None = None
    residual_length: int = 32
    allowed: tuple[str, ...] | None = None
    max_budget: float | None = None
    per_request: bool = True
    allow_options: bool = False

    def __post_init__(self) -> None:
        self.default()
        for name in self.allowed or ():
            find(name)
        if self.max_budget is not None and not 0 < self.max_budget <= 1:
            raise MethodError(f"max_budget must be above 0 and at most 1, got {self.max_budget!r}")

    def default(self) -> Choice:
        """The choice of requests that say nothing."""
        method = get(self.method, **self.options)
        options = CacheOptions(kv_dtype=self.kv_dtype, residual_length=self.residual_length)
        options.check(method)
        return Choice(method, options)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names that requests may use."""
        if not self.per_request:
            return (self.method,)
        names = available() if self.allowed is None else [*self.allowed]
        return tuple(dict.fromkeys([self.method, *(name for name in names if name == self.method or _makeable(name))]))

    def choose(self, wanted: FoveaKVOptions | None) -> Choice:
        """Make the method that a request asks for.

        Options of the default method stay where the request names it again, and are overridden one by one.

        Raises:
            ApiError: the operator does not allow it, or the method, its budget or an option is invalid.
        """
        if wanted is None or not wanted.model_fields_set - {"kept"}:
            return self.default()
        if not self.per_request:
            raise _refused("this server does not let requests choose a method", "foveakv")
        name = wanted.method or self.method
        if name not in self.methods:
            raise _refused(
                f"method {name!r} is not available on this server; it offers {', '.join(self.methods)}",
                "foveakv.method",
            )
        options = dict(self.options) if name == self.method else {}
        own = dict(wanted.options or {})
        for option in own:
            if option != "preset" and not self.allow_options:
                raise _refused("this server does not let requests set options", f"foveakv.options.{option}")
            if option in OPERATORS or _holds_path(name, option):
                raise _refused(f"{option} can be set by the operator alone", f"foveakv.options.{option}")
        if wanted.budget is not None:
            if "budget" in own:
                raise _refused("the budget is given twice", "foveakv.budget")
            if "budget" not in field_types(find(name)):
                raise _refused(f"{name} takes no budget", "foveakv.budget")
            own["budget"] = wanted.budget
        if "preset" in own:
            options = {}
        options |= {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
        kv_dtype = wanted.kv_dtype or self.kv_dtype
        try:
            method = get(name, **options)
            cache = CacheOptions(kv_dtype=kv_dtype, residual_length=self.residual_length)
            cache.check(method)
        except (FoveaKVError, TypeError, ValueError, OverflowError) as error:
            raise _refused(str(error), "foveakv") from None
        return Choice(method, cache, chosen=wanted.method is not None)

    def check_share(self, method: Method, geometry: Geometry) -> None:
        """Raise `ApiError` where a method may keep more than `max_budget` of this prompt."""
        if self.max_budget is None or method == self.default().method:
            return
        budget = getattr(method, "budget", None)
        if budget is None:
            raise _refused(f"{method.name} has no budget, and this server limits it", "foveakv.budget")
        most = max(1, int(self.max_budget * int(max(geometry.contexts))))
        if int(parse_budget(budget).tokens(geometry).max()) > most:
            raise _refused(f"budget {budget} is more than {self.max_budget:.0%} of the prompt", "foveakv.budget")


def _makeable(name: str) -> bool:
    """Whether a method needs nothing that only the operator can set."""
    fields = [each for each in dataclasses.fields(find(name)) if each.init]
    if any(each.name == "head_scores" for each in fields):
        return False
    return all(
        each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING for each in fields
    )


def _holds_path(name: str, option: str) -> bool:
    kind = field_types(find(name)).get(option)
    return kind is Path or Path in typing.get_args(kind)


def _refused(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
