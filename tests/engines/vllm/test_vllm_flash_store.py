"""The layout of FlashAttention's paged cache, with the strides in which vLLM allocates it."""

import pytest
import torch
from torch import Tensor

from foveakv.engines.vllm.flash_store import FlashStore
from foveakv.errors import UnsupportedModeError

BLOCKS, HEADS, SIZE, DIM, LAYERS = 12, 3, 16, 8, 2
ORDERS = {"heads first": (0, 1, 2, 3), "slots first": (0, 2, 1, 3)}


def cache(order: tuple[int, ...]) -> Tensor:
    """A cache of logical shape [blocks, H, size, 2 * D], stored in an order of dimensions."""
    shape = (BLOCKS, HEADS, SIZE, 2 * DIM)
    stored = torch.randn([shape[i] for i in order])
    return stored.permute([order.index(i) for i in range(4)])


def kernel_views(one: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the kernel sees them: [blocks, size, H, D] each."""
    keys, values = one.transpose(1, 2).split(DIM, dim=-1)
    return keys, values


@pytest.fixture(params=ORDERS)
def caches(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    return {f"layers.{idx}": cache(ORDERS[request.param]) for idx in range(LAYERS)}


def test_reads_slots_in_the_order_of_the_table(caches: dict[str, Tensor]) -> None:
    store = FlashStore(caches, SIZE)
    assert store.index == {"layers.0": 0, "layers.1": 1}
    blocks, tokens = torch.tensor([7, 2, 9, 5]), 2 * SIZE + 5
    for idx, one in enumerate(caches.values()):
        found = store.read(idx, blocks, tokens)
        for view, rows in zip(kernel_views(one), found, strict=True):
            assert rows.shape == (tokens, HEADS, DIM)
            for token in (0, SIZE - 1, SIZE, tokens - 1):
                assert torch.equal(rows[token], view[blocks[token // SIZE], token % SIZE])
        assert torch.equal(store.keys(idx, blocks, tokens), found[0])
        query = torch.randn(2, 2 * HEADS, DIM)
        expected = torch.einsum("qhd,nhd->hqn", query, found[0].repeat_interleave(2, 1))
        torch.testing.assert_close(store.dot(idx, blocks, tokens, query), expected)


def test_moves_slots_that_overlap(caches: dict[str, Tensor]) -> None:
    store = FlashStore(caches, SIZE)
    other = caches["layers.1"].clone()
    source = torch.tensor([3 * SIZE + 1, 3 * SIZE + 2, 5 * SIZE + 9])
    target = torch.tensor([3 * SIZE, 3 * SIZE + 1, 3 * SIZE + 2])
    expected = [view.clone() for view in kernel_views(caches["layers.0"])]
    store.move(0, source, target)
    for view, old in zip(kernel_views(caches["layers.0"]), expected, strict=True):
        old[target // SIZE, target % SIZE] = old[source // SIZE, source % SIZE].clone()
        assert torch.equal(view, old)
    store.move(0, source[:0], target[:0])
    assert torch.equal(caches["layers.1"], other)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, BLOCKS, SIZE, HEADS, DIM),
        torch.zeros(BLOCKS, HEADS, 2 * SIZE, 2 * DIM),
        torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM + 1),
        torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM, dtype=torch.uint8),
    ],
)
def test_other_layouts_are_refused(wrong: Tensor) -> None:
    with pytest.raises(UnsupportedModeError, match="KV cache of vLLM"):
        FlashStore({"layers.0": wrong}, SIZE)
