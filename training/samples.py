"""Render the sample cards that the package ships, from held-out digits and fonts.

python training/samples.py --sources DEBS
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from cards import NAMES, WORDS, digit_splits, digits_card, fonts, word_card
from PIL import Image

from foveakv.models.embedded.samples import FOLDER

COUNT, SEED = 16, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    share, rng = parser.parse_args().sources / "usr/share", np.random.default_rng(SEED)
    glyphs = digit_splits(share / "doc/opencv-doc/examples/data/digits.png")["test"]
    font_files, words = fonts([share / "fonts"], "test"), rng.permutation(WORDS)
    makers = {
        "digit": lambda i: digits_card(rng, glyphs, 1),
        "number": lambda i: digits_card(rng, glyphs, 3),
        "word": lambda i: word_card(rng, str(words[i]), font_files),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    table: dict[str, list[dict[str, str]]] = {}
    for kind, make in makers.items():
        table[kind] = []
        for i in range(COUNT):
            card, file = make(i), f"{kind}-{i + 1:02}.png"
            Image.fromarray(card.pixels).save(FOLDER / file, optimize=True)
            table[kind].append({"name": NAMES[i], "file": file, "answer": card.answer})
    (FOLDER / "samples.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
