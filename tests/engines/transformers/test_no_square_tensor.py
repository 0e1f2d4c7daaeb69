"""No tensor of prompt length squared is ever allocated, by any method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import families
import matrix
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import foveakv

pytestmark = pytest.mark.usefixtures("no_gradients")


class Watch(TorchDispatchMode):
    """The largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.operation = 0, ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            # Views and broadcasts take no memory of their own.
            if isinstance(item, Tensor):
                numbers = item.untyped_storage().nbytes() // item.element_size()
                if numbers > self.largest:
                    self.largest, self.operation = numbers, str(function)
        return result


@contextmanager
def watched() -> Iterator[Watch]:
    with Watch() as watch:
        yield watch


def long_prompt(columns: int) -> dict[str, Tensor]:
    parts: list[Any] = []
    for i in range(columns // 32):
        parts += [15, families.Picture(seed=i)]
    return families.encode("llava", [families.Row((*parts, columns % 32 + columns // 32))])


def check_no_square(name: str, columns: int, **options: Any) -> None:
    model, inputs = families.build("llava", num_hidden_layers=2), long_prompt(columns)
    assert abs(inputs["input_ids"].shape[1] - columns) < 64
    if name == "sparsemm":
        options["head_scores"] = matrix.HEAD_SCORES[:2]
    with foveakv.compress(model, matrix.method(name, **options)) as session, watched() as watch:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert watch.largest < columns * columns // 4, (
        f"{watch.operation} made {watch.largest} numbers for {columns} tokens"
    )
    assert session.report.evicted > 0 or session.report.retrieved > 0 or name == "full"
    assert session.report.peak_bytes >= session.report.stored_bytes


def test_the_watch_sees_a_square() -> None:
    model, inputs = families.build("llava", num_hidden_layers=2), long_prompt(256)
    model.set_attn_implementation("eager")
    with watched() as watch:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert watch.largest >= inputs["input_ids"].shape[1] ** 2


@pytest.mark.parametrize("name", matrix.METHODS)
def test_no_square_tensor(name: str) -> None:
    check_no_square(name, 4096)


@pytest.mark.slow
@pytest.mark.parametrize("name", matrix.METHODS)
def test_no_square_tensor_at_16k(name: str) -> None:
    check_no_square(name, 16384)
