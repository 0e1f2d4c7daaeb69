"""Read images as transformers' `load_image` does, with an error that names the file where one cannot be used."""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from foveakv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

    ImageSource: TypeAlias = str | os.PathLike[str] | Image

TIMEOUT = 30.0
"""Seconds until a server that does not answer is given up."""

_WEB = ("http://", "https://")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


def read_image(source: ImageSource, *, folder: str | os.PathLike[str] | None = None, allow_urls: bool = False) -> Image:
    """Read one image completely, upright and as 8-bit RGB.

    The sources and the result are those of `transformers.image_utils.load_image`: the EXIF orientation is applied,
    transparency is dropped, and animations give their first frame. Unlike there, greyscale images of more than 8 bits
    are scaled to 8 bits (16-bit integers from 0-65535, floats from 0-1) instead of being clipped.

    Args:
        source: a path, a PIL image, a base64 string, a data URL (`data:image/png;base64,...`), or an http(s) URL.
        folder: the folder that relative paths start from; default: the current one.
        allow_urls: fetch http(s) URLs. Off by default, so that a prompt file cannot make the program open connections.

    Raises:
        InputError: the image is missing, is not an image, is damaged or too large, or its range of values is unknown.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        with _explained("the image"):
            return _rgb(source, "the image")
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(f"an image is a path, a URL, a base64 string or a PIL image, not {type(source).__name__}")
    text = os.fspath(source)
    if not isinstance(text, str):
        raise InputError(f"an image path is text, not {type(text).__name__}")
    if not text:
        raise InputError("the path of an image is empty")
    if text.startswith(_WEB):
        return _decode(io.BytesIO(_fetch(text, allow_urls)), text)
    if text.startswith("data:"):
        return _decode(io.BytesIO(_data_url(text)), _short(text))
    path = Path(folder or "", text)
    if os.path.isfile(path):
        return _decode(path, str(path))
    if isinstance(source, str) and (content := _base64(text)):
        with _not_an_image(InputError(f"image file not found: {_short(str(path))}")):
            return _decode(io.BytesIO(content), _short(text))
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder; give an image file")
    if os.path.exists(path):
        raise InputError(f"{path} is not a regular file; give an image file")
    raise InputError(f"image file not found: {_short(str(path))}")


def read_images(
    sources: ImageSource | Sequence[ImageSource] | None,
    *,
    folder: str | os.PathLike[str] | None = None,
    allow_urls: bool = False,
) -> list[Image]:
    """Read several images; a single path, URL or PIL image counts as a list of one, and None as an empty list.

    Args and errors: see `read_image`.
    """
    return [read_image(source, folder=folder, allow_urls=allow_urls) for source in image_list(sources)]


def image_list(sources: Any) -> list[Any]:
    """The sources as a list; a single path, URL, PIL image or array becomes a list of one. Nothing is read."""
    from PIL import Image

    if sources is None:
        return []
    single = isinstance(sources, (str, os.PathLike, Image.Image)) or _is_array(sources)
    return [sources] if single else list(sources)


def image_name(source: ImageSource, number: int) -> str:
    """A short name for tables and plots: the file's name, or `image N` where there is none."""
    text = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    if text.startswith(_WEB):
        text = text.split("?")[0].split("#")[0].rstrip("/")
    elif text.startswith("data:") or not os.path.isfile(text):
        text = ""
    return Path(text).name or f"image {number}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and getattr(value, "ndim", 0) <= 3


def _fetch(url: str, allowed: bool) -> bytes:
    if not allowed:
        raise InputError(
            f"{_short(url)} is a URL; pass allow_urls=True (--allow-urls) to fetch it, or download it first"
        )
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "foveakv"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            content: bytes = response.read()
    except urllib.error.HTTPError as error:
        raise InputError(f"cannot fetch {_short(url)}: the server answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:  # URLError, timeouts, broken connections; http.client has ValueErrors
        raise InputError(f"cannot fetch {_short(url)}: {getattr(error, 'reason', None) or error}") from error
    except Exception as error:  # http.client.HTTPException and its relatives
        raise InputError(f"cannot fetch {_short(url)}: {type(error).__name__} {error}") from error
    return content


def _data_url(text: str) -> bytes:
    head, comma, content = text.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InputError(f"{_short(text)}: a data URL of an image begins with data:image/...;base64,")
    if not (found := _base64(content)):
        raise InputError(f"{_short(text)}: the data URL is not valid base64")
    return found


def _base64(text: str) -> bytes | None:
    """The decoded text, or None if it is not base64. Line breaks are ignored."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


@contextmanager
def _not_an_image(instead: InputError) -> Iterator[None]:
    """Replace the error of bytes that no decoder knows: a short file name is valid base64 as well."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except InputError as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            raise instead from None
        raise


def _decode(file: Path | io.BytesIO, name: str) -> Image:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    with _explained(name):
        if not (file.stat().st_size if isinstance(file, Path) else file.getbuffer().nbytes):
            raise InputError(f"{name} is empty")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file)
        with image:
            if limit is not None and image.width * image.height > limit:
                warnings.warn(
                    f"{name} is very large ({image.width} x {image.height} pixels); a smaller copy is read faster",
                    Image.DecompressionBombWarning,
                    stacklevel=4,
                )
            image.load()
            return _rgb(image, name)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Report what goes wrong while an image is opened and decoded as an InputError that names it."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(f"{name} is not an image that Pillow can read (PNG, JPEG, WebP, ...)") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(
            f"{name} has too many pixels: {error} Scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it."
        ) from error
    except MemoryError as error:
        raise InputError(f"{name} does not fit into memory; scale it down") from error
    except PermissionError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and others
        raise InputError(f"{name} is damaged or truncated: {error}") from error


def _rgb(image: Image, name: str) -> Image:
    """Upright, 8 bits per channel, RGB."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(_eight_bits(image, name))
    try:
        return upright.convert("RGB")
    except (ValueError, KeyError) as error:
        raise InputError(f"{name} has mode {image.mode}, which Pillow cannot convert to RGB: {error}") from error


def _eight_bits(image: Image, name: str) -> Image:
    """Greyscale of 16 bits, integers or floats as 8-bit greyscale; other modes as they are."""
    import numpy as np
    from PIL import Image

    if image.mode not in (*_SIXTEEN_BITS, "I", "F"):
        return image
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())  # NaN if any value is
    if image.mode in _SIXTEEN_BITS or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = values * (255 / 65535)
    elif not (low >= 0 and high <= 255):
        kind = "integers" if image.mode == "I" else "floats"
        raise InputError(
            f"{name} holds {kind} from {low:g} to {high:g}, and what is white among them is unknown; scale it to 8 bits"
        )
    elif image.mode == "F" and high <= 1:
        values = values * 255
    scaled = Image.fromarray(values.round().astype(np.uint8))
    scaled.getexif().update(image.getexif())
    return scaled


def _short(text: str) -> str:
    """The beginning of a text that may be a whole image in base64."""
    return text if len(text) <= 200 else f"{text[:60]}... ({len(text):,} characters)"
