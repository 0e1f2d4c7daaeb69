"""Shared by the training scripts: pools of cached features, sequences of cards and questions, the network in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cards import NAMES
from prepare import KINDS, LAYERS
from tokenizers import Tokenizer
from torch import nn
from transformers import AttentionInterface, LlavaForConditionalGeneration

from foveakv.models.embedded.convert import TextFile, vision_state
from foveakv.models.embedded.network import IMAGE_TOKENS, Adapter, image_token_id, skeleton
from foveakv.models.embedded.samples import ALL_CARDS, STORY, TELL

RANK, ALPHA = 16, 32
WIDTH = 384 * len(LAYERS)  # features of an image token


@dataclass
class Pool:
    """Cards of one kind. features: fp16 [N, 64, 1152]; answers: N strings; cells: [N, 64], part of the answer or -1."""

    features: np.ndarray
    answers: list[str]
    cells: np.ndarray


def read_pools(run: Path, split: str) -> dict[str, Pool]:
    """Pools by kind. Further files RUN/{split}-{kind}+NAME.npy are added to the first."""
    pools = {}
    for kind in KINDS:
        files = [run / f"{split}-{kind}.npy", *sorted(run.glob(f"{split}-{kind}+*.npy"))]
        files = [f for f in files if not f.name.endswith(".part.npy")]
        extra = [np.load(f.with_suffix(".npz")) for f in files]
        pools[kind] = Pool(
            np.load(files[0], mmap_mode="r") if len(files) == 1 else np.concatenate([np.load(f) for f in files]),
            [str(a) for e in extra for a in e["answers"]],
            np.concatenate([e["cells"].reshape(-1, IMAGE_TOKENS) for e in extra]),
        )
    return pools


def causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """bf16 attention over [B, heads, L, D] as two large products; its backward costs half of CPU SDPA's."""
    (batch, heads, length, size), groups = query.shape, key.shape[1]
    with torch.autocast("cpu", enabled=False):
        query, key, value = (t.to(torch.bfloat16) for t in (query * scaling, key, value))
        future = torch.full((length, length), float("-inf"), dtype=torch.bfloat16).triu(1)
        scores = query.reshape(batch, groups, -1, size) @ key.transpose(-1, -2)
        weights = (scores.view(batch, groups, -1, length, length) + future).softmax(-1).view(batch, groups, -1, length)
        out = (weights @ value).view(batch, heads, length, size)
    return out.transpose(1, 2), None


