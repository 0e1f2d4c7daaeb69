"""Align the projector with the text model's vocabulary, before the language model is trained.

Every image token that shows (part of) an answer is pulled towards the input embedding of that answer, and so is their
mean over the card. This costs about a hundredth of training through the text model, which then only has to learn to
look up the right card and to read parts in order.

    python training/align.py --data RUN --vision VIT.onnx --text TEXT.gguf --start old.safetensors --out new.safetensors
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import Pool, load_towers, read_pools
from tokenizers import Tokenizer
from torch import nn

from foveakv.models.embedded.network import Adapter

TEMPERATURE, NORM = 20.0, 1.5  # of the cosine; length of an aligned token relative to a word's own embedding


def parts(answer: str) -> list[str]:
    """Return what the cells of a card can show: every digit of a number, or the whole caption."""
    return list(answer) if answer.isdigit() else [answer]


class Alignment:
    """The targets: one direction of the embedding space for every digit, word and caption of the pools."""

    def __init__(self, pools: dict[str, Pool], tokenizer: Tokenizer, embedding: torch.Tensor) -> None:
        self.names = sorted({part for pool in pools.values() for answer in pool.answers for part in parts(answer)})
        self.numbers = {name: i for i, name in enumerate(self.names)}
        self.centre = embedding.mean(0)
        concepts = torch.stack([self._concept(name, tokenizer, embedding) for name in self.names]) - self.centre
        self.directions, self.length = F.normalize(concepts, dim=-1), NORM * concepts.norm(dim=-1).mean()

    @staticmethod
    def _concept(answer: str, tokenizer: Tokenizer, embedding: torch.Tensor) -> torch.Tensor:
        """[hidden]: mean embedding of the answer's tokens, with and without a space in front."""
        forms = [answer] if answer.isdigit() else [answer, f" {answer}"]
        return torch.stack([embedding[tokenizer.encode(f, add_special_tokens=False).ids].mean(0) for f in forms]).mean(
            0
        )

    def outputs(self, projector: nn.Module, pool: Pool, rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Centred outputs and labels of the shown cells ([n, hidden], [n]) and of the means of the cards that show one
        concept ([m, hidden], [m])."""
        answers = [parts(pool.answers[row]) for row in rows]
        cells = np.stack([np.where(pool.cells[r] < 0, -1, [self.numbers[a[max(c, 0)]] for c in pool.cells[r]])
                          for r, a in zip(rows, answers, strict=True)])  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16):
            out = projector(torch.from_numpy(pool.features[rows]).float()).float() - self.centre
        labels, shown = torch.from_numpy(cells), torch.from_numpy(cells >= 0)
        single = [i for i, a in enumerate(answers) if len(a) == 1 and shown[i].any()]
        mean = (out * shown[..., None]).sum(1)[single] / shown.sum(1, keepdim=True)[single]
        return out[shown], labels[shown], mean, torch.tensor([self.numbers[answers[i][0]] for i in single])

    def loss(self, projector: nn.Module, pool: Pool, rows: np.ndarray) -> torch.Tensor:
        """Cross-entropy over the concepts for cells and cards, and a pull towards one common length."""
        cells, cell_labels, cards, card_labels = self.outputs(projector, pool, rows)
        loss = 0.5 * self._classify(cells, cell_labels) + 0.2 * ((cells.norm(dim=-1) / self.length - 1) ** 2).mean()
        return loss + self._classify(cards, card_labels) if len(cards) else loss

    def _classify(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.normalize(outputs, dim=-1) @ self.directions.T * TEMPERATURE, labels)

    @torch.no_grad()
    def report(self, projector: nn.Module, pools: dict[str, Pool]) -> str:
        """Share of cells and cards whose output is nearest (by angle) to the right direction."""
        scores = []
        for kind, pool in pools.items():
            cells, cell_labels, cards, card_labels = self.outputs(projector, pool, np.arange(len(pool.answers)))
            scores.append(f"{kind}: cell {((cells @ self.directions.T).argmax(-1) == cell_labels).float().mean():.3f}")
            if len(cards):
                scores.append(f"card {((cards @ self.directions.T).argmax(-1) == card_labels).float().mean():.3f}")
        return ", ".join(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "vision", "text", "start", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_towers(args.vision, args.text)
    adapter = Adapter.read(args.start)
    projector, embedding = model.model.multi_modal_projector, model.model.language_model.embed_tokens.weight.detach()
    projector.load_state_dict(adapter.projector)
    train, held_out = (read_pools(args.data, split) for split in ("train", "validation"))
    alignment, rng = Alignment(train, tokenizer, embedding), np.random.default_rng(0)
    optimiser, began = torch.optim.AdamW(projector.parameters(), lr=5e-4, weight_decay=0.01), time.monotonic()
    print("before:", alignment.report(projector, held_out), flush=True)
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = 5e-4 * min(1.0, (step + 1) / 50, 2 * (1 - step / args.steps))
        loss = torch.stack(
            [alignment.loss(projector, pool, rng.integers(len(pool.answers), size=24)) for pool in train.values()]
        ).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % 250 == 0:
            print(f"step {step + 1} loss {loss.item():.3f} {time.monotonic() - began:.0f} s; "
                  f"{alignment.report(projector, held_out)}", flush=True)  # fmt: skip
    adapter.projector.update({k: v.detach().clone() for k, v in projector.state_dict().items()})
    adapter.save(args.out)


if __name__ == "__main__":
    main()
