"""Every method that the plugin does not refuse runs in vLLM, and others are refused (the table of docs/engines.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tables
import engines
import pytest
import tiny_checkpoints
from vllm import SamplingParams

from foveakv.engines.vllm.settings import ENGINE, Choice
from foveakv.errors import MethodError

NAME = "tiny-llava"
SMALL: dict[str, dict[str, Any]] = {
    "hae": {"target_visual_tokens": 0.3, "score_layer": 2},
    "random": {"budget": 0.4},
    "streaming": {"budget": 100},
}
"""Options with which a method evicts from a prompt of 400 tokens; without an entry: a budget of half of the prompt."""


def choice(method: Any) -> dict[str, Any]:
    """The method as a request asks for it."""
    options = {key: value for key, value in method.describe().items() if key in ("ddes", "scores")}
    return {"method": method.name, "options": {**SMALL.get(method.name, {"budget": 0.5}), **options}}


def test_supported_methods(checkpoints: Path) -> None:
    """In one step and one pool, which is as before when all have ended."""
    path = tiny_checkpoints.checkpoint(NAME, checkpoints)
    wanted = [{"method": "full"} if each.name == "full" else choice(each) for each in engine_tables.runs_in_vllm()]
    assert len(wanted) >= 3
    params = [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, extra_args={"foveakv": each}) for each in wanted
    ]
    with engines.engine(path, "off") as llm:
        pool = engines.scheduler_of(llm).kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        outputs = llm.generate([engines.prompt(NAME, 4)] * len(wanted), params, use_tqdm=False)
        assert pool.get_num_free_blocks() == free
    for each, output in zip(wanted, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 40, each
        report = output.kv_transfer_params["foveakv"]
        assert report["method"] == each["method"]
        assert (report["freed_blocks"] == 0) == (each["method"] == "full"), each


@pytest.mark.parametrize(("title", "method"), [*engine_tables.kinds(), *engine_tables.variants()], ids=str)
def test_other_methods_are_refused_by_name(title: str, method: Any) -> None:
    if ENGINE.refusal(method) is not None:
        options = engine_tables.NEEDED.get(method.name, {})
        more = {key: value for key, value in method.describe().items() if key in ("ddes", "scores")}
        with pytest.raises(MethodError, match=method.name):
            Choice(method.name, {**options, **more}).create()
