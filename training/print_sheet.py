"""Render the sheet of printed characters that the evaluation draws from: fonts that training never saw.

python training/print_sheet.py --sources DEBS
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from cards import fonts, print_tiles
from PIL import Image

from foveakv.evaluation.cards import DATA, TILE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    root = parser.parse_args().sources / "usr/share/fonts"
    tiles = np.concatenate([print_tiles(fonts([root], split)[:8]) for split in ("validation", "test")], axis=1)
    sheet = tiles.swapaxes(1, 2).reshape(len(tiles) * TILE, -1)
    Image.fromarray(sheet).save(DATA / "print.png", optimize=True)


if __name__ == "__main__":
    main()