class RMSNorm(torch.autograd.Function):
    """Llama's norm in few passes over memory; the weight is frozen. x: fp32 [..., hidden]; returns bf16."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):  # type: ignore[no-untyped-def]
        scale = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return (normed * weight).bfloat16()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        normed, scale, weight = ctx.saved_tensors
        grad = grad.float() * weight
        return (grad - normed * (grad * normed).mean(-1, keepdim=True)) * scale, None, None


class LowRank(nn.Module):
    """A frozen bf16 linear layer with a trained update: y = W x + scale * B (A x)."""

    def __init__(self, base: nn.Linear, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("weight", base.weight.detach().to(torch.bfloat16))
        self.scale = scale
        self.A = nn.Parameter(torch.randn(RANK, base.in_features, generator=generator) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.A * self.scale), self.B)


class Student(nn.Module):
    """The text model with low-rank updates, and the projector. Matrix products in bf16, the residual stream in fp32."""

    def __init__(self, model: LlavaForConditionalGeneration, adapter: Adapter | None, seed: int = 0) -> None:
        super().__init__()
        self.text, self.projector = model.model.language_model, model.model.multi_modal_projector
        self.requires_grad_(False)
        self.projector.requires_grad_(True)
        generator, self.low_rank = torch.Generator().manual_seed(seed), nn.ModuleDict()
        for path, module in list(self.text.named_modules()):
            if isinstance(module, nn.Linear):
                layer = LowRank(module, ALPHA / RANK, generator)
                parent, name = path.rsplit(".", 1)
                setattr(self.text.get_submodule(parent), name, layer)
                self.low_rank[path.replace(".", "/")] = layer
        AttentionInterface.register("training_causal", causal_attention)
        self.text.config._attn_implementation = "training_causal"
        for module in self.text.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = lambda x, m=module: RMSNorm.apply(x, m.weight, m.variance_epsilon)
        self.head = self.text.embed_tokens.weight.detach().to(torch.bfloat16)  # tied
        if adapter is not None:
            self.projector.load_state_dict(adapter.projector)
            for path, (a, b) in adapter.updates.items():
                layer = self.low_rank[path.replace(".", "/")]
                ratio = adapter.scale / layer.scale
                layer.A.data.copy_(a)
                layer.B.data.copy_(b * ratio)

    def adapter(self, info: dict[str, str]) -> Adapter:
        updates = {path.replace("/", "."): (layer.A, layer.B) for path, layer in self.low_rank.items()}
        return Adapter(dict(self.projector.state_dict()), updates, ALPHA / RANK, LAYERS, info)

    def forward(self, batch: Batch, image_id: int) -> torch.Tensor:
        """Logits [asked tokens of the batch, vocabulary], in the order of `batch.targets[batch.targets >= 0]`."""
        with torch.autocast("cpu", torch.bfloat16):
            embedded = self.text.embed_tokens(batch.ids)
            embedded = embedded.masked_scatter(
                (batch.ids == image_id)[..., None], self.projector(batch.features).float()
            )
            out = self.text(inputs_embeds=embedded, position_ids=batch.positions, use_cache=False).last_hidden_state
            return F.linear(out[:, :-1][batch.targets[:, 1:] >= 0], self.head).float()


@dataclass
class Sequence:
    """Cards and questions. ids, positions: one per token; asked: (start of the answer, its length, kind of question);
    features: [image tokens, 1152]; cards: how many."""

    ids: list[int]
    positions: list[int]
    asked: list[tuple[int, int, str]]
    features: np.ndarray
    cards: int


@dataclass
class Batch:
    """Right-padded sequences: ids, positions, targets [B, L] (-100 where nothing is asked), features [tokens, 1152]."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    features: torch.Tensor
    cards: int


