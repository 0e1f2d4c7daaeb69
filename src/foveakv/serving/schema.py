"""The requests that the server reads, as strict as OpenAI's, and what is refused by name."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field

from foveakv.serving.errors import ApiError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
}
"""Fields of OpenAI's that are not supported, and the values that ask for nothing, which are accepted."""

_TYPES = re.compile(r"(float|int|bool|str|constrained-str|literal\[.*\])$")
"""What pydantic adds to the place of an error for each type of a union."""

_IDS = ("user", "safety_identifier", "prompt_cache_key")  # name the caller, and change no reply


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageURL(_Strict):
    """A data URL, or an http(s) or file URL where the operator allows it. Images are never read at low resolution."""

    url: str
    detail: Literal["auto", "high"] | None = None


class ImagePart(_Strict):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(_Strict):
    """A message. A text is the same as one part of text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], Field(min_length=1, max_length=4096)]

    @pydantic.field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, value: Any) -> Any:
        return [{"type": "text", "text": value}] if isinstance(value, str) else value


class StreamOptions(_Strict):
    """include_usage: a last chunk has the usage."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class FoveaKVOptions(_Strict):
    """What `extra_body={"foveakv": ...}` takes.

    method, budget, options, kv_dtype: as on the command line; options are those of the method. kept: report which
    patches of the images are stored at the end of the answer, on average or also for each layer.
    """

    method: str | None = None
    budget: float | int | Annotated[str, Field(max_length=32)] | None = None
    options: dict[str, Any] | None = None
    kv_dtype: Literal["int8", "int4"] | None = None
    kept: bool | Literal["layers"] = False


class ChatRequest(_Strict):
    """A request for chat completions."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = Field(default=None, max_length=4)
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    foveakv: FoveaKVOptions | None = None

    @pydantic.field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def parse_request(body: bytes) -> ChatRequest:
    """Read a request.

    Raises:
        ApiError: the body is not JSON, a field is not supported, or a value is invalid; `param` names the field.
    """
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, values in NEUTRAL.items():
        if name in data and not any(_same(data[name], value) for value in values):
            raise _unsupported(name)
        data.pop(name, None)
    for name in _IDS:
        if not isinstance(data.pop(name, None), (str, type(None))):
            raise ApiError(400, f"{name} must be text", param=name)
    try:
        request = ChatRequest.model_validate(data)
    except pydantic.ValidationError as error:
        raise _explained(error) from None
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError(400, "give either max_tokens or max_completion_tokens", param="max_tokens")
    return request


def _same(given: Any, neutral: Any) -> bool:
    return given == neutral and isinstance(given, bool) == isinstance(neutral, bool)


def _unsupported(name: str) -> ApiError:
    return ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")


def _explained(error: pydantic.ValidationError) -> ApiError:
    """The first mistake, as OpenAI words it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"] if not _TYPES.match(str(part)))
    if first["type"] == "extra_forbidden":
        return _unsupported(name)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{name}: {first['msg']}", param=name or None, code=code)
