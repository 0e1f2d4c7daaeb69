"""Settings of the plugin: from `kv_connector_extra_config` at start, and per request from `SamplingParams.extra_args`.

{"method": "hae", "options": {"ddes": false, "target_visual_tokens": 0.25}, "per_request": true}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foveakv.errors import MethodError, UnsupportedModeError
from foveakv.methods import Method, get, near
from foveakv.methods.capabilities import Capabilities

CONNECTOR = "FoveaKVConnector"
"""The name for `kv_connector` in vLLM's `kv_transfer_config`."""
OFF = "off"
KEY = "foveakv"
"""The key in `SamplingParams.extra_args` (`vllm_xargs` of the server)."""

ENGINE = Capabilities(
    engine="vLLM",
    granularity="token",
    decode_eviction=True,
    retrieval=False,
    attention_sum=True,
    second_pass=False,
    merging=False,
    token_pruning=False,
    decode_and_read=False,
)


@dataclass(frozen=True)
class Choice:
    """A method by name with its options, as it travels between processes. method: "off" leaves requests unchanged."""

    method: str = OFF
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def off(self) -> bool:
        """Whether requests are left unchanged."""
        return self.method == OFF

    def create(self) -> Method:
        """Create the method.

        Raises:
            MethodError: the method or an option is unknown or invalid, or the method needs what vLLM cannot store.
        """
        method = get(self.method, **self.options)
        ENGINE.check(method, _advice(method))
        return method


def remembered(create: Callable[[Choice], Method]) -> Callable[[Choice], Method]:
    """Return `create` with a memory for the last 64 new choices, by their JSON text: budgets 1 and 1.0 are different.

    The result raises MethodError for options that JSON does not have.
    """
    found: dict[str, Method] = {}

    def of_choice(choice: Choice) -> Method:
        try:
            text = json.dumps([choice.method, dict(choice.options)], sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise MethodError(f"options of {choice.method} must be values that JSON has: {error}") from None
        if text not in found:
            made = create(choice)
            if len(found) == 64:
                del found[next(iter(found))]
            found[text] = made
        return found[text]

    return of_choice


@dataclass(frozen=True)
class Settings:
    """What an engine was started with.

    default: for requests that choose nothing. per_request: whether they may. attention_every: the decode steps whose
    attention is computed for methods that observe it; they count for the others too. allow_unverified: whether it may
    run where the plugin has not been verified.
    """

    default: Choice
    per_request: bool = True
    attention_every: int = 1
    allow_unverified: bool = False

    def of_request(self, extra_args: Mapping[str, Any] | None) -> Choice:
        """Return the choice of a request.

        Args:
            extra_args: `SamplingParams.extra_args`; its entry "foveakv" is "off", a mapping with "method" and
                "options", or the same as JSON text (the server's `vllm_xargs` cannot nest).

        Raises:
            MethodError: the entry is invalid, or the engine was started with "per_request": false.
        """
        given = (extra_args or {}).get(KEY)
        if given is None:
            return self.default
        if not self.per_request:
            raise MethodError("this engine does not let requests choose a method (per_request is false)")
        if given == OFF:
            return Choice()
        if isinstance(given, str):
            given = _from_json(given)
        choice = _choice(given, f"extra_args[{KEY!r}]", ("method", "options"))
        for option, value in choice.options.items():
            if _names_file(value):
                raise MethodError(f"requests cannot name files of the server: {option}={value!r}")
        if not choice.off:
            choice.create()
        return choice


def parse(extra_config: Mapping[str, Any]) -> Settings:
    """Parse `kv_connector_extra_config`.

    Raises:
        MethodError: a setting is missing, unknown or invalid, or vLLM cannot run the method.
    """
    what = "kv_connector_extra_config"
    flags = {"per_request": True, "allow_unverified": False}
    choice = _choice(extra_config, what, ("method", "options", "attention_every", *flags))
    every = extra_config.get("attention_every", 1)
    if type(every) is not int or every < 1:
        raise MethodError(f"{what}: attention_every must be a whole number of steps above 0, got {every!r}")
    for name, default in flags.items():
        flags[name] = extra_config.get(name, default)
        if not isinstance(flags[name], bool):
            raise MethodError(f"{what}: {name} must be true or false, got {flags[name]!r}")
    if not choice.off:
        choice.create()
    return Settings(choice, attention_every=every, **flags)


def check_connector(config: Any) -> None:
    """Check that vLLM has not replaced the connector of a `VllmConfig`, by which nothing would be compressed.

    Raises:
        UnsupportedModeError: it has, for offloading.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector == CONNECTOR or config.cache_config.kv_offloading_size is None:
        return
    if "method" in transfer.kv_connector_extra_config:
        raise UnsupportedModeError(
            f"FoveaKV in vLLM does not support kv_offloading_size, which replaces it by {transfer.kv_connector}; "
            "leave it out"
        )


def _choice(given: Any, what: str, known: tuple[str, ...]) -> Choice:
    if not isinstance(given, Mapping):
        raise MethodError(f'{what} must be "off" or an object with "method" and "options", got {given!r}')
    for name in given:
        if name not in known:
            hint = near(str(name), list(known))
            raise MethodError(
                f"{what} has no setting {name!r}{hint}; its settings: {', '.join(known)} (options of the method belong "
                'into "options")'
            )
    if "method" not in given:
        raise MethodError(f'{what} needs "method": the name of a method, or "off"')
    options = given.get("options", {})
    if not isinstance(given["method"], str) or not isinstance(options, Mapping):
        raise MethodError(f'{what}: "method" must be a name and "options" an object, got {dict(given)!r}')
    for option in options:
        if not isinstance(option, str):
            raise MethodError(f"{what}: names of options must be strings, got {option!r}")
    if given["method"] == OFF and options:
        raise MethodError(f'{what}: "method": "off" takes no options')
    return Choice(given["method"], dict(options))


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MethodError(f'extra_args[{KEY!r}] must be "off" or a JSON object: {error}') from None


def _names_file(value: Any) -> bool:
    """Whether a value, or one inside it, may be a path. Methods strip spaces and brackets before they read options."""
    if isinstance(value, Mapping):
        return any(_names_file(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return any(map(_names_file, value))
    if not isinstance(value, str):
        return False
    text = re.sub(r"[\s()\[\]]", "", value).lower()
    return bool(set(text) & {"/", "\\", "~"}) or text.endswith((".json", ".safetensors"))


def _advice(method: Method) -> str:
    if getattr(method, "ddes", False):
        return 'HAE runs with "scores": "shared", or with "ddes": false'
    return "vLLM has one block table per request; use the transformers engine for this method"
