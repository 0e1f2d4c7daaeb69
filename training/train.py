r"""Train the projector and low-rank updates of the text model on cards, from cached features.

The learning rate follows the time spent, not the step: busy machines make fewer steps but still decay to zero. A run
that is started again with the same --out continues from its last checkpoint (weights, optimiser, step, time); the batch
of a step depends on the seed, the process and the step alone. Each process computes on one thread and the gradients are
averaged once a step: on a shared machine this wastes less than two threads that wait for each other in every product.

    torchrun --nproc-per-node 2 training/train.py --out OUT --data RUN --vision VIT.onnx --text TEXT.gguf \
        --adapter aligned.safetensors --minutes 60
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from align import Alignment
from common import Student, Tasks, accuracy, load_towers, read_pools

from foveakv.models.embedded.network import Adapter

RATES = {"projector": 3e-4, "low_rank": 6e-4}
MIX = {"digit": 0.38, "number": 0.34, "word": 0.1, "picture": 0.18}
READING_MIX = {
    "digit": 0.46, "print": 0.2, "chart": 0.18, "number": 0.04, "word": 0.02, "picture": 0.04, "text": 0.06
}  # fmt: skip
LONGEST_STEP = 90.0  # seconds; counted for a step during which the run was suspended
ALIGN = {"digit": 24, "number": 24, "word": 24, "picture": 12}  # further cards per step for the projector alone: cheap
ALIGN_WEIGHT = 0.1
CHECKS = {  # name -> (kinds, images, sequences)
    "digit1": ({"digit": 1.0}, 1, 40),
    "digit6": ({"digit": 1.0}, 6, 7),
    "digit16": ({"digit": 1.0}, 16, 2),
    "number4": ({"number": 1.0}, 4, 8),
    "word4": ({"word": 1.0}, 4, 8),
    "picture4": ({"picture": 1.0}, 4, 8),
    "print4": ({"print": 1.0}, 4, 8),
    "chart4": ({"chart": 1.0}, 4, 8),
}


def draw(rng: np.random.Generator, tasks: Tasks, done: float, cards: int, reading: bool) -> list:
    """A batch: sequences of the same number of cards, about `cards` cards in all.

    Short sequences only in the first third of the time, and most of the empty ground left out in the first 60%. With
    `reading`, for a model that knows single cards: long sequences of all tokens from the start, mostly of digits, with
    questions about several cards and long answers.
    """
    if reading:
        count = int(rng.choice(np.arange(2, 17)))
    elif done < 1 / 3:
        count = int(rng.integers(1, 7))
    else:
        count = int(rng.choice(np.arange(1, 17), p=(w := np.arange(1, 17) ** -0.5) / w.sum()))
    ground = 0.2 if done < 0.6 and not reading else 1.0
    mix = READING_MIX if reading else MIX
    ask = (
        {"listing": 0.8, "telling": 0.7, "reverse": 0.1, "singles": 4} if reading else {"listing": 0.4, "reverse": 0.3}
    )
    batch = []
    for _ in range(max(1, round(cards / count))):
        if rng.random() < 0.5:  # cards of one kind are harder to distinguish
            kinds = [str(rng.choice(list(mix), p=list(mix.values())))] * count
        else:
            kinds = [str(k) for k in rng.choice(list(mix), count, p=list(mix.values()))]
        batch.append(tasks.sequence(rng, kinds, **(ask if count > 1 else {}), ground=ground))
    return batch


def rate(done: float, step: int) -> float:
    """Learning rate factor: warm-up over 40 steps, flat to 40% of the time, then a cosine to zero."""
    decay = 1.0 if done < 0.4 else 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 0.4) / 0.6)))
    return min(1.0, (step + 1) / 40) * decay


def replace(file: Path, write: Any) -> None:
    """Write through a temporary file, so that a kill never leaves half a file."""
    part = file.with_name(file.name + ".part")
    write(part)
    os.replace(part, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("out", "data", "vision", "text"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, help="adapter to start from")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--cards", type=int, default=32, help="cards per step and process")
    parser.add_argument("--save-every", type=float, default=180, help="seconds")
    parser.add_argument("--check-every", type=float, default=1200, help="seconds")
    parser.add_argument("--reading", action="store_true", help="questions about all cards, see `draw`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="stop early (0: by time only)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), dist.get_rank() == 0

    model, tokenizer = load_towers(args.vision, args.text)
    student = Student(model, Adapter.read(args.adapter) if args.adapter else None)
    del model
    tasks, held_out = (
        Tasks(read_pools(args.data, "train"), tokenizer),
        Tasks(read_pools(args.data, "validation"), tokenizer),
    )
    alignment = Alignment(tasks.pools, tokenizer, student.text.embed_tokens.weight.detach())
    low_rank = list(student.low_rank.parameters())
    groups = [
        {"params": list(student.projector.parameters()), "base": RATES["projector"]},
        {"params": low_rank, "base": RATES["low_rank"]},
    ]
    trained = [p for g in groups for p in g["params"]]
    optimiser = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)

    step, spent, cards_seen = 0, 0.0, 0
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        for parameter, value in zip(trained, state["trained"], strict=True):
            parameter.data.copy_(value)
        optimiser.load_state_dict(state["optimiser"])
        step, spent, cards_seen = state["step"], state["spent"], state["cards"]

    def log(**record: Any) -> None:
        if not first:
            return
        line = json.dumps({"step": step, "minutes": round(spent / 60, 2), "cards": cards_seen, **record})
        with (args.out / "log.jsonl").open("a") as f:
            f.write(line + "\n")
        print(line, flush=True)

    def save() -> None:
        state = {"trained": [p.data for p in trained], "optimiser": optimiser.state_dict()}
        state |= {"step": step, "spent": spent, "cards": cards_seen}
        replace(checkpoint, lambda f: torch.save(state, f))
        info = {"steps": str(step), "cards": str(cards_seen), "minutes": f"{spent / 60:.1f}"}
        replace(args.out / "adapter.safetensors", student.adapter(info).save)

    def check() -> None:
        scores: dict[str, str] = {}
        extra: dict[str, list[int]] = {"reverse": [0, 0], "list": [0, 0], "story": [0, 0]}
        for name, spec in CHECKS.items():
            tally = accuracy(student, held_out, *spec, seed=7)
            for kind in extra:
                extra[kind] = [a + b for a, b in zip(extra[kind], tally.pop(kind, (0, 0)), strict=True)]
            scores[name] = "/".join(str(sum(pair)) for pair in zip(*tally.values(), strict=True))
        log(validation=scores | {kind: f"{right}/{asked}" for kind, (right, asked) in extra.items()})

    total, losses = args.minutes * 60, []
    saved = checked = spent
    log(event="start", minutes_planned=args.minutes, resumed=checkpoint.exists())
    while spent < total and (not args.steps or step < args.steps):
        began = time.monotonic()
        for group in optimiser.param_groups:
            group["lr"] = group["base"] * rate(spent / total, step)
        rng = np.random.default_rng([args.seed, rank, step])
        batch = tasks.batch(draw(rng, tasks, spent / total, args.cards, args.reading))
        loss = F.cross_entropy(student(batch, tasks.image_id), batch.targets[batch.targets >= 0])
        loss.backward()
        for kind, count in ALIGN.items():
            pool = tasks.pools[kind]
            rows = rng.integers(len(pool.answers), size=count)
            (ALIGN_WEIGHT * alignment.loss(student.projector, pool, rows)).backward()
        shared = torch.cat([p.grad.flatten() for p in trained] + [torch.tensor([loss.item(), batch.cards])])
        dist.all_reduce(shared)
        for parameter, grad in zip(trained, shared[:-2].split([p.numel() for p in trained]), strict=True):
            parameter.grad = grad.view_as(parameter) / dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step, cards_seen = step + 1, cards_seen + int(shared[-1])
        losses.append(shared[-2].item() / dist.get_world_size())
        if first and spent - checked > args.check_every:
            check()
            checked = spent
        if first and spent - saved > args.save_every:
            save()
            saved = spent
        clock = torch.tensor([spent + min(LONGEST_STEP, time.monotonic() - began)])
        dist.broadcast(clock, 0)  # all processes must agree when to stop
        spent = clock.item()
        if step % 10 == 0:
            log(loss=round(float(np.mean(losses[-10:])), 4), seconds_per_step=round(spent / step, 3))
    if first:
        save()
        check()
    log(event="end")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
