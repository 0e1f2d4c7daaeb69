"""What the training scripts share: pools of cached features, sequences of cards and questions, the network in bf16."""

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

from foveakv.embedded.convert import TextFile, vision_state
from foveakv.embedded.network import IMAGE_TOKENS, Adapter, image_token_id, skeleton

RANK, ALPHA = 16, 32


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
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, scaling: float, **_: object
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

    def forward(self, ids: torch.Tensor, features: torch.Tensor, image_id: int, targets: torch.Tensor) -> torch.Tensor:
        """ids [B, L], right padded; features [images of the batch in order, 64, 1152]; targets [B, L], -100 where not
        asked. Returns the logits [asked, vocabulary] for the asked positions; position i predicts target i + 1."""
        with torch.autocast("cpu", torch.bfloat16):
            embedded = self.text.embed_tokens(ids)
            seen = self.projector(features).flatten(0, 1).float()
            embedded = embedded.masked_scatter((ids == image_id)[..., None], seen)
            hidden = self.text(inputs_embeds=embedded, use_cache=False).last_hidden_state
            return F.linear(hidden[:, :-1][targets[:, 1:] >= 0], self.head).float()


class Tasks:
    """Sequences: "Alice's card: <image>\\n" for every card, then the questions, each with its answer."""

    def __init__(self, pools: dict[str, Pool], tokenizer: Tokenizer) -> None:
        self.pools, self.tokenizer, self.image_id = pools, tokenizer, image_token_id(tokenizer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def sequence(
        self, rng: np.random.Generator, kinds: list[str], reverse: float = 0.0, listing: float = 0.0
    ) -> tuple[list[int], list[tuple[int, int, str]], np.ndarray]:
        """Token ids; questions as (start of the answer, its length, kind); features of the cards.

        Every card is asked once, in random order. With probability `reverse` up to two cards are also asked the other
        way ("Who has 42? "), with probability `listing` there is "All cards: " (all answers in order).
        """
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[: len(kinds)]]
        chosen = [(k, int(rng.integers(len(self.pools[k].answers)))) for k in kinds]
        answers = [self.pools[k].answers[i] for k, i in chosen]
        features = np.stack([self.pools[k].features[i] for k, i in chosen])
        ids: list[int] = []
        for name in names:
            ids += self.encode(f"{name}'s card: ") + [self.image_id] * IMAGE_TOKENS + self.encode("\n")
        turns = [(f"{name}'s card: ", answer, kind) for name, answer, kind in zip(names, answers, kinds, strict=True)]
        if rng.random() < reverse:
            turns += [(f"Who has {a}? ", n, "reverse") for n, a in zip(names, answers, strict=True) if answers.count(a) == 1][:2]
        if rng.random() < listing:
            turns.append(("All cards: ", ", ".join(answers), "list"))
        asked = []
        for i in rng.permutation(len(turns)):
            question, answer, kind = turns[i]
            ids += self.encode(question)
            reply = self.encode(f"{answer}\n")
            asked.append((len(ids), len(reply), kind))
            ids += reply
        return ids, asked, features

    def batch(self, sequences: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Right-padded ids [B, L], targets [B, L] (-100: not asked), features [images, 64, 1152] fp32."""
        length = max(len(ids) for ids, _, _ in sequences)
        ids, targets = torch.zeros(len(sequences), length, dtype=torch.long), torch.full((len(sequences), length), -100)
        for row, (tokens, asked, _) in enumerate(sequences):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            for start, count, _ in asked:
                targets[row, start : start + count] = ids[row, start : start + count]
        features = torch.from_numpy(np.concatenate([f for _, _, f in sequences])).float()
        return ids, targets, features


@torch.no_grad()
def accuracy(
    student: Student, tasks: Tasks, kinds: dict[str, float], images: int, sequences: int, seed: int
) -> dict[str, tuple[int, int]]:
    """{kind of question: (answers right in every token, asked)}; all questions in turn, right answers fed."""
    rng, tally = np.random.default_rng(seed), {}
    for _ in range(sequences):
        drawn = [str(k) for k in rng.choice(list(kinds), images, p=list(kinds.values()))]
        sequence = tasks.sequence(rng, drawn, reverse=1.0, listing=1.0) if images > 1 else tasks.sequence(rng, drawn)
        ids, targets, features = tasks.batch([sequence])
        guess = student(ids, features, tasks.image_id, targets).argmax(-1)
        hits = (guess == targets[targets >= 0]).tolist()
        for _, count, kind in sequence[1]:
            right, total = tally.get(kind, (0, 0))
            tally[kind], hits = (right + all(hits[:count]), total + 1), hits[count:]
    return tally


def load_towers(vision: Path, text: Path) -> tuple[LlavaForConditionalGeneration, Tokenizer]:
    """The untrained network and its tokenizer."""
    file = TextFile(text)
    return skeleton(vision_state(vision), file, LAYERS), file.tokenizer()
