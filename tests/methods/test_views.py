"""Every method on views made of plain tensors: what it decides, and that an engine's functions carry out the same."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matrix
import plain_views
import pytest
import torch
from plain_views import HEADS, LAYERS, Case, Done, EngineLayer

import foveakv
from foveakv import kernels
from foveakv.methods import Decision, registry, views
from foveakv.methods.results import Results

FOLDER = Path(registry.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
LENGTHS = {1: 60, 2: 43}
KINDS = [(name, {}) for name in matrix.METHODS] + matrix.VARIANTS
STREAMS = [
    ("hae", {"drop_hidden_states": True, "budget": None, "ddes": False}),
    ("fastv", {"drop_hidden_states": True}),
]
EVERY = pytest.mark.parametrize(
    ("name", "options"), KINDS + STREAMS, ids=lambda value: value if isinstance(value, str) else str(value)
)
LATER = (1, 1, 3, 1, 1, 5, 1)
"""New tokens of every step: a later turn brings several at once."""


@functools.cache
def batch() -> Case:
    return Case.of(LENGTHS, LATER)


def done(name: str, options: dict[str, Any], case: Case, layer: Any = plain_views.PlainLayer) -> Done:
    return plain_views.run(matrix.method(name, **options), case, layer)


@EVERY
def test_decisions_fit_their_views(name: str, options: dict[str, Any]) -> None:
    """Shapes and dtypes, and only what the method declares and the call may decide."""
    method = matrix.method(name, **options)
    found = plain_views.run(method, batch())
    for call, idx, decision, shape in found.made:
        assert isinstance(decision, Decision)
        if decision.keep is not None:
            assert decision.keep.dtype == torch.bool
            assert decision.keep.shape in (shape, (shape[0], 1, shape[2]))
        for states in (decision.keys, decision.values):
            assert states is None or (method.merges and call == "prefill")
            assert states is None or (states.shape[:3] == shape and states.dtype == torch.float64)
        for each in decision.fields.values():
            assert call == "prefill"
            assert each.values is None or each.values.shape == shape
        if decision.evict is not None:
            assert call == "decode"
            assert method.evicts_while_decoding
            slots, counts = decision.evict.slots, decision.evict.counts
            assert isinstance(slots, int) or (slots.dtype == torch.int64 and slots.shape[-1] >= max(counts))
            assert len(counts) == shape[0]
        if decision.offload is not None or decision.chunks is not None:
            assert call != "decode"
        if decision.offload is not None:
            assert method.retrieves
            assert decision.offload.heads.dtype == torch.bool
            assert decision.offload.heads.shape == shape[:2]
        if decision.chunks is not None:
            assert decision.chunks.dtype == torch.int64
            assert decision.chunks.shape == shape[:2]
        if decision.stream is not None:
            assert (call, idx) == ("prefill", found.method.prunes_after)
            assert decision.stream.dtype == torch.bool
            assert decision.stream.shape == (shape[0], shape[2])
        if call == "earlier":
            assert decision == Decision(keep=decision.keep)
    if "after_prefill" not in method.decides:
        assert all(decision == Decision() for call, _, decision, _ in found.made if call == "after_prefill")
    assert isinstance(found.results, Results)
    assert found.state is None or isinstance(found.state, views.State)


@EVERY
def test_the_engines_functions_store_the_same(name: str, options: dict[str, Any]) -> None:
    """What every step attends to, and every key in its slot: `store_prompt`, `settle`, `evict` and plain tensors."""
    same(name, options, batch())


@pytest.mark.parametrize(
    ("name", "options"), [each for each in KINDS if matrix.method(each[0], **each[1]).observes.attention_sum]
)
def test_the_same_in_one_pass_over_the_scores(name: str, options: dict[str, Any]) -> None:
    """In float32 a compiled kernel, where there is one, adds the scores and finds the lowest at once."""
    if kernels.problem("cpu") is None:
        kernels.prepare("cpu", itemsize=4, backend="cpu")
    same(name, options, Case.of(LENGTHS, LATER, torch.float32))


def same(name: str, options: dict[str, Any], case: Case) -> None:
    plain, stored = done(name, options, case), done(name, options, case, EngineLayer)
    assert plain.attended == stored.attended
    for ours, theirs in zip(plain.slots, stored.slots, strict=True):
        if not matrix.method(name, **options).retrieves:  # an engine may copy chunks into slots
            assert torch.equal(ours.positions(), theirs.positions().long())
            assert torch.equal(ours.keys(), theirs.keys())


@EVERY
def test_padding_changes_nothing(name: str, options: dict[str, Any]) -> None:
    """A sequence of a padded batch attends to what it attends to alone: what stands in the padding is never read."""
    found = done(name, options, batch())
    columns = max(LENGTHS.values())
    for b, (seed, length) in enumerate(LENGTHS.items()):
        alone = done(name, options, Case.of({seed: length}, LATER))
        for step, (ours, theirs) in enumerate(zip(found.attended, alone.attended, strict=True)):
            for layer in range(LAYERS):
                for h in range(HEADS):
                    moved = [p - (columns - length) for p in ours[layer][b][h]]
                    assert moved == theirs[layer][0][h], (step, layer, h)
                    assert not moved or moved[0] >= 0, "padding is stored"


@pytest.mark.parametrize("budget", [0.3, 0.6, 20])
@pytest.mark.parametrize("name", [name for name in matrix.METHODS if "budget" in matrix.fields(name)])
def test_budgets_hold(name: str, budget: float | int) -> None:
    """Slots of all layers and heads after the prompt, and in every step of the methods that evict while decoding."""
    method = matrix.method(name, budget=budget)
    found = plain_views.run(method, batch())
    request, prompt = batch().request, batch().prompt
    free = method.full_layers if name == "quest" else 0  # layers that read everything, on top of the budget
    for b, length in enumerate(prompt.lengths.tolist()):
        allowed = budget if isinstance(budget, int) else math.floor(budget * length)
        if name == "random":
            allowed = max(allowed, int((prompt.text[b]).sum()))  # all text stays
        total = int(request.budget_slots(budget)[b]) if name != "random" else allowed * LAYERS * HEADS
        assert total <= allowed * LAYERS * HEADS + LAYERS * HEADS
        # the first entry is what stays after the prompt
        for step, layers in enumerate(found.attended):
            new = sum(LATER[:step])
            held = [len(head) for layer in layers[free:] for head in layer[b]]
            if not method.evicts_while_decoding:
                assert sum(held) <= total * (LAYERS - free) // LAYERS + new * len(held)
            elif step:
                # the step's own tokens come on top, and what a recycle bin holds
                spare = LATER[step - 1] + (method.recycle_bin_size - 1 if name == "hae" else 0)
                assert max(held) <= allowed + spare
            else:
                assert max(held) <= allowed
    if name != "random":
        assert sum(len(head) for layer in found.attended[0][free:] for head in layer[0]) > 0


def test_a_later_turn_longer_than_the_window() -> None:
    """More tokens in one step than a method may store."""
    for name in ("streaming", "h2o", "hae"):
        same(name, {"budget": 10}, Case.of(LENGTHS, (30, 1, 1)))


# ---- what the source may name


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_methods_import_what_lies_below_them(file: Path) -> None:
    """Also inside functions and under TYPE_CHECKING."""
    allowed = {"foveakv.core", "foveakv.errors", "foveakv.util", "foveakv.methods"}
    for name in imported(ast.parse(file.read_text(encoding="utf8"))):
        top = name.split(".")[0]
        if top == "foveakv":
            assert ".".join(name.split(".")[:2]) in allowed, name
        else:
            assert top in sys.stdlib_module_names or top in ("torch", "numpy", "safetensors"), name


def members(cls: type) -> set[str]:
    """Fields, properties and methods."""
    return {each.name for each in dataclasses.fields(cls)} | {name for name in dir(cls) if not name.startswith("_")}


VIEWS = {
    cls.__name__: members(cls)
    for cls in vars(views).values()
    if isinstance(cls, type) and cls.__name__.endswith("View") and dataclasses.is_dataclass(cls)
}


def named(function: ast.FunctionDef) -> dict[str, str]:
    """Parameters that are views: name -> class."""
    parameters = [*function.args.args, *function.args.kwonlyargs]
    return {
        each.arg: ast.unparse(each.annotation)
        for each in parameters
        if each.annotation is not None and ast.unparse(each.annotation) in VIEWS
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_methods_read_what_views_have(file: Path) -> None:
    """So no cache, no layers of one, no segments and no backend."""
    for function in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        given = named(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in given:
                cls = given[node.value.id]
                assert node.attr in VIEWS[cls], f"line {node.lineno}: {cls} has no {node.attr}"


def test_views_hold_no_cache() -> None:
    assert {"PromptView", "LayerView", "PrefillView", "PromptEndView", "DecodeView", "ReadView", "ResultView"} <= set(
        VIEWS
    )
    for name, has in VIEWS.items():
        assert not has & {"cache", "segments", "compressed", "extra_memory", "backend", "counts"}, name
    assert all("layers" not in has for name, has in VIEWS.items() if name != "PromptView")  # there: their numbers


def test_methods_load_neither_memory_nor_engine() -> None:
    """All of them, and what they import in turn."""
    code = (
        "import sys; from foveakv.methods import registry; [registry.find(name) for name in registry.available()]; "
        "print(sorted({'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('foveakv.')}), "
        "'transformers' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "['foveakv.core', 'foveakv.errors', 'foveakv.methods', 'foveakv.util'] False"


def test_states_follow_the_batch() -> None:
    """All tensors of a state, those in lists and dicts and in states inside it as well."""

    @dataclasses.dataclass
    class Inner(views.State):
        marks: torch.Tensor

    @dataclasses.dataclass
    class Outer(views.State):
        sizes: torch.Tensor
        layers: list[torch.Tensor | None]
        pair: tuple[torch.Tensor, int]
        named: dict[str, torch.Tensor]
        inner: Inner

    sizes = torch.arange(3)
    state = Outer(sizes, [sizes[:, None], None], (sizes + 3, 7), {"a": sizes * 2}, Inner(sizes + 9))
    assert state.nbytes == 4 * 24  # `sizes` and its view are one storage
    state.select_sequences(torch.tensor([2, 0]))
    assert state.sizes.tolist() == [2, 0]
    assert state.layers[0].tolist() == [[2], [0]]
    assert (state.layers[1], state.pair[1]) == (None, 7)
    assert (state.pair[0].tolist(), state.named["a"].tolist()) == ([5, 3], [4, 0])
    assert state.inner.marks.tolist() == [11, 9]


@pytest.mark.parametrize("name", matrix.METHODS)
def test_states_hold_rows_of_the_batch(name: str) -> None:
    """Every tensor of a state has a row per sequence: reordering a state reorders what it says."""
    found = done(name, {}, batch())
    if found.state is None:
        return
    tensors = list(views._tensors(found.state))
    assert all(tensor.shape[0] == len(LENGTHS) for tensor in tensors)
    before = [tensor.clone() for tensor in tensors]
    found.state.select_sequences(torch.tensor([1, 0]))
    after = list(views._tensors(found.state))
    assert all(torch.equal(a.flip(0), b) for a, b in zip(before, after, strict=True))
    assert foveakv.methods.find(name).name == name


def test_budgets_that_are_equal_and_mean_different_things() -> None:
    """1 is a token per head, 1.0 the whole prompt."""
    for budgets in ((1, 1.0), (1.0, 1)):
        request = batch().request
        found = [request.budget_tokens(each).tolist() for each in budgets]
        assert found == [[1, 1] if isinstance(each, int) else list(LENGTHS.values()) for each in budgets]
