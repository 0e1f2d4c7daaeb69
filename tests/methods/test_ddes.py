import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Simulation
from torch import Tensor

from foveakv.core.budget import Geometry, parse_budget
from foveakv.kernels import build, cpu, cpu_scores
from foveakv.memory.runs import Runs
from foveakv.memory.segments import Segments
from foveakv.methods.ddes import RecycleBin

needs_kernel = pytest.mark.skipif(cpu.problem() is not None, reason=f"no CPU kernel here: {cpu.problem()}")


def start(scores: list[float], heads: int = 1) -> Tensor:
    return torch.tensor(scores, dtype=torch.float32)[None, None].expand(1, heads, len(scores)).clone()


def equal_runs(length: int) -> Runs:
    """Two heads of one sequence, with keys and values of one dimension."""
    blank = torch.zeros(1, 2, length, 1)
    return Segments.from_dense(
        blank, blank, torch.ones(1, 2, length, dtype=torch.bool), torch.arange(length)[None]
    ).runs


def one_hot(at: int, value: float = 1.0, width: int = 40) -> list[float]:
    return [value if i == at else 0.0 for i in range(width)]


def test_flush_takes_the_lowest_scores_when_the_bin_is_full():
    run = Simulation(RecycleBin(size=2), start([4, 1, 3, 2]), steady=4)
    # 5 stored: one is marked, nothing leaves
    assert run.step([0, 0, 0, 0, 5]) == []
    assert run.kept() == [0, 1, 2, 3, 4]
    # 6 stored: the two lowest (scores 1 and 2) leave at once
    assert run.step([0, 0, 0, 0, 0, 6]) == [1, 3]
    assert run.kept() == [0, 2, 4, 5]
    assert run.counts.flushes == 1
    assert run.counts.restored == 0


def test_scores_accumulate_over_steps_and_follow_the_slots():
    run = Simulation(RecycleBin(size=2), start([1, 2, 3, 4]), steady=4)
    run.step(one_hot(0, 10))
    assert run.segments.field("score")[0, 0].tolist() == [11, 2, 3, 4, 0]
    assert run.step(one_hot(5, 9)) == [1, 4]  # the new token 4 has scored nothing
    assert run.segments.field("score")[0, 0].tolist() == [11, 3, 4, 9]
    keys, _ = run.segments.gather()
    assert keys[0, 0, :, 0].tolist() == [0, 2, 3, 5]


def test_rerank_restores_what_regained_attention():
    run = Simulation(RecycleBin(size=2), start([4, 1, 3, 2]), steady=4)
    run.step(one_hot(4, 9))  # marks 1
    assert run.segments.field("marked")[0, 0].tolist() == [False, True, False, False, False]
    attention = one_hot(5, 9)
    attention[1] = 7.0  # 1 comes back
    assert run.step(attention) == [2, 3]
    assert run.counts.restored == 1


def test_mark_without_restore_flushes_what_was_marked():
    run = Simulation(RecycleBin(size=2, mode="mark", restore=False), start([4, 1, 3, 2]), steady=4)
    run.step(one_hot(4, 9))
    attention = one_hot(5, 9)
    attention[1] = 7.0
    assert run.step(attention) == [1, 3]  # 1 stays marked, 3 is the then-lowest unmarked
    assert run.counts.restored == 0


def test_mark_with_restore_gives_the_place_in_the_bin_to_the_lowest_unmarked():
    run = Simulation(RecycleBin(size=2, mode="mark"), start([4, 1, 3, 2]), steady=4)
    run.step(one_hot(4, 9))
    attention = one_hot(5, 9)
    attention[1] = 7.0
    assert run.step(attention) == [2, 3]
    assert run.counts.restored == 1


def test_marked_tokens_are_still_stored_and_scored():
    run = Simulation(RecycleBin(size=3, mode="mark", restore=False), start([1, 5, 6]), steady=3)
    run.step(one_hot(3, 4))
    run.step(one_hot(0, 2))
    assert 0 in run.kept()
    assert run.segments.field("score")[0, 0, 0] == 3


def test_recent_tokens_are_never_candidates():
    run = Simulation(RecycleBin(size=1), start([5, 6, 7, 8]), steady=4, recent=2)
    assert run.step([0] * 5) == [0]  # tokens 3 and 4 are recent although 4 has scored nothing
    assert run.step([0] * 6) == [1]
    assert run.step([0] * 7) == [4]  # no longer recent: lowest score
    assert run.kept() == [2, 3, 5, 6]


def test_paper_literal_evicts_a_new_token_that_got_nothing():
    run = Simulation(RecycleBin(size=1), start([5, 6, 7, 8]), steady=4)
    assert run.step([0] * 5) == [4]


