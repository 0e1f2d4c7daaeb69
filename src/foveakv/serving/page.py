"""The page at `/`: its files, and what it needs to know of the server."""

from __future__ import annotations

import base64
import functools
from importlib import resources
from typing import Any

import fastapi
from starlette.responses import Response

from foveakv.methods import find
from foveakv.serving.errors import ApiError
from foveakv.serving.service import Service
from foveakv.util.values import field_types

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "kept.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
SAMPLES = 8
"""Cards of the sample prompt."""


def router(service: Service) -> fastapi.APIRouter:
    """The routes of the page."""
    routes = fastapi.APIRouter()

    @routes.get("/")
    async def index() -> Response:
        return _file("index.html")

    @routes.get("/page/info.json")
    async def info() -> dict[str, Any]:
        return info_of(service)

    @routes.get("/page/sample.json")
    async def sample() -> dict[str, Any]:
        if not service.is_demo:
            raise ApiError(404, "sample prompts belong to the embedded model")
        return _sample()

    @routes.get("/page/{name}")
    async def file(name: str) -> Response:
        return _file(name)

    return routes


def info_of(service: Service) -> dict[str, Any]:
    """What the page shows before the first question."""
    names = service.policy.methods
    return {
        "model": service.name,
        "method": service.policy.method,
        "methods": [{"name": name, "budget": "budget" in field_types(find(name))} for name in names],
        "sample": service.is_demo,
        "max_new_tokens": service.limits.max_new_tokens,
        "max_images": service.limits.max_images,
        "max_image_bytes": service.limits.max_image_bytes,
    }


def _file(name: str) -> Response:
    if name not in FILES:
        raise ApiError(404, "there is no such file")
    content = resources.files("foveakv.serving").joinpath("static", name).read_bytes()
    return Response(content, headers={**HEADERS, "Content-Type": FILES[name]})


@functools.cache
def _sample() -> dict[str, Any]:
    """The embedded model's sample prompt, with `<image>` at the place of each image."""
    from foveakv.models.embedded import sample_prompt

    found = sample_prompt(SAMPLES, ask=-1)
    images = ["data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in found.paths]
    return {"text": found.text, "images": images, "captions": found.captions, "answer": found.answer}
