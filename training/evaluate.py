"""Accuracy of the assembled model, end to end: pictures -> processor -> generate(), one question at a time.

Every sequence is prefilled once; each question then continues from the cached prefix, as a chat would. An answer counts
if the generated text is exactly the right one. The test split is for the final figures only; choices use validation.

    python training/evaluate.py --sources DEBS --split test --out results.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from cards import NAMES, SPLITS, Card, makers
from PIL import Image

from foveakv.models.embedded.assembly import ADAPTER, assemble
from foveakv.models.embedded.samples import ALL_CARDS
from foveakv.models.loading import Loaded, load

CHECKS = {  # name -> (kinds, cards, questions in all)
    "digit, 1 image": (["digit"], 1, 200),
    "digit, 4 images": (["digit"], 4, 200),
    "digit, 8 images": (["digit"], 8, 200),
    "digit, 16 images": (["digit"], 16, 192),
    "number, 4 images": (["number"], 4, 200),
    "number, 12 images": (["number"], 12, 120),
    "word, 4 images": (["word"], 4, 200),
    "picture, 4 images": (["picture"], 4, 200),
    "mixed, 8 images": (["digit", "number", "word", "picture"], 8, 120),
    "all cards, 6 digits": (["digit"], 6, 20),
    "all cards, 6 numbers": (["number"], 6, 20),
    "who has, 6 numbers": (["number"], 6, 20),
}


def questions(name: str, names: list[str], cards: list[Card]) -> list[tuple[str, str]]:
    """(question, answer) pairs about a row of cards."""
    answers = [card.answer for card in cards]
    if name.startswith("all cards"):
        return [(ALL_CARDS, ", ".join(answers))]
    if name.startswith("who has"):
        return [(f"Who has {a}? ", n) for n, a in zip(names, answers, strict=True) if answers.count(a) == 1][:1]
    return [(f"{n}'s card: ", a) for n, a in zip(names, answers, strict=True)]


@torch.no_grad()
def ask(loaded: Loaded, names: list[str], cards: list[Card], asked: list[tuple[str, str]]) -> list[str]:
    """Generate the answers from one prefill of the images."""
    model, processor = loaded
    images = [Image.fromarray(card.pixels) for card in cards]
    prefix = "".join(f"{name}'s card: <image>\n" for name in names)
    inputs, replies = processor(images=images, text=prefix, return_tensors="pt"), []
    length, cache = inputs["input_ids"].shape[1], None
    for question, _ in asked:
        more = processor.tokenizer(question, add_special_tokens=False, return_tensors="pt")["input_ids"]
        ids = torch.cat([inputs["input_ids"], more], dim=1)
        pictures = {"pixel_values": inputs["pixel_values"]} if cache is None else {"past_key_values": cache}
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=60,
            do_sample=False,
            return_dict_in_generate=True,
            **pictures,
        )
        cache = out.get("past_key_values", None) or out["cache"]
        cache.crop(length - cache.get_seq_length())  # negative: the number of tokens to remove
        replies.append(processor.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--split", choices=SPLITS[1:], default="validation")
    parser.add_argument("--adapter", type=Path, default=ADAPTER)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="share of the questions to ask")
    parser.add_argument("--only", default="", help="only the checks whose names contain this, or one of these|that")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    loaded, make = load(assemble(args.cache_dir, adapter=args.adapter), device="cpu"), makers(args.sources, args.split)
    results = {}
    for number, (name, (kinds, count, total)) in enumerate(CHECKS.items()):
        if not any(part in name for part in args.only.split("|")):
            continue
        rng, right, done, began, wrong = np.random.default_rng([5, number]), 0, 0, time.monotonic(), []
        while done < total * args.share:
            names = [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]
            cards = [make[str(rng.choice(kinds))](rng) for _ in names]
            asked = questions(name, names, cards)
            for reply, (_, answer) in zip(ask(loaded, names, cards, asked), asked, strict=True):
                right, done = right + (reply == answer), done + 1
                if reply != answer:
                    wrong.append(f"{answer} -> {reply}")
        results[name] = {"right": right, "asked": done, "share": round(right / done, 3), "some_errors": wrong[:8]}
        print(f"{name}: {right}/{done} = {right / done:.3f} ({time.monotonic() - began:.0f} s) {wrong[:4]}", flush=True)
        if args.out:
            args.out.write_text(json.dumps({"split": args.split, "results": results}, indent=1), encoding="utf8")


if __name__ == "__main__":
    main()