def test_sinks_are_never_candidates():
    run = Simulation(RecycleBin(size=1, sink=2), start([0, 0, 1, 8]), steady=4)
    assert run.step(one_hot(4)) == [2]
    assert run.step(one_hot(5)) == [4]
    assert run.kept()[:2] == [0, 1]


def test_heads_share_the_summed_scores_by_default():
    scores = torch.tensor([[[0.0, 9, 5, 5], [8.0, 1, 3, 5]]])
    shared = Simulation(RecycleBin(size=1), scores, steady=4)
    shared.step(one_hot(4, 9))
    assert shared.kept(head=0) == shared.kept(head=1) == [1, 2, 3, 4]  # sums 8, 10, 8, 10: of equals, the oldest
    apart = Simulation(RecycleBin(size=1, per_head=True), scores, steady=4)
    apart.step(one_hot(4, 9))
    assert apart.kept(head=0) == [1, 2, 3, 4]
    assert apart.kept(head=1) == [0, 2, 3, 4]


def test_frequency_is_the_share_of_steps_among_the_most_attended():
    rules = RecycleBin(size=4, score="frequency+importance", frequency_weight=1.0)
    run = Simulation(rules, start([1, 2, 3, 4]), steady=4)
    run.step(one_hot(2))  # top tenth of 5 slots is one slot
    run.step(one_hot(2))
    run.step(one_hot(5))
    assert run.segments.field("uses")[0, 0].tolist() == [0, 0, 2, 0, 0, 1, 0]
    assert run.segments.field("age")[0, 0].tolist() == [3, 3, 3, 3, 3, 2, 1]
    # by frequency alone: 2 (2/4), 5 (1/3), 7 (1/1) were used; of the others, all equal, the oldest leave
    assert run.step(one_hot(7)) == [0, 1, 3, 4]
    assert run.counts.flushes == 1


def test_frequency_and_importance_mix_ranks():
    # ranks by attention: 0 < 1 < 2 < 3; by frequency: 0 was used once, the others never
    rules = RecycleBin(size=1, score="frequency+importance", frequency_weight=0.5)
    run = Simulation(rules, start([2, 3, 4, 5]), steady=4)
    assert run.step(one_hot(0, 0.5)) == [4]  # 0: (4 + 1) / 2, 1: (0 + 2) / 2, 2: 3 / 2, 3: 4 / 2, 4: 0
    only = RecycleBin(size=1, score="frequency+importance", frequency_weight=0.0)
    run = Simulation(only, start([2, 3, 4, 5]), steady=4, recent=1)
    assert run.step(one_hot(0, 0.5)) == [0]
    mixed = Simulation(rules, start([2, 3, 4, 5]), steady=4, recent=1)
    assert mixed.step(one_hot(0, 0.5)) == [1]


def test_a_step_of_several_tokens_flushes_whole_bins():
    run = Simulation(RecycleBin(size=2), start([9, 8, 7, 6]), steady=4)
    assert run.step([0, 0, 0, 0, 1, 2, 3, 4, 5], new=5) == [4, 5, 6, 7]  # 9 stored, 5 over: two bins of two
    assert len(run.kept()) == 5
    assert run.counts.flushes == 2
    assert run.segments.field("marked")[0, 0].tolist() == [False, False, False, False, True]
    assert run.step(one_hot(9, 9)) == [3, 8]


def test_sequences_have_their_own_sizes():
    scores = torch.tensor([[[1.0, 2, 3, 4]], [[4.0, 3, 2, 1]]])
    run = Simulation(RecycleBin(size=1), scores, steady=[3, 5])
    run.step(one_hot(4, 9))
    assert run.kept(0) == [2, 3, 4]
    assert run.kept(1) == [0, 1, 2, 3, 4]
    run.step(one_hot(5, 9))
    assert run.kept(0) == [3, 4, 5]
    assert run.kept(1) == [0, 1, 2, 4, 5]


def test_beams_carry_scores_bin_and_sizes():
    scores = torch.tensor([[[1.0, 2, 3, 4]], [[4.0, 3, 2, 1]]])
    run = Simulation(RecycleBin(size=2), scores, steady=[3, 4])
    run.step(one_hot(4, 9))
    index = torch.tensor([1, 1, 0])
    run.segments.select_sequences(index)
    run.state.select_sequences(index)
    assert run.segments.field("score")[:, 0, 0].tolist() == [4, 4, 3]
    run.step(one_hot(5, 9))
    assert run.kept(0) == run.kept(1) == [0, 1, 4, 5]
    assert len(run.kept(2)) == 4


