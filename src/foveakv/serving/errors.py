"""Errors of the server as OpenAI's JSON."""

from __future__ import annotations

from typing import Any

from foveakv.errors import FoveaKVError, MissingDependencyError

INSTALL = "pip install 'foveakv[serve]'"


class ApiError(FoveaKVError):
    """An error that a client gets as JSON.

    status: the HTTP status. kind: OpenAI's `type`. param: the field that is wrong. code: OpenAI's `code`.
    retry_after: seconds for the header of that name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers of the reply."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**found, **({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})}


def overloaded(message: str) -> ApiError:
    """429: try again later."""
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", retry_after=1)


def internal(message: str, status: int = 500) -> ApiError:
    """An error that is not the client's."""
    return ApiError(status, message, kind="server_error", code="internal_error")


def of_exception(error: BaseException) -> ApiError:
    """The error that a client gets for an exception: mistakes are explained, bugs are named by their type alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MissingDependencyError):
        return internal("a package that this request needs is not installed on the server")
    if isinstance(error, FoveaKVError):
        return ApiError(400, str(error))
    if _out_of_memory(error):
        return internal("the server ran out of memory on this request; send fewer or smaller images", 503)
    return internal(f"the server failed on this request ({type(error).__name__})")


def _out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
