"""What a compressed cache says of itself: lengths, bytes, what is kept, and what the method did."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foveakv.core.budget import Geometry
from foveakv.core.prompt import PromptMap
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.contents import Contents
from foveakv.engines.transformers.layer import CompressedLayer
from foveakv.engines.transformers.options import CacheOptions
from foveakv.engines.transformers.sizes import layer_nbytes, positions_of
from foveakv.errors import CacheInUseError, MethodError
from foveakv.methods.base import Method
from foveakv.methods.results import Results
from foveakv.methods.views import PromptView, ResultView, State


class CacheFacts(compat.Cache):
    """The part of a `CompressedCache` that changes nothing."""

    config: Any
    method: Method
    options: CacheOptions
    state: State | None
    prompt: PromptMap | None
    contents: Contents | None
    kinds_known: bool
    _request: PromptView | None
    _new_positions: tuple[tuple[int, int, torch.device], Tensor] | None

    def kept(self, layer: int) -> Tensor:
        """Return the positions that model layer `layer` can attend to: int64 [B, H, M], ascending, padded with -1.

        These are the stored slots, and of the offloaded chunks those read in the last step.

        Raises:
            MethodError: the layer does not exist or is not compressed.
            CacheInUseError: the prompt has not been processed.
        """
        if not 0 <= layer < len(self.layers) or not isinstance(self.layers[layer], CompressedLayer):
            numbers = [done.layer_idx for done in self.compressed]
            raise MethodError(f"layer {layer} is not compressed; compressed layers: {numbers}")
        kept: Tensor = self.layers[layer].kept()
        return kept

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The compressed layers, in model order."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def seen(self) -> int:
        """Number of tokens in the context, padding included."""
        return self.compressed[0].seen

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is complete and compressed."""
        return self.compressed[-1].segments is not None

    @property
    def compresses_chunks(self) -> bool:
        """Whether chunks of a prompt are compressed one by one."""
        return self.options.chunks == "compress"

    @property
    def prompt_columns(self) -> int:
        """Number of prompt columns, padding included; no padding is stored below it."""
        return self.full_prompt.kinds.shape[1]

    @property
    def full_prompt(self) -> PromptMap:
        """Map of the prompt columns."""
        if self.prompt is None:
            raise CacheInUseError("this cache has no prompt yet; run a forward pass or `generate` first")
        return self.prompt

    @property
    def stored_nbytes(self) -> int:
        """Storage bytes on the compute device over all layers, those of transformers included."""
        return sum(layer_nbytes(layer) for layer in self.layers) + self.state_nbytes

    @property
    def state_nbytes(self) -> int:
        """Storage bytes of the method's per-request state."""
        return 0 if self.state is None else self.state.nbytes

    @property
    def request(self) -> PromptView:
        """The complete prompt and the sizes of the cache."""
        if self._request is None:
            raise CacheInUseError("the prompt of this cache is not complete yet")
        return self._request

    @property
    def geometry(self) -> Geometry:
        """Sizes of this cache, once the prompt is complete."""
        return self.request.geometry

    @property
    def results(self) -> Results:
        """What the method did to this request; empty before the prompt is complete."""
        if self.undecided or (self.state is None and self._request is None):
            return Results()
        stores = [layer.store for layer in self.compressed if layer.store is not None]
        digest_bytes = sum(store.digest_nbytes for store in stores)
        choosing = sum(store.choosing for store in stores)
        return self.method.results(ResultView(self.request, self.state, digest_bytes, choosing))

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats about the prompt, for readers of the report."""
        found = []
        if not self.kinds_known:
            found.append("the prompt was given as inputs_embeds without mm_token_type_ids: all tokens count as text")
        if 0 < positions_of(self.config) < self.seen:
            found.append(
                f"the context is longer than the model's {positions_of(self.config)} positions: answers may be wrong"
            )
        return tuple(found)

    def new_positions(self, seen: int, new: int, device: torch.device) -> Tensor:
        """Return the positions of the newest tokens, int32 [1, new]; cached for all layers of a forward pass."""
        if self._new_positions is None or self._new_positions[0] != (seen, new, device):
            made = torch.arange(seen - new, seen, dtype=torch.int32, device=device)[None]
            self._new_positions = (seen, new, device), made
        return self._new_positions[1]

    @property
    def token_ids(self) -> Tensor:
        """Token ids of all that was read, int64 [B, tokens], -1 for embeddings. Needs `saveable=True`.

        Raises:
            CacheInUseError: nothing was read or recorded.
        """
        if self.contents is None or not self.contents.tokens:
            raise CacheInUseError("this cache has recorded no tokens; make it with saveable=True and read a prompt")
        return self.contents.ids()
