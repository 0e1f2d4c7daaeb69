"""Read the images of a request: data URLs always, http(s) URLs and local files where the operator allows them.

An image is checked before it is decoded: its encoded size, its format, and its number of pixels.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import urllib.parse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foveakv.errors import InputError
from foveakv.models.images import read_image
from foveakv.serving.errors import ApiError
from foveakv.serving.fetch import fetch
from foveakv.serving.limits import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The image formats that OpenAI takes; decoders of other formats are never run."""

_DATA = re.compile(r"data:image/[a-zA-Z0-9.+-]{1,40};base64,")


@dataclass(frozen=True)
class ImageReader:
    """Reads images within limits.

    allow_urls: fetch http(s) URLs of public hosts. allow_private_urls: of any host and port. root: the folder whose
    files may be given as file:// URLs; None: no local files.
    """

    limits: Limits
    allow_urls: bool = False
    allow_private_urls: bool = False
    root: Path | None = None

    def check(self, urls: Sequence[str]) -> None:
        """Raise `ApiError` for what is wrong with the number, the kinds and the sizes of images; nothing is read."""
        if len(urls) > self.limits.max_images:
            raise _wrong(f"{len(urls)} images are more than {self.limits.max_images}", "too_many_images")
        for url in urls:
            self._kind(url)

    def read(self, urls: Sequence[str]) -> list[Image]:
        """Read all images, upright and as 8-bit RGB.

        Raises:
            ApiError: an image cannot be read, is too large, or its URL is not allowed. The message has its number.
        """
        self.check(urls)
        found: list[Image] = []
        pixels = 0
        for number, url in enumerate(urls):
            try:
                found.append(self._decode(self._content(url), self.limits.max_total_pixels - pixels))
            except ApiError as error:
                raise ApiError(
                    error.status, f"image {number + 1}: {error}", param="messages", code=error.code
                ) from None
            pixels += found[-1].width * found[-1].height
        return found

    def _kind(self, url: str) -> str:
        head = url[:8].lower()
        if head.startswith("data:"):
            if len(url) > self.limits.max_image_bytes * 4 // 3 + 200:
                raise self._too_many_bytes()
            return "data"
        if head.startswith(("http://", "https://")):
            if not self.allow_urls:
                raise _wrong("this server does not fetch URLs; send images as data URLs", "url_not_allowed")
            if len(url) > 8192:
                raise _wrong("the image URL is longer than 8,192 characters", "invalid_image_url")
            return "web"
        if head.startswith("file:"):
            if self.root is None:
                raise _wrong("this server reads no local files; send images as data URLs", "file_not_allowed")
            return "file"
        raise _wrong("an image must be a URL that begins with data:image/, https:// or file://", "invalid_image_url")

    def _content(self, url: str) -> bytes:
        kind = self._kind(url)
        if kind == "data":
            return _base64(url)
        if kind == "file":
            assert self.root is not None  # checked by _kind
            return read_local(url, self.root, self.limits.max_image_bytes)
        return fetch(
            url,
            most=self.limits.max_image_bytes,
            seconds=self.limits.fetch_seconds,
            allow_private=self.allow_private_urls,
        )

    def _decode(self, content: bytes, pixels_left: int) -> Image:
        from PIL import Image, UnidentifiedImageError

        if len(content) > self.limits.max_image_bytes:
            raise self._too_many_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                opened = Image.open(io.BytesIO(content), formats=FORMATS)  # reads the header alone
        except (UnidentifiedImageError, Image.DecompressionBombError):
            raise _wrong(f"not an image of a supported format ({', '.join(FORMATS)}), or too large") from None
        except Exception as error:  # decoders raise all sorts of exceptions
            raise _wrong(f"damaged ({type(error).__name__})") from None
        with opened:
            pixels, most = opened.width * opened.height, self.limits.max_image_pixels
            if pixels > most:
                size = f"{opened.width} x {opened.height}"
                raise _wrong(f"{size} pixels are more than {most:,}; scale it down", "image_too_large")
            if pixels > pixels_left:
                raise _wrong(
                    f"all images together have more than {self.limits.max_total_pixels:,} pixels; scale them down",
                    "image_too_large",
                )
            try:
                opened.load()
                return read_image(opened)
            except InputError as error:
                raise _wrong(str(error)) from None
            except Exception as error:
                raise _wrong(f"damaged or truncated ({type(error).__name__})") from None

    def _too_many_bytes(self) -> ApiError:
        return _wrong(f"larger than {self.limits.max_image_bytes:,} bytes", "image_too_large")


def read_local(url: str, root: Path, most: int) -> bytes:
    """Read a file below `root`, with links resolved.

    Raises:
        ApiError: the URL names no regular file below the root, or it is larger than `most` bytes. The message is the
            same for files that do not exist and files that are elsewhere.
    """
    missing = _wrong("there is no such image file below the server's image folder", "file_not_found")
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise missing
        path = os.path.realpath(urllib.parse.unquote(parts.path, errors="strict"))
        folder = os.path.realpath(root)
        if os.path.commonpath([folder, path]) != folder:
            raise missing
        # O_NOFOLLOW: the path was resolved, so a link at its end is new. O_NONBLOCK: a pipe must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise missing from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise missing
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > most:
            raise _wrong(f"larger than {most:,} bytes", "image_too_large")
        return file.read(most + 1)


def _base64(url: str) -> bytes:
    head = _DATA.match(url)
    if head is None:
        raise _wrong("a data URL of an image begins with data:image/...;base64,", "invalid_image_url")
    try:
        content = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("the data URL is not valid base64", "invalid_base64") from None
    if not content:
        raise _wrong("the data URL is empty")
    return content


def _wrong(message: str, code: str = "invalid_image") -> ApiError:
    return ApiError(400, message, param="messages", code=code)
