"""A self-test of the plugin on this machine: `python -m foveakv.engines.vllm.check`, about a minute, no downloads.

It runs a tiny model with random weights in vLLM and in transformers and compares them, with and without eviction. Every
prompt is sent twice, with prefix caching. On CUDA, where the plugin has not been verified yet, this is the first test.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Of log-probabilities, by the type of vLLM's model; transformers runs in float32."""
_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("off", {}),
    ("random", {"budget": 0.3}),
    ("hae", {"ddes": False, "target_visual_tokens": 0.25, "score_layer": 2}),
)


def main() -> int:
    """Run the self-test; returns 0 if everything works."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the test looks into the engine
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    from foveakv.engines.vllm import private
    from foveakv.errors import FoveaKVError

    try:
        print(f"vLLM {private.version()}; tested: {', '.join(private.TESTED)}.x")
        private.check()
    except (FoveaKVError, ImportError) as error:
        print(f"FAILED  {error}")
        return 1
    print("ok      interfaces of vLLM")
    if not _on_cpu():
        print("note    this platform has not been verified; compare the results below with what you expect")
    _tell_about_entry_point()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if _run(Path(folder)) else 1


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _engine_options() -> dict[str, Any]:
    if _on_cpu():
        return {"dtype": "float32", "block_size": 32, "gpu_memory_utilization": 0.2}
    return {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "async_scheduling": False}


def _tell_about_entry_point() -> None:
    from importlib.metadata import entry_points

    found = any(each.value.startswith("foveakv.") for each in entry_points(group="vllm.general_plugins"))
    print("ok      entry point" if found else "MISSING entry point: install foveakv into vLLM's environment with pip")


def _run(folder: Path) -> bool:
    from foveakv.engines.vllm import tiny_llava

    tiny_llava.build(folder)
    prompts = _prompts()
    passed = True
    for method, options in _CASES:
        try:
            result = _compare(folder, prompts, method, options)
        except Exception as error:
            passed, result = False, f"FAILED  {type(error).__name__}: {error}"
        else:
            passed = passed and result.startswith("ok")
        print(f"{result}  [{method}]", flush=True)
    return passed


def _prompts() -> list[dict[str, Any]]:
    import numpy as np
    from PIL import Image

    from foveakv.engines.vllm import tiny_llava

    generator = np.random.RandomState(0)
    size = (tiny_llava.IMAGE_SIZE, tiny_llava.IMAGE_SIZE, 3)
    made = []
    for count in (1, 3):
        images = [Image.fromarray((generator.rand(*size) * 255).astype("uint8")) for _ in range(count)]
        text = "a photo " + tiny_llava.IMAGE * count + "what is in the image?"
        made.append({"prompt": text, "multi_modal_data": {"image": images}})
    return made


def _compare(folder: Path, prompts: list[dict[str, Any]], method: str, options: dict[str, Any]) -> str:
    """Generate with a method and compare with transformers; returns a line of the result."""
    import gc

    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from foveakv.engines.vllm import private
    from foveakv.engines.vllm.settings import CONNECTOR

    private.register()
    extra = {"method": method, "options": options, "allow_unverified": True}
    given = _engine_options()
    llm = LLM(
        model=str(folder), max_model_len=1024, enforce_eager=True, limit_mm_per_prompt={"image": 4},
        kv_transfer_config={"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": extra},
        **given,
    )  # fmt: skip
    try:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
        outputs = [each for _ in range(2) for each in llm.generate(prompts, params, use_tqdm=False)]
        kept = _kept()
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    worst, freed, stored, total, found = 0.0, 0, 0, 0, 0
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        found += output.num_cached_tokens or 0
        report = (output.kv_transfer_params or {}).get("foveakv", {})
        freed += report.get("freed_blocks", 0)
        total += len(output.prompt_token_ids)
        stored += report.get("stored_prompt_tokens", len(output.prompt_token_ids))
        worst = max(worst, _difference(folder, prompt, output.outputs[0], kept.get(output.request_id)))
    works = found > 0 if method == "off" else freed > 0 and found == 0
    state = "ok    " if works and worst < TOLERANCES[given["dtype"]] else "FAILED"
    figures = f"{stored} of {total} prompt tokens stored, {freed} blocks freed, {found} found in the prefix cache"
    return f"{state}  equal to transformers within {worst:.0e}; {figures}"


def _kept() -> dict[str, list[int]]:
    from foveakv.engines.vllm.rewriting import active_worker

    worker = active_worker()
    recent = () if worker is None else worker.recent
    return {each.req_id.rsplit("-", 1)[0]: each.kept for each in recent}


def _difference(folder: Path, prompt: dict[str, Any], answer: Any, kept: list[int] | None) -> float:
    """Return the largest difference of a log-probability from transformers, tokens dropped from its cache."""
    import torch
    from transformers import AutoProcessor, DynamicCache, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(text=prompt["prompt"], images=prompt["multi_modal_data"]["image"], return_tensors="pt")
    length, cache = inputs["input_ids"].shape[1], DynamicCache(config=model.config.get_text_config())
    worst = 0.0
    with torch.no_grad():
        logits = model(**inputs, past_key_values=cache, use_cache=True).logits[0, -1]
        if kept is not None:
            index = torch.tensor(kept)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, index], layer.values[:, :, index]
        for step, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            expected = float(logits.float().log_softmax(-1)[token])
            worst = max(worst, abs(expected - found[token].logprob))
            position = torch.tensor([[length + step]])
            ids = torch.tensor([[token]])
            logits = model(input_ids=ids, past_key_values=cache, position_ids=position, use_cache=True).logits[0, -1]
    return worst


if __name__ == "__main__":
    sys.exit(main())
