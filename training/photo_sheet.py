"""Make the sheet of photographs that the evaluation puts between its cards. They come with scikit-image and are in the
public domain or CC0 (see NOTICE).

pip install scikit-image
python training/photo_sheet.py
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageOps

from foveakv.evaluation.cards import DATA, PHOTO

VALIDATION = ["camera.png", "retina.jpg", "brick.png", "gravel.png", "rocket.jpg"]
TEST = ["astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "grass.png"]


def main() -> None:
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise SystemExit("scikit-image is not installed: pip install scikit-image")
    sheet = Image.new("RGB", (PHOTO * len(TEST), PHOTO * 2))
    for row, names in enumerate((VALIDATION, TEST)):
        for column, name in enumerate(names):
            with Image.open(Path(spec.origin).parent / "data" / name) as photo:
                square = ImageOps.fit(photo.convert("RGB"), (PHOTO, PHOTO), Image.Resampling.LANCZOS)
            sheet.paste(square, (PHOTO * column, PHOTO * row))
    sheet.save(DATA / "photographs.jpg", quality=88)


if __name__ == "__main__":
    main()