@pytest.mark.parametrize("seed", range(30))
def test_a_bin_of_one_drops_the_lowest_candidate_whatever_the_order_of_slots(seed):
    """Against dictionaries: few distinct scores, so that ties are common; prompts with gaps; several tokens a step."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, columns, per_head = 2, 12, rng.random() < 0.5
    sink, recent = rng.choice([0, 2]), rng.choice([0, 3, 6])
    keep = (torch.rand(1, 1, columns, generator=generator) < 0.7).expand(1, heads, -1)
    scores = torch.randint(0, 3, (1, heads, columns), generator=generator).float()
    steady = sink + recent + rng.randint(1, 4)
    run = Simulation(RecycleBin(per_head=per_head, sink=sink), scores, steady, recent, keep)
    held = [{c: scores[0, h, c].item() for c in range(columns) if keep[0, h, c]} for h in range(heads)]
    for _ in range(25):
        new = rng.choice([1, 1, 1, 4])
        attention = torch.randint(0, 3, (1, heads, run.seen + new), generator=generator).float()
        first = run.seen
        run.step(attention, new)
        for h, slots in enumerate(held):
            slots.update(dict.fromkeys(range(first, first + new), 0.0))
            for token in slots:
                slots[token] += attention[0, h, token].item()
        count = max(0, len(held[0]) - steady)
        ranks = held if per_head else [{t: sum(slots[t] for slots in held) for t in held[0]}] * heads
        for slots, rank in zip(held, ranks, strict=True):
            tokens = sorted(slots)
            candidates = tokens[sink : len(tokens) - recent]
            leaving = sorted(candidates, key=lambda t, rank=rank: (rank[t], t))[:count]
            for token in leaving:
                del slots[token]
        assert [run.kept(0, h) for h in range(heads)] == [sorted(slots) for slots in held]
        found = run.segments.positions()
        for h, slots in enumerate(held):
            score = run.segments.field("score")[0, h].tolist()
            assert dict(zip(found[0, h].tolist(), score, strict=True)) == slots


MODES = st.sampled_from([("rerank", True), ("mark", True), ("mark", False)])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 7),
    mode=MODES,
    score=st.sampled_from(["attention", "frequency+importance"]),
    per_head=st.booleans(),
    recent=st.integers(0, 3),
    sink=st.integers(0, 2),
    news=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_invariants(seed, size, mode, score, per_head, recent, sink, news):
    """l <= stored < l + D after every step, in every run; the protected and the order of tokens hold."""
    generator = torch.Generator().manual_seed(seed)
    rules = RecycleBin(size=size, mode=mode[0], restore=mode[1], score=score, per_head=per_head, sink=sink)
    steady = [6, 9]
    run = Simulation(rules, torch.rand(2, 3, 8, generator=generator), steady, recent)
    first = [run.kept(b)[:sink] for b in range(2)]
    for new in news:
        before = run.segments.lengths
        run.step(torch.rand(2, 3, run.seen + new, generator=generator), new)
        lengths = run.segments.lengths
        for b in range(2):
            assert lengths[b].unique().numel() == 1
            stored = int(lengths[b, 0])
            assert min(int(before[b, 0]) + new, steady[b]) <= stored < steady[b] + size
            for head in range(3):
                kept = run.kept(b, head)
                assert kept == sorted(set(kept))
                assert kept[:sink] == first[b]
                assert kept[len(kept) - recent :] == list(range(run.seen - recent, run.seen))
            if not per_head:
                assert run.kept(b, 0) == run.kept(b, 1) == run.kept(b, 2)
        assert torch.equal(run.segments.gather()[0][..., 0], run.segments.positions().clamp_min(0).float())
        if size > 1:
            over = (lengths[:, 0] - torch.tensor(steady)).clamp_min(0)
            assert torch.equal(run.segments.field("marked").sum(-1), over[:, None].expand(2, 3))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), size=st.integers(2, 6), score=st.sampled_from(["attention", "frequency+importance"])
)
def test_mark_with_restore_drops_what_rerank_drops(seed, size, score):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(1, 2, 9, generator=generator)
    runs = [Simulation(RecycleBin(size=size, mode=mode, score=score), scores, steady=7) for mode in ("rerank", "mark")]
    for _ in range(15):
        attention = torch.rand(1, 2, runs[0].seen + 1, generator=generator) ** 4
        assert runs[0].step(attention) == runs[1].step(attention)
        assert runs[0].counts == runs[1].counts


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 2),
    heads=st.sampled_from([1, 2, 4, 15, 32]),
    size=st.sampled_from([1, 1, 2, 5]),
    per_head=st.booleans(),
    sink=st.integers(0, 2),
    recent=st.integers(0, 4),
    columns=st.sampled_from([9, 40, 600]),
    ties=st.booleans(),
    threads=st.sampled_from([1, 3]),
    news=st.lists(st.sampled_from([1, 1, 1, 1, 3]), min_size=1, max_size=10),
)
def test_one_pass_drops_marks_and_counts_what_separate_steps_do(
    seed: int, batch: int, heads: int, size: int, per_head: bool, sink: int, recent: int, columns: int, ties: bool,
    threads: int, news: list[int],
) -> None:  # fmt: skip
    """Prompts with gaps, sizes per sequence, equal scores; sums over 16 heads or more of whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    ties = ties or (heads >= 16 and not per_head)

    def drawn(*shape: int) -> Tensor:
        return (
            torch.randint(0, 3, shape, generator=generator).float() if ties else torch.rand(shape, generator=generator)
        )

    scores = drawn(batch, heads, columns)
    keep = (torch.rand(batch, 1, columns, generator=generator) < 0.8).expand(batch, heads, -1)
    steady = [sink + recent + columns // 2 + i for i in range(batch)]
    rules = RecycleBin(size=size, per_head=per_head, sink=sink)
    fast, plain = (Simulation(rules, scores, steady, recent, keep) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for new in news:
            attention = drawn(batch, heads, fast.seen + new)
            fast.step(attention, new)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cpu_scores, "usable", lambda *_: False)
                plain.step(attention, new)
            assert torch.equal(fast.segments.positions(), plain.segments.positions())
            for field in ("score", "marked")[: 1 + (size > 1)]:
                assert torch.equal(fast.segments.field(field), plain.segments.field(field)), field
            assert fast.counts == plain.counts
            assert torch.equal(fast.layer.marked, plain.layer.marked)
            assert fast.state.figures() == plain.state.figures()
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_one_pass_over_many_slots(threads: int) -> None:
    """Long enough for more than one thread; of equals the lowest place, marked ones are passed over."""
    generator = torch.Generator().manual_seed(0)
    runs = equal_runs(40_000)
    score = torch.randint(1, 9, (runs.keys.shape[0],), generator=generator).float()
    marked = torch.rand(score.shape, generator=generator) < 0.9
    attention_sum = torch.randint(1, 9, (1, 2, 40_000), generator=generator).float()
    rows = runs.start[:, None] + torch.arange(40_000)
    marked[rows[1]] = marked[rows[0]]
    sums = (score[rows] + attention_sum[0]).sum(0)
    order = sums.masked_fill(marked[rows[0]], torch.inf)
    order[:11], order[39_000:] = torch.inf, torch.inf
    want = int(order.argmin())
    torch.set_num_threads(threads)
    found = cpu_scores.add_and_find(
        runs, score, attention_sum, [11], [39_000], per_head=False, by_position=False, marked=marked
    )  # fmt: skip
    torch.set_num_threads(1)
    assert found.tolist() == [[[want]]]
    assert marked[rows[:, want]].all()
    assert torch.equal(score[rows].sum(0), sums)


@needs_kernel
def test_one_pass_refuses_what_does_not_fit() -> None:
    assert build.KERNEL.library().foveakv_ranking_size() == cpu_scores.RANKING.size
    runs = equal_runs(9)
    score, attention_sum = torch.zeros(runs.keys.shape[0]), torch.zeros(1, 2, 9)
    assert cpu_scores.usable(score, attention_sum)
    assert not cpu_scores.usable(score.double(), attention_sum.double())
    with pytest.raises(ValueError, match="bounds"):
        cpu_scores.add_and_find(runs, score, attention_sum, [0], [9], per_head=True, by_position=False)
    with pytest.raises(ValueError, match="beyond their buffers"):
        cpu_scores.add_and_find(runs, score[:3], attention_sum, [0], [9], per_head=False, by_position=False)


def test_shrink_brings_the_prompt_to_the_steady_size():
    sums = torch.tensor([[[1.0, 5, 3, 2, 4, 0]], [[1.0, 5, 3, 2, 4, 9]]])
    keep = torch.tensor([[[True] * 6], [[False, True, True, True, True, False]]])
    kept = RecycleBin().shrink(sums, keep, torch.tensor([3, 3]), torch.tensor([0, 1]))
    assert kept[0, 0].nonzero()[:, 0].tolist() == [1, 2, 4]
    assert kept[1, 0].nonzero()[:, 0].tolist() == [1, 2, 4]
    kept = RecycleBin(sink=1).shrink(sums, keep, torch.tensor([3, 2]), torch.tensor([1, 1]))
    assert kept[0, 0].nonzero()[:, 0].tolist() == [0, 1, 5]
    assert kept[1, 0].nonzero()[:, 0].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(0.5, [50, 10]), (30, [30, 30]), ("12800B", [41, 8]), ("64000B", [100 + 65, 20 + 65]), (1.0, [100, 20])],
)
def test_steady_size(budget, expected):
    geometry = Geometry(batch=2, contexts=[100, 20], layers=2, kv_heads=2, head_dim=8, value_dim=8, itemsize=4)
    assert geometry.token_bytes == 256
    assert parse_budget(budget).steady(geometry).tolist() == expected
