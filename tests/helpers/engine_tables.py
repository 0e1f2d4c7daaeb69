"""The tables of docs/engines.md, from what methods and engines declare and from the tests behind every cell.

`PYTHONPATH=src:tests/helpers python -m engine_tables` writes them into the page.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from checkout import ROOT

from foveakv import methods
from foveakv.engines.transformers.options import ENGINE, PREALLOCATED
from foveakv.engines.vllm import settings, support
from foveakv.errors import FoveaKVError
from foveakv.methods import Method

PAGE = ROOT / "docs" / "engines.md"
NEEDED: dict[str, dict[str, Any]] = {"sparsemm": {"head_scores": [[0.1]]}}
VARIANTS: dict[str, list[dict[str, Any]]] = {"hae": [{"scores": "shared"}, {"ddes": False}]}
"""Options that change what an engine must store or observe. Both engines test them, see `OPTIONS`."""
TRANSFORMERS, VLLM = "tests/engines/transformers/", "tests/vllm_plugin/"


@dataclass(frozen=True)
class Mode:
    """A mode of an engine. test: the function that runs it, or that sees it refused ("file.py::test")."""

    name: str
    test: str


ALL_METHODS = (
    Mode("batches with padding", TRANSFORMERS + "test_families.py::test_method_on_family"),
    Mode("beam search", TRANSFORMERS + "test_every_method.py::test_beams"),
    Mode("prompts in chunks", TRANSFORMERS + "test_every_method.py::test_prompts_in_chunks"),
    Mode("several turns", TRANSFORMERS + "test_every_method.py::test_second_and_third_turn"),
    Mode("int8, int4 slots", TRANSFORMERS + "test_quantized_models.py::test_every_method_attends_to_decoded_slots"),
)
"""Modes of the transformers engine; each test runs all methods."""
ASSISTED = Mode("assisted decoding", TRANSFORMERS + "test_assisted_everywhere.py::test_the_same_tokens")
SLOTS = Mode("preallocated slots", TRANSFORMERS + "test_preallocated.py::test_the_same_as_growing_slots")
OPTIONS = Mode("transformers", TRANSFORMERS + "test_families.py::test_options_against_the_reference")
PLUGIN = Mode("vLLM", VLLM + "test_every_method_vllm.py::test_supported_methods")

VLLM_RUNS = (
    Mode("several images, several requests with different methods in a step",
         VLLM + "test_exact.py::test_equal_to_transformers"),
    Mode("vLLM's Transformers backend",
         VLLM + "test_embedded_model.py::test_a_quarter_of_the_visual_tokens_answers_as_well"),
    Mode("chunked prefill", VLLM + "test_scheduling.py::test_prefill_in_chunks"),
    Mode("preemption and recomputation",
         VLLM + "test_scheduling.py::test_more_requests_fit_and_preempted_ones_are_recomputed_exactly"),
    Mode("abort", VLLM + "test_scheduling.py::test_random_requests_with_aborts_leave_an_empty_pool"),
    Mode("n > 1, sampling, log-probabilities", VLLM + "test_scheduling.py::test_several_answers_and_refused_requests"),
    Mode("OpenAI server, streaming, stop strings", VLLM + "test_server.py::test_answers_and_streams"),
    Mode("eviction while decoding", VLLM + "test_decoding.py::test_equal_to_the_transformers_engine"),
    Mode("beam search (beams attend to the whole prompt)",
         VLLM + "test_modes.py::test_beams_are_those_of_the_whole_prompt"),
    Mode("structured output", VLLM + "test_modes.py::test_structured_output"),
    Mode("AsyncLLM", VLLM + "test_modes_engines.py::test_the_asynchronous_engine_streams_and_aborts"),
    Mode("compiled models", VLLM + "test_modes_engines.py::test_compiled"),
    Mode("bfloat16", VLLM + "test_modes_engines.py::test_bfloat16"),
    Mode("embeddings of images", VLLM + "test_modes_engines.py::test_embeddings_of_images"),
    Mode("clients that disconnect", VLLM + "test_server.py::test_clients_that_go"),
)  # fmt: skip
"""Modes of vLLM that nothing refuses."""
VLLM_ASKED: dict[Mode, dict[str, Any]] = {
    Mode("prefix caching", VLLM + "test_prefix_caching.py::test_compressed_prompts_are_never_found"): {
        "cache_config__enable_prefix_caching": True
    },
    Mode("tensor parallelism", VLLM + "test_tensor_parallel.py::test_two_ranks_equal_one"): {
        "parallel_config__tensor_parallel_size": 2
    },
    Mode("pipeline parallelism", ""): {"parallel_config__pipeline_parallel_size": 2},
    Mode("data parallelism in one engine", ""): {"parallel_config__data_parallel_size": 2},
    Mode("context parallelism", ""): {"parallel_config__decode_context_parallel_size": 2},
    Mode("speculative decoding", ""): {"speculative_config": object()},
    Mode("LoRA", ""): {"lora_config": object()},
    Mode("quantized KV cache", ""): {"cache_config__cache_dtype": "fp8_e4m3"},
    Mode("model runner V2", ""): {"use_v2_model_runner": True},
}
"""Modes of vLLM that its configuration asks for, and how. test: needed once the plugin no longer refuses the mode."""
REFUSED = Mode("refused", VLLM + "test_refusals.py::test_configurations_are_refused_with_the_option")


def kinds() -> list[tuple[str, Method]]:
    """Every method with its default options."""
    return [(f"`{name}`", methods.get(name, **NEEDED.get(name, {}))) for name in methods.available()]


def variants() -> list[tuple[str, Method]]:
    """Methods with options that matter to engines."""
    return [
        (", ".join([f"`{name}`", *(f"`{key}={value!r}`" for key, value in more.items())]), methods.get(name, **more))
        for name, choices in VARIANTS.items()
        for more in choices
    ]


def runs_in_vllm() -> list[Method]:
    """The methods that the plugin does not refuse."""
    return [method for _, method in (*kinds(), *variants()) if settings.ENGINE.refusal(method) is None]


def _cell(reason: str | None) -> str:
    """A reason such as "it evicts while decoding, which vLLM cannot do" in the words of a table."""
    if reason is None:
        return "tested"
    return "refused: " + reason.removeprefix("it ").split(", which ")[0].split(", and ")[0].split(", shared ")[0]


def methods_table() -> str:
    """Methods by engine and mode."""
    head = ["method", *(mode.name for mode in (*ALL_METHODS, ASSISTED, SLOTS, PLUGIN))]
    lines = [head, ["---"] * len(head)]
    for title, method in kinds():
        every = _cell(ENGINE.refusal(method))
        assisted = "refused: evicts while decoding" if method.evicts_while_decoding else "tested"
        others = [_cell(PREALLOCATED.refusal(method)), _cell(settings.ENGINE.refusal(method))]
        lines.append([title, *[every] * len(ALL_METHODS), assisted, *others])
    return _table(lines)


def variants_table() -> str:
    """Options of methods by engine."""
    lines = [["method", OPTIONS.name, PLUGIN.name], ["---"] * 3]
    lines += [[title, _cell(ENGINE.refusal(each)), _cell(settings.ENGINE.refusal(each))] for title, each in variants()]
    return _table(lines)


def modes_table() -> str:
    """Modes of vLLM, the same for all methods that the plugin runs."""
    lines = [["mode of vLLM", ""], ["---", "---"]]
    lines += [[mode.name, "tested"] for mode in VLLM_RUNS]
    lines += [[mode.name, "refused" if refused(asked) else "tested"] for mode, asked in VLLM_ASKED.items()]
    return _table(lines)


def refused(changed: dict[str, Any]) -> bool:
    """Whether the plugin refuses a configuration of vLLM. Keys are paths such as "cache_config__cache_dtype"."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=False, cache_dtype="auto"),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4, model="tiny"),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
        speculative_config=None, lora_config=None, use_v2_model_runner=False,
    )  # fmt: skip
    for path, value in changed.items():
        part, _, name = path.rpartition("__")
        setattr(getattr(made, part) if part else made, name, value)
    # The checks that follow the options look at the machine and at vLLM's own classes.
    later = [
        name for name in ("check_platform", "_check_platform", "cache_specs", "_check_specs") if hasattr(support, name)
    ]
    with mock.patch.multiple(support, **dict.fromkeys(later, mock.DEFAULT)):
        try:
            support.check_config(made, SimpleNamespace(kv_cache_groups=[]))
        except FoveaKVError:
            return True
    return False


def tests() -> list[Mode]:
    """The tests behind the cells."""
    asked = [mode for mode, changed in VLLM_ASKED.items() if not refused(changed)]
    return [*ALL_METHODS, ASSISTED, SLOTS, OPTIONS, PLUGIN, *VLLM_RUNS, REFUSED, *asked]


def is_there(test: str) -> bool:
    """Whether the repository has a test function."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def page(text: str) -> str:
    """The page with the tables of today."""
    tables = {"methods": methods_table(), "variants": variants_table(), "modes": modes_table()}
    for name, table in tables.items():
        start, end = f"<!-- {name}: generated -->\n", f"\n<!-- {name}: end -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE.name} has no place for the table of {name}")
        text = before + start + "\n" + table + "\n" + end + after
    return text


def _table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf8")), encoding="utf8")
