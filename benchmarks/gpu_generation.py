"""Section of the GPU script that generates with a random-weight Qwen2.5-VL: tokens, time and memory of each method."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import foveakv
from benchmarks.gpu_common import Bench
from foveakv import methods

IMAGE, START, END = 290, 292, 293


def vision_model(bench: Bench, dtype: Any) -> Any:
    """A random-weight Qwen2.5-VL; on CUDA with head dim 128 and enough layers that the cache is most of its memory."""
    hidden, layers, heads, kv = (64, 2, 4, 2) if bench.smoke else (1024, 12, 8, 4)
    half = hidden // heads // 2
    text = {
        "vocab_size": 300, "hidden_size": hidden, "intermediate_size": hidden * 2, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 2**16,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8],
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": hidden,
        "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    ids = {"image_token_id": IMAGE, "video_token_id": 291, "vision_start_token_id": START, "vision_end_token_id": END}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    model.generation_config.eos_token_id = None  # every method generates the same number of tokens
    return model.to(bench.device, dtype).eval()


def vision_prompt(bench: Bench, dtype: Any, images: int, side: int) -> dict[str, Any]:
    """Text, `images` images of side x side patches (four patches are one token), text."""
    torch.manual_seed(0)
    words = torch.randint(10, 280, (64,)).tolist()
    ids = words[:32] + [START, *[IMAGE] * (side * side // 4), END] * images + words[32:]
    tokens = torch.tensor([ids], device=bench.device)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).long(),
        "pixel_values": torch.randn(images * side * side, 3 * 2 * 14 * 14, device=bench.device).to(dtype),
        "image_grid_thw": torch.tensor([[1, side, side]] * images, device=bench.device),
    }


def generation(bench: Bench) -> Iterator[dict[str, Any]]:
    """Compare tokens of method "full" with the plain model's, then measure time and memory of every method."""
    new = 4 if bench.smoke else 48
    images, side = (1, 8) if bench.smoke else (12, 72)
    budget = 0.5 if bench.smoke else 0.1
    for name in ("float32",) if bench.smoke else ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        model = vision_model(bench, dtype)
        inputs = vision_prompt(bench, dtype, images, side)
        visual = int((inputs["input_ids"] == IMAGE).sum())
        row = {"dtype": name, "prompt": inputs["input_ids"].shape[1], "visual": visual}
        plain = _generate(bench, model, inputs, new)
        yield row | {"method": "plain"} | plain.row
        settings: list[tuple[str, str, Any]] = [("full", "triton", methods.get("full"))]
        if not bench.smoke:
            settings.append(("full", "blocks", methods.get("full")))
        if bench.smoke or name == "bfloat16":
            settings += [
                ("snapkv", "triton", methods.get("snapkv", budget=budget)),
                ("hybridkv", "triton", methods.get("hybridkv", budget=budget)),
                ("hae", "triton", methods.get("hae", budget=budget, target_visual_tokens=int(visual * budget))),
            ]
        for method_name, backend, method in settings:
            bench.check_time()
            try:
                got = _generate(bench, model, inputs, new, method, backend)
            except Exception as error:  # a failing method must not stop the others
                yield row | {"method": method_name, "backend": backend, "error": repr(error)[:400]}
                continue
            yield row | {"method": method_name, "backend": backend} | got.row | _same(plain, got)
        del model
        _empty(bench)


def _generate(bench: Bench, model: Any, inputs: Any, new: int, method: Any = None, backend: str = "") -> Any:
    """Tokens, logits, seconds and bytes of a generation, after one that compiles."""
    if not bench.smoke:
        _run_once(bench, model, inputs, new, method, backend)  # compiles
    result, row = _run_once(bench, model, inputs, new, method, backend)
    if method is None:
        row["cache_mb"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in result.past_key_values.layers) / 1e6
    return SimpleNamespace(
        tokens=result.sequences[0, inputs["input_ids"].shape[1] :].tolist(),
        logits=[step[0].float().cpu() for step in result.logits],
        row=row,
    )


def _run_once(bench: Bench, model: Any, inputs: Any, new: int, method: Any, backend: str) -> tuple[Any, dict[str, Any]]:
    _empty(bench)
    before = 0 if bench.smoke else torch.cuda.memory_allocated()
    begun = time.perf_counter()
    with foveakv.compress(model, method, backend=backend) if method else contextlib.nullcontext() as session:
        result = model.generate(
            **inputs, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        row: dict[str, Any] = {}
        if not bench.smoke:
            torch.cuda.synchronize()
            row["held_mb"] = (torch.cuda.memory_allocated() - before) / 1e6  # the cache, mostly
            row["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6  # above the weights
        row["seconds"] = time.perf_counter() - begun
        if session is not None:
            row["cache_mb"] = session.cache.stored_nbytes / 1e6
            decoding = [seconds / tokens for tokens, seconds in session.cache.steps]
            row["ms_per_token"] = statistics.median(decoding) * 1e3
    return result, row


def _same(plain: Any, got: Any) -> dict[str, Any]:
    """Where the tokens part, and how close the plain model's two best were there (in 16 bits ties do break)."""
    pairs = enumerate(zip(plain.tokens, got.tokens, strict=True))
    parts = next((step for step, (want, have) in pairs if want != have), None)
    if parts is None:
        return {"tokens_equal": True}
    best = plain.logits[parts].topk(2).values
    error = float((plain.logits[parts] - got.logits[parts]).abs().max())
    return {"tokens_equal": False, "parts_at": parts, "gap": float(best[0] - best[1]), "logit_error": error}


def _empty(bench: Bench) -> None:
    gc.collect()
    if not bench.smoke:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
