"""Images are read as transformers' `load_image` reads them; every file that cannot be used is named."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_folder
from PIL import Image
from transformers.image_utils import load_image

from foveakv.errors import InputError
from foveakv.models.images import image_list, image_name, read_image, read_images
from foveakv.models.inputs import build_inputs

ORIENTATION = 0x112


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


def content(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


# ---- the same as transformers


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_the_orientation_is_applied(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif, file = Image.Exif(), tmp_path / f"photo.{suffix}"
    exif[ORIENTATION] = orientation
    tiny_folder.picture(size=(20, 10)).save(file, exif=exif)
    found = read_image(file)
    assert found.size == ((20, 10) if orientation < 5 else (10, 20))
    np.testing.assert_array_equal(pixels(found), pixels(load_image(str(file))))
    with Image.open(file) as opened:  # an image that is already open
        np.testing.assert_array_equal(pixels(read_image(opened)), pixels(found))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_modes(mode: str) -> None:
    image = tiny_folder.picture().convert(mode if mode != "HSV" else "RGB").convert(mode)
    found = read_image(image)
    assert found.mode == "RGB"
    np.testing.assert_array_equal(pixels(found), pixels(load_image(image)))


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [tiny_folder.picture(i) for i in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(pixels(read_image(tmp_path / "a.gif")), pixels(load_image(str(tmp_path / "a.gif"))))


def test_base64_and_data_urls() -> None:
    image = tiny_folder.picture()
    text = base64.b64encode(content(image)).decode()
    for source in (text, base64.encodebytes(content(image)).decode(), f"data:image/png;base64,{text}"):
        np.testing.assert_array_equal(pixels(read_image(source)), pixels(load_image(source)))


# ---- more than 8 bits


@pytest.mark.parametrize(("values", "suffix"), [
    (np.linspace(0, 65535, 256).astype(np.uint16), "png"),
    (np.linspace(0, 65535, 256).astype(np.uint16), "tiff"),
    (np.linspace(0, 65535, 256).astype(np.uint16), "ppm"),
    (np.linspace(0, 1, 256, dtype=np.float32), "tiff"),
    (np.linspace(0, 255, 256, dtype=np.float32), "tiff"),
    (np.arange(256, dtype=np.int32), "tiff"),
])  # fmt: skip
def test_greyscale_of_more_bits_is_scaled(tmp_path: Path, values: np.ndarray, suffix: str) -> None:
    file = tmp_path / f"grey.{suffix}"
    Image.fromarray(values.reshape(16, 16)).save(file)
    expected = np.arange(256).reshape(16, 16)
    for source in (file, Image.open(file)):
        found = pixels(read_image(source))
        assert found.shape == (16, 16, 3)
        assert int(np.abs(found - expected[..., None]).max()) <= 1


@pytest.mark.parametrize("values", [
    np.array([[-0.1, 0.5]], dtype=np.float32),
    np.array([[0.0, 300.0]], dtype=np.float32),
    np.array([[0.0, np.nan]], dtype=np.float32),
    np.array([[0.0, np.inf]], dtype=np.float32),
    np.array([[0, 4095]], dtype=np.int32),
    np.array([[-1, 5]], dtype=np.int32),
])  # fmt: skip
def test_an_unknown_range_is_refused(values: np.ndarray) -> None:
    with pytest.raises(InputError, match="scale it to 8 bits"):
        read_image(Image.fromarray(values))


def test_16_bits_with_an_orientation(tmp_path: Path) -> None:
    exif, file = Image.Exif(), tmp_path / "grey.png"
    exif[ORIENTATION] = 6
    Image.fromarray(np.full((10, 20), 65535, np.uint16)).save(file, exif=exif)
    found = read_image(file)
    assert found.size == (10, 20)
    assert int(pixels(found).min()) == 255


# ---- what cannot be used


@pytest.mark.parametrize(("source", "message"), [
    ("gone.png", "image file not found: .*gone.png"),
    ("gone", "image file not found"),  # valid base64 as well
    ("A" * 5000, r"image file not found: A+\.\.\. \(5,000 characters\)"),
    ("", "empty"),
    (".", "is a folder"),
    ("/dev/null", "is not a regular file"),
    ("data:text/plain,hello", "a data URL of an image begins with"),
    ("data:image/png;base64,???", "not valid base64"),
    ("data:image/png;base64,QUJDRA==", "is not an image that Pillow can read"),
    ("nul\0l", "image file not found"),
    (b"bytes", "not bytes"),
    (3, "not int"),
])  # fmt: skip
def test_sources_that_are_no_image(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_image(source)


def test_files_that_are_no_image(tmp_path: Path) -> None:
    for name, data, message in (
        ("empty.png", b"", "empty.png is empty"),
        ("notes.png", b"just text", "notes.png is not an image"),
        ("cut.png", content(tiny_folder.picture(size=(200, 200)))[:20_000], "cut.png is damaged or truncated"),
        ("cut.jpg", content(tiny_folder.picture(size=(200, 200)), "JPEG")[:5000], "cut.jpg is damaged or truncated"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_image(tmp_path / name)
        with pytest.raises(InputError, match=message):
            read_image(name, folder=tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_file_never_raises_anything_else(tmp_path: Path) -> None:
    """One flipped byte anywhere: the image is read, or an InputError says why not."""
    rng = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP", "PPM"):
        whole = content(tiny_folder.picture(size=(20, 20)), kind)
        for place in rng.integers(0, min(len(whole), 200), 40):
            damaged = bytearray(whole)
            damaged[place] ^= int(rng.integers(1, 256))
            file = tmp_path / "damaged"
            file.write_bytes(bytes(damaged))
            with contextlib.suppress(InputError):
                read_image(file)


def test_very_large_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large.png"
    tiny_folder.picture(size=(20, 10)).save(file)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)
    with pytest.warns(Image.DecompressionBombWarning, match=r"large\.png is very large \(20 x 10 pixels\)"):
        assert read_image(file).size == (20, 10)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(InputError, match=r"large\.png has too many pixels"):
        read_image(file)


# ---- URLs


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "/a.png?size=1")
                self.end_headers()
                return
            self.send_response(200 if "a.png" in self.path else 404)
            self.end_headers()
            self.wfile.write(content(tiny_folder.picture()))

        def log_message(self, *unused: Any) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


def test_urls_need_permission(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(InputError, match="--allow-urls"):
        read_image(f"{server}/a.png")
    with pytest.raises(InputError, match="--allow-urls"):
        build_inputs(tiny_folder.processor(), "Hm?", f"{server}/a.png")
    for name in ("a.png", "moved.png"):
        found = read_image(f"{server}/{name}", allow_urls=True)
        np.testing.assert_array_equal(pixels(found), pixels(tiny_folder.picture()))
    assert "pixel_values" in build_inputs(tiny_folder.processor(), "Hm?", f"{server}/a.png", allow_urls=True)
    with pytest.raises(InputError, match="the server answers 404"):
        read_image(f"{server}/b.png", allow_urls=True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", "http://", "http://[x/", "http://a b/"])
def test_urls_that_cannot_be_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(InputError, match="cannot fetch"):
        read_image(url, allow_urls=True)


# ---- one image in place of a list


def test_a_single_image_is_a_list_of_one(tmp_path: Path) -> None:
    (file,) = tiny_folder.pictures(tmp_path, 1)
    processor = tiny_folder.processor()
    expected = build_inputs(processor, "Hm?", [file])["pixel_values"]
    text = base64.b64encode(file.read_bytes()).decode()
    for single in (file, str(file), Image.open(file), text, pixels(read_image(file))):
        np.testing.assert_array_equal(build_inputs(processor, "Hm?", single)["pixel_values"], expected)
        assert len(image_list(single)) == 1
    assert [image.size for image in read_images(str(file))] == [(70, 60)]
    assert read_images(None) == read_images([]) == []
    assert len(read_images(iter([file, file]))) == 2  # type: ignore[arg-type]


def test_names_for_tables(tmp_path: Path) -> None:
    (file,) = tiny_folder.pictures(tmp_path, 1)
    assert image_name(file, 1) == "picture0.png"
    assert image_name("https://example.org/a/b.png?x=1/2", 1) == "b.png"
    assert image_name("data:image/png;base64,QUJD/x", 2) == "image 2"
    assert image_name(tiny_folder.picture(), 3) == "image 3"
