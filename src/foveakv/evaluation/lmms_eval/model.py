"""The model class for lmms-eval: its Hugging Face chat model, loaded by FoveaKV, generating inside `compress`."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.models.chat.huggingface import Huggingface
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm  # type: ignore[import-untyped]

from foveakv import __version__
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import compress
from foveakv.errors import InputError, UnsupportedModeError
from foveakv.evaluation.lmms_eval import arguments
from foveakv.evaluation.lmms_eval.prompts import batch_inputs
from foveakv.evaluation.lmms_eval.records import Records
from foveakv.models import load
from foveakv.util import files

MAX_NEW_TOKENS = 1024
"""Default for tasks without a limit, as in lmms-eval's class for LLaVA."""


class FoveaKV(Huggingface):
    """Any model that `foveakv.load` can load, with its cache compressed by a method.

    Args:
        pretrained: model id, folder, or "demo".
        method: a method's name, or "none" for the plain model. Required.
        budget: of the method: 0.1, "10%", 1024, "512MiB".
        device, dtype, attn_implementation, revision, trust_remote_code: as in `foveakv.load`. With several processes
            (`accelerate launch`) every process has a full copy of the model on its own GPU.
        batch_size: number of requests per batch, padded on the left.
        max_batch_size: ignored; lmms-eval passes it to every model.
        system_prompt: a text, or the path of a text file.
        max_num_frames: maximum number of frames of a video, evenly spaced.
        report: file for the figures of every batch; with several processes `.rankN` is inserted before the suffix.
        settings: `method.<option>`, `processor.<option>`, kv_dtype, residual_length, max_decode_slots, backend,
            preallocate.

    Raises:
        MethodError, BudgetError: an invalid argument; raised before the model is loaded.
        ModelLoadError, UnsupportedModelError: the model cannot be loaded, or its cache cannot be compressed.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str | None = None,
        method: str | None = None,
        budget: float | int | str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        system_prompt: str | None = None,
        max_num_frames: int = 32,
        report: str | None = None,
        **settings: Any,
    ) -> None:
        super(Huggingface, self).__init__()  # the parent class loads models on CUDA in bfloat16 only
        named = [name for name in inspect.signature(FoveaKV.__init__).parameters if name not in ("self", "settings")]
        self.arguments = arguments.parse(method, budget, settings, named)
        if pretrained is None:
            raise InputError("say which model: --model_args pretrained=Qwen/Qwen2.5-VL-7B-Instruct,...")
        if report is not None:
            files.check_output_files(Path(report))  # before hours of work, not after
        self.batch_size_per_gpu = _whole(batch_size)
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if self._world_size > 1 and torch.cuda.is_available():
            device = f"cuda:{self.accelerator.local_process_index}"
        options = {"attn_implementation": attn_implementation, "revision": revision}
        self._model, self.processor = load(
            str(pretrained),
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            **{key: value for key, value in options.items() if value is not None},
        )
        with self._session():
            pass  # raises for an unsupported model before any data is loaded
        self._device = self._model.device
        self._config = self._model.config
        self._tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self._tokenizer.padding_side = "left"
        self.system_prompt = self._resolve_system_prompt(system_prompt.replace("\\n", "\n")) if system_prompt else None
        self.max_num_frames = max_num_frames
        self._report = _of_rank(report, self._rank, self._world_size)
        self.records = Records(self._head(str(pretrained)))

    @property
    def max_length(self) -> int:
        """The maximum number of positions of the model."""
        return int(getattr(compat.text_config_of(self._model), "max_position_embeddings", 2048))

    def _session(self) -> Any:
        if self.arguments.method is None:
            return nullcontext()
        return compress(self._model, self.arguments.method, **self.arguments.compress)

    def _head(self, pretrained: str) -> dict[str, Any]:
        method = self.arguments.method
        return {
            "model": pretrained,
            "method": {"method": arguments.PLAIN} if method is None else method.describe(),
            "compress": self.arguments.compress,
            "processor": self.arguments.processor,
            "batch_size": self.batch_size_per_gpu,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._model.device),
            "foveakv": __version__,
            "transformers": compat.VERSION,
        }

    def generate_until(self, requests: Sequence[Any]) -> list[GenerationResult]:
        """Answers in the order of the requests.

        Errors end the run, since an empty answer would be scored. As in lmms-eval's chat classes, answers are not cut
        at a task's `until`.
        """
        answers: list[GenerationResult | None] = [None] * len(requests)
        seconds = tokens = 0.0
        progress = tqdm(total=len(requests), disable=self._rank != 0, desc="Model Responding")
        for indices in _batches(requests, self.batch_size_per_gpu):
            batch = [requests[i].args for i in indices]
            texts, ids, took = self._answer(batch)
            seconds, tokens = seconds + took, tokens + sum(ids)
            for i, request, text, count in zip(indices, batch, texts, ids, strict=True):
                answers[i] = GenerationResult(text=text, token_counts=TokenCounts(output_tokens=count))
                self.cache_hook.add_partial("generate_until", (request[0], request[2]), text)
            progress.update(len(indices))
        progress.close()
        log_metrics(
            total_elapsed_time=seconds,
            total_gen_tokens=int(tokens),
            avg_speed=tokens / seconds if seconds else 0.0,
            additional_metrics=self.records.means(),
        )
        if self._report is not None:
            self.records.write(self._report)
        return [answer for answer in answers if answer is not None]

    def _answer(self, batch: list[tuple[Any, ...]]) -> tuple[list[str], list[int], float]:
        """(texts, numbers of new tokens, seconds in `generate`)."""
        conversations = []
        for _, doc_to_messages, _, doc_id, task, split in batch:
            messages = doc_to_messages(self.task_dict[task][split][doc_id])
            if self.system_prompt:
                messages = self._apply_system_prompt(messages, self.system_prompt)
            conversations.append(ChatMessages(messages=messages).model_dump()["messages"])
        made = batch_inputs(self.processor, conversations, self.arguments.processor, frames=self.max_num_frames)
        inputs = {key: _to_model(value, self._model) for key, value in made.items()}
        length = inputs["input_ids"].shape[1]
        start = time.perf_counter()
        with torch.inference_mode(), self._session() as session:
            output = self._model.generate(**inputs, **generation(batch[0][2], self._tokenizer))
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
            took = time.perf_counter() - start
            report = session.report if session is not None else None
        fresh = output[:, length:]
        pad = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else self.eot_token_id
        ends = int(
            pad == self._tokenizer.eos_token_id
        )  # then the end token of an answer equals padding, and is counted
        counts = [min(len(row), int((row != pad).sum()) + ends) for row in fresh]
        self.records.add(
            {"task": batch[0][4], "split": batch[0][5], "doc_ids": [request[3] for request in batch]},
            {"prompt_tokens": length, "new_tokens": counts, "seconds": took},
            report,
        )
        return self._tokenizer.batch_decode(fresh, skip_special_tokens=True), counts, took

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Not supported. UnsupportedModeError: always."""
        raise UnsupportedModeError(
            "log-likelihoods use one dense forward pass over prompt and answer, without a compressed cache; "
            "choose tasks of output type generate_until"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not supported. UnsupportedModeError: always."""
        raise UnsupportedModeError("tasks with several rounds are not supported; choose tasks of type generate_until")


def generation(kwargs: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A task's generation settings as arguments of `generate`; sampling needs a temperature above zero."""
    sampled = (kwargs.get("temperature") or 0) > 0
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    settings = {
        "max_new_tokens": kwargs.get("max_new_tokens") or MAX_NEW_TOKENS,
        "num_beams": kwargs.get("num_beams") or 1,
        "do_sample": sampled,
        "pad_token_id": pad,
    }
    # None overrides the sampling settings of the model's generation config.
    return settings | {name: kwargs.get(name) if sampled else None for name in ("temperature", "top_p", "top_k")}


def _batches(requests: Sequence[Any], size: int) -> Iterator[list[int]]:
    """Indices of each batch: requests of one task and split, with the same generation settings."""
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        _, _, kwargs, _, task, split = request.args
        groups.setdefault(json.dumps([task, split, kwargs], sort_keys=True, default=str), []).append(i)
    for indices in groups.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _to_model(value: Any, model: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


def _whole(batch_size: Any) -> int:
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise InputError(f"batch_size={batch_size}: expected a whole number from 1; automatic sizes are not supported")
    return int(batch_size)


def _of_rank(report: str | None, rank: int, processes: int) -> Path | None:
    if report is None or processes == 1:
        return None if report is None else Path(report)
    path = Path(report)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
