"""The connector: joins the plugin's two sides to vLLM. vLLM loads this module when an engine uses the connector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from foveakv.engines.vllm import model_facts, platforms, private, support
from foveakv.engines.vllm.plan import Done, Plan
from foveakv.engines.vllm.scheduler_side import SchedulerSide
from foveakv.engines.vllm.settings import ENGINE, Choice, parse, remembered
from foveakv.engines.vllm.worker_side import WorkerSide
from foveakv.errors import UnsupportedModeError
from foveakv.methods import Method


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """Carries the plan of a step to the workers."""

    plan: Plan


@dataclass
class DoneMetadata(KVConnectorWorkerMetadata):
    """Carries what the workers compressed to the scheduler."""

    done: Done

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join two ranks, which must have decided alike."""
        assert isinstance(other, DoneMetadata)
        self.done.check_same(other.done)
        return self


class FoveaKVConnector(KVConnectorBase_V1):
    """Compresses the prompts of multimodal requests and returns their blocks to vLLM's pool."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        private.check()
        settings = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        support.check_config(vllm_config, kv_cache_config, settings.allow_unverified)
        super().__init__(vllm_config, role, kv_cache_config)
        sizes = support.geometry_of(vllm_config, kv_cache_config)
        facts = model_facts.facts_of(vllm_config.model_config, sizes.layers)

        @remembered
        def create(choice: Choice) -> Method:
            made = choice.create().for_model(facts)
            ENGINE.check(made)
            return made

        if not settings.default.off:
            create(settings.default)
        self.scheduler = SchedulerSide(settings, create, sizes) if role is KVConnectorRole.SCHEDULER else None
        self._attention_every = settings.attention_every
        self._create, self._sizes = create, sizes
        self.worker: WorkerSide | None = None
        self._done = Done()
        self._failing: list[str] = []

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the cache, before the first step."""
        if get_kv_transfer_group() is not self:
            raise UnsupportedModeError("FoveaKV in vLLM does not support MultiConnector; use it as the only connector")
        layers = private.attention_layers(self._vllm_config, list(kv_caches))
        scaling = support.check_layers(layers.values())
        self.worker = WorkerSide(self._create, self._sizes, scaling, private.TensorParallel(), self._attention_every)
        size = self._vllm_config.cache_config.block_size
        self.worker.store = platforms.store_of(layers, kv_caches, size)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start a step: vLLM calls this before it builds the attention metadata."""
        assert self.worker is not None
        assert isinstance(kv_connector_metadata, PlanMetadata)
        self._failing = list(kv_connector_metadata.plan.refused)
        self.worker.start_step(kv_connector_metadata.plan)

    def wait_for_save(self) -> None:
        """End a step: vLLM calls this after the last layer."""
        if self.worker is not None:
            freed = self.worker.end_step()
            self._done = Done(freed, self.worker.failed)

    def build_connector_worker_meta(self) -> DoneMetadata | None:
        """Tell the scheduler what was compressed."""
        done, self._done = self._done, Done()
        return None if done == Done() else DoneMetadata(done)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Fail the refused requests. vLLM ignores failures of transfers that are not finished."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving.update(self._failing)
        results.finished_recving.update(self._failing)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """End requests whose method failed in the step before: vLLM ends those whose blocks are invalid."""
        return set() if self.worker is None else self.worker.failing_blocks

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    # ---- scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """No keys and values leave the engine."""
        return False

    def on_new_request(self, request: Any) -> None:
        """Choose what happens to a request."""
        assert self.scheduler is not None
        self.scheduler.add(request)
        if self.scheduler.compresses(request.request_id):
            private.keep_out_of_prefix_cache(request)
        elif self.scheduler.refuses(request.request_id):
            private.ask_connector(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Let refused requests wait for a transfer that the worker reports as failed; vLLM then ends them."""
        assert self.scheduler is not None
        return (1, True) if self.scheduler.refuses(request.request_id) else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Let a refused request fail in this step."""
        if num_external_tokens:
            self._failing.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> PlanMetadata:
        """Plan a step."""
        assert self.scheduler is not None
        failing, self._failing = self._failing, []
        plan = self.scheduler.plan(
            scheduler_output.num_scheduled_tokens,
            lambda req_id: private.block_ids(self._kv_cache_manager, req_id),
            scheduler_output.finished_req_ids,
            scheduler_output.preempted_req_ids or (),
            failing,
        )
        return PlanMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """Return blocks to the pool."""
        assert self.scheduler is not None
        meta = connector_output.kv_connector_worker_meta
        freed = meta.done.freed if isinstance(meta, DoneMetadata) else ()
        for req_id, entries in self.scheduler.done(freed):
            private.free_entries(self._kv_cache_manager, req_id, entries)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request and report on it."""
        assert self.scheduler is not None
        if self.scheduler.compresses(request.request_id):
            private.forget_hashes(self._kv_cache_manager, block_ids)
        return False, self.scheduler.end(request.request_id)