class Tasks:
    """Sequences: "Alice's card: <image>\\n" for every card, then the questions, each with its answer."""

    def __init__(self, pools: dict[str, Pool], tokenizer: Tokenizer) -> None:
        self.pools, self.tokenizer, self.image_id = pools, tokenizer, image_token_id(tokenizer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def sequence(
        self,
        rng: np.random.Generator,
        kinds: list[str],
        reverse: float = 0.0,
        listing: float = 0.0,
        telling: float = 0.0,
        singles: int = 99,
        ground: float = 1.0,
    ) -> Sequence:
        """A sequence about one card of every kind given.

        Every card is asked once, or `singles` of them, in random order. With probability `reverse` up to two cards are
        also asked the other way ("Who has 42? "), with probability `listing` there is "All cards: " (all answers in
        order), with probability `telling` "The story: " (every card with its name) and "Tell of Bob, Alice: " (some of
        them), and single cards are asked for by "Tell of Bob: ". Half of the long answers come before the others: what
        was said before could be copied. A card of kind "text" is no picture: its line says the number. ground: share of
        the image tokens without content that stay; the others are left out and the positions after them kept, which
        makes a step cheaper.
        """
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[: len(kinds)]]
        chosen = [(k, int(rng.integers(1000 if k == "text" else len(self.pools[k].answers)))) for k in kinds]
        answers = [str(i) if k == "text" else self.pools[k].answers[i] for k, i in chosen]
        ids: list[int] = []
        positions: list[int] = []
        features, after = [np.zeros((0, WIDTH), np.float16)], 0

        def add(tokens: list[int], places: np.ndarray | None = None, length: int = 0) -> None:
            nonlocal after
            ids.extend(tokens)
            positions.extend((after + (np.arange(len(tokens)) if places is None else places)).tolist())
            after += length or len(tokens)

        for name, (kind, row) in zip(names, chosen, strict=True):
            if kind == "text":
                add(self.encode(f"{name}'s card: {row}\n"))
                continue
            kept = (self.pools[kind].cells[row] >= 0) | (rng.random(IMAGE_TOKENS) < ground)
            add(self.encode(f"{name}'s card: "))
            add([self.image_id] * int(kept.sum()), np.flatnonzero(kept), IMAGE_TOKENS)
            add(self.encode("\n"))
            features.append(self.pools[kind].features[row][kept])
        turns = []
        lines = [f"{name}'s card: {answer}" for name, answer in zip(names, answers, strict=True)]
        for name, line, answer, kind in zip(names, lines, answers, kinds, strict=True):
            told = rng.random() < telling
            turns.append((TELL.format(name), line, kind) if told else (f"{name}'s card: ", answer, kind))
        turns = [turns[i] for i in rng.permutation(len(turns))[:singles]]
        if rng.random() < reverse:
            unique = [(n, a) for n, a in zip(names, answers, strict=True) if answers.count(a) == 1]
            turns += [(f"Who has {answer}? ", name, "reverse") for name, answer in unique[:2]]
        if rng.random() < listing:
            turns.append((ALL_CARDS, ", ".join(answers), "list"))
        if len(names) > 1 and rng.random() < telling:
            turns.append((STORY, "; ".join(lines), "story"))
            some = rng.permutation(len(names))[: rng.integers(2, 5)]
            turns.append((TELL.format(", ".join(names[i] for i in some)), "; ".join(lines[i] for i in some), "story"))
        asked = []
        turns = [turns[i] for i in rng.permutation(len(turns))]
        if telling and rng.random() < 0.5:
            turns.sort(key=lambda turn: turn[2] not in ("list", "story"))
        for question, answer, kind in turns:
            add(self.encode(question))
            reply = self.encode(f"{answer}\n")
            asked.append((len(ids), len(reply), kind))
            add(reply)
        return Sequence(ids, positions, asked, np.concatenate(features), len(kinds))

    def batch(self, sequences: list[Sequence]) -> Batch:
        length = max(len(s.ids) for s in sequences)
        ids, positions = (torch.zeros(len(sequences), length, dtype=torch.long) for _ in range(2))
        targets = torch.full((len(sequences), length), -100)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
            positions[row, : len(sequence.ids)] = torch.tensor(sequence.positions)
            for start, count, _ in sequence.asked:
                targets[row, start : start + count] = ids[row, start : start + count]
        features = torch.from_numpy(np.concatenate([s.features for s in sequences])).float()
        return Batch(ids, positions, targets, features, sum(s.cards for s in sequences))


@torch.no_grad()
def accuracy(
    student: Student, tasks: Tasks, kinds: dict[str, float], images: int, sequences: int, seed: int
) -> dict[str, tuple[int, int]]:
    """{kind of question: (answers right in every token, asked)}; all questions in turn, right answers fed."""
    rng, tally = np.random.default_rng(seed), {}
    for _ in range(sequences):
        drawn = [str(k) for k in rng.choice(list(kinds), images, p=list(kinds.values()))]
        more = {"reverse": 1.0, "listing": 1.0, "telling": 1.0} if images > 1 else {}
        sequence = tasks.sequence(rng, drawn, **more)
        batch = tasks.batch([sequence])
        guess = student(batch, tasks.image_id).argmax(-1)
        hits = (guess == batch.targets[batch.targets >= 0]).tolist()
        for _, count, kind in sequence.asked:
            right, total = tally.get(kind, (0, 0))
            tally[kind], hits = (right + all(hits[:count]), total + 1), hits[count:]
    return tally


def load_towers(vision: Path, text: Path) -> tuple[LlavaForConditionalGeneration, Tokenizer]:
    """The untrained network and its tokenizer."""
    file = TextFile(text)
    return skeleton(vision_state(vision), file, LAYERS), file.tokenizer()
