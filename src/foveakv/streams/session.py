"""`foveakv.stream`: read frames as they come, in fixed memory, and ask about them at any time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from foveakv.core.budget import parse_budget
from foveakv.core.frames import frames_of
from foveakv.engines.transformers import compat
from foveakv.engines.transformers.api import compress
from foveakv.engines.transformers.cache import CompressedCache
from foveakv.engines.transformers.forward import prompt_map
from foveakv.engines.transformers.positions import Positions
from foveakv.engines.transformers.session import Session
from foveakv.engines.transformers.sizes import positions_of
from foveakv.errors import BudgetError, CacheInUseError, InputError, MethodError, UnsupportedModeError
from foveakv.methods import Method
from foveakv.methods import get as get_method
from foveakv.methods.checks import choice, whole_number
from foveakv.models.images import image_list
from foveakv.streams import saving
from foveakv.streams.blocks import BlockInputs, BlockMaker, FrameForm
from foveakv.streams.report import StreamReport
from foveakv.streams.video import read_video


def stream(
    model: Any,
    processor: Any,
    method: Method | str = "infinipotv",
    *,
    budget: int | str | None = None,
    block: int = 4,
    frames: FrameForm = "images",
    timestamps: bool = False,
    positions: str = "gaps",
    **options: Any,
) -> FrameStream:
    """Open a stream of frames.

    Args:
        model: a transformers model that takes images.
        processor: its processor.
        method: a method, or its name. It decides after every block, over what is stored and the block.
        budget: what stays: tokens per KV head (4096) or bytes for the whole cache ("512MiB"). None: the method's own
            budget, which must not be a share: a stream has no length.
        block: frames that are read at once, a multiple of two with `frames="video"`. Memory peaks at the budget, one
            block and the work of one layer.
        frames: "images": every frame is an image in the prompt; works with every model. "video": two frames are a
            step of a video, and `times` go into the positions; for the Qwen families.
        timestamps: with images, write the time before each frame, as text.
        positions: "gaps": tokens keep their positions, and what is evicted leaves a gap.
        options: cache options, such as `pinned="system"` or `kv_dtype="int8"`; see `foveakv.CacheOptions`.

    Returns:
        A `FrameStream`, with `feed`, `ask` and `report`.

    Raises:
        BudgetError: the budget is a share, or invalid.
        MethodError: an option is invalid, or the method does not compress further blocks.
        UnsupportedModeError: `positions="compact"`.
        UnsupportedModelError: the model's positions or videos are not known here.
        InputError: the processor takes no images.
    """
    return FrameStream(model, processor, method, budget, block, frames, timestamps, positions, options)


class FrameStream:
    """A stream of frames in fixed memory; made by `foveakv.stream`.

    The model is attached while a block is read or a question answered, and plain in between.

    Attributes:
        method: the method, with the stream's budget.
        cache: the compressed cache; None before the first block.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        method: Method | str,
        budget: int | str | None,
        block: int,
        frames: FrameForm,
        timestamps: bool,
        positions: str,
        options: dict[str, Any],
    ) -> None:
        whole_number("stream", "block", block, 1, "frames that are read at once")
        choice("stream", "frames", frames, ("images", "video"))
        choice("stream", "positions", positions, ("gaps", "compact"))
        if positions == "compact":
            raise UnsupportedModeError(
                'positions="compact" would rotate stored keys to new positions, which is not supported; leave it out: '
                "tokens keep their positions"
            )
        self.model = model
        self.method = _absolute(method, budget)
        self._maker = BlockMaker(model, processor, frames, timestamps)
        if block % self._maker.steps:
            raise MethodError(f"block must be a multiple of {self._maker.steps} with frames='video'; got {block}")
        self._block = block
        self._options = {"keep_text": None if self.method.evicts_while_decoding else False, **options}
        self._positions = Positions(model)
        self._session: Session | None = None
        self._units: list[tuple[int, int]] = []  # first and last column of every frame
        self._last_time: float | None = None
        self._blocks = 0
        self._warned = False
        self._failed: StreamReport | None = None  # what there was to say when a pass failed

    def feed(self, frames: Any, times: Sequence[float] | None = None, *, captions: Sequence[str] | None = None) -> None:
        """Read frames, in groups of `block`; each group is compressed when it has been read.

        Args:
            frames: one image or several, whatever `foveakv.read_images` takes.
            times: the time of each frame in seconds, ascending over the whole stream. None: one second per frame.
            captions: a text before each frame, with `frames="images"`.

        Raises:
            CacheInUseError: an earlier block failed.
            InputError: an image cannot be read, times do not ascend, or the numbers of frames, times and captions
                differ. What was fed before stays.
        """
        images = image_list(frames)
        clock = self._clock(len(images), times)
        texts = list(captions) if captions is not None else [""] * len(images)
        if len(texts) != len(images):
            raise InputError(f"{len(images)} frames need as many captions, got {len(texts)}")
        for start in range(0, len(images), self._block):
            group = slice(start, start + self._block)
            made = self._maker.frames(images[group], clock[group], texts[group])
            self._read(made)
            self._last_time = clock[group][-1]

    def feed_video(self, path: Any, *, fps: float = 1.0, start: float = 0.0) -> None:
        """Read a video file block by block; frames are decoded as they are needed.

        Args:
            path: the file.
            fps: frames to take per second of the video.
            start: the time of its first frame in the stream.

        Raises:
            MissingDependencyError: PyAV is not installed (`pip install foveakv[video]`).
            InputError: the file cannot be read as a video.
        """
        images: list[Any] = []
        times: list[float] = []
        for image, time in read_video(path, fps):
            images.append(image)
            times.append(start + time)
            if len(images) == self._block:
                self.feed(images, times)
                images, times = [], []
        if images:
            self.feed(images, times)

    def feed_inputs(
        self, inputs: dict[str, Any], times: Sequence[float] | None = None, *, units: Sequence[int] | None = None
    ) -> None:
        """Read one block whose inputs were made elsewhere.

        Args:
            inputs: of the model, for the block alone: `input_ids` [1, n] without padding, pixels, grids, token types.
            times: seconds of every step of the block's videos; see `Positions.block`.
            units: for each frame, the image or step of a video in this block that it is in. None: every image or run of
                video tokens is a frame.

        Raises:
            InputError: the inputs do not fit.
        """
        self._read(BlockInputs(dict(inputs), times, units))

    def _read(self, block: BlockInputs) -> None:
        """Read a block, after what an answer left pending."""
        self._check()
        times, units = block.times, block.units
        first = prompt_map(self.model, block.inputs)
        if "input_ids" not in block.inputs or first.batch != 1 or not bool(first.real.all()):
            raise InputError("a stream reads the token ids of one sequence without padding")
        inputs = dict(self._maker.after_pending(block.inputs))
        prompt = prompt_map(self.model, inputs)
        positions = copy.deepcopy(self._positions)
        inputs["position_ids"] = positions.block(inputs, times)
        before = 0 if self.cache is None else self.cache.seen
        with self._changing(), self._opened(inputs, steps=None if times is None else len(times)) as session:
            session.feed(**inputs)
        self._positions = positions
        self._maker.was_read(inputs)
        self._blocks += 1
        columns = torch.nonzero(prompt.visual[0]).flatten()
        numbers = frames_of(prompt, getattr(self.method, "frame_tokens", None))[0][0, columns]
        runs = [columns[numbers == number] for number in numbers.unique().tolist()]
        wanted = range(len(runs)) if units is None else units
        if units is not None and len(runs) != max(units) + 1:  # images that touch, or are in pieces
            runs = list(columns.chunk(max(units) + 1))
        self._units += [(before + int(runs[unit][0]), before + int(runs[unit][-1])) for unit in wanted]
        limit = positions_of(compat.text_config_of(self.model))
        # Where positions are the number of tokens, the cache warns.
        if positions.clock is not None and 0 < limit <= positions.highest and not self._warned:
            self._warned = True
            warnings.warn(
                f"the stream has reached position {positions.highest}, and this model was made for {limit}: its "
                "answers may be wrong from here on; open a new stream",
                stacklevel=3,
            )

    def ask(self, question: str, *, keep: bool = False, max_new_tokens: int = 64, **generate: Any) -> str:
        """Answer a question about what has been read.

        The question and its answer are stored whole beside the stream, on a copy that is dropped afterwards; the stream
        does not change.

        Args:
            question: text, without marks for images.
            keep: let question and answer stay in the stream; the next block brings it back to its budget.
            max_new_tokens: longest answer.
            generate: further arguments of `model.generate`.

        Returns:
            The answer, without special tokens.

        Raises:
            CacheInUseError: an earlier block failed.
            InputError: nothing has been read, the question is empty, or several beams or answers are asked for.

        What raises before a token of the question is stored changes nothing.
        """
        self._check()
        if self._session is None or self.cache is None:
            raise InputError("this stream has read nothing yet; feed frames first")
        if not question.strip():
            raise InputError("the question is empty")
        for name in ("num_beams", "num_return_sequences"):
            if generate.get(name) not in (None, 1):
                raise InputError(f"a stream is one sequence, so {name} must be 1; leave it out")
        cache = self.cache if keep else copy.deepcopy(self.cache)
        positions = copy.deepcopy(self._positions)
        ids = self._maker.question(question)
        before = cache.seen
        mask = torch.ones(1, before + ids.shape[1], dtype=torch.long, device=ids.device)
        given = {"do_sample": False, "max_new_tokens": max_new_tokens, compat.cache_argument(self.model): cache}
        changing = self._changing() if keep else contextlib.nullcontext()
        with changing, self._session, torch.no_grad(), _stored_whole(cache):
            output = self.model.generate(
                input_ids=ids, attention_mask=mask, position_ids=positions.text(ids.shape[1]).to(ids.device),
                **{**given, **generate},
            )  # fmt: skip
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        answer = sequence[0, ids.shape[1] :].tolist()
        if keep:
            positions.text(cache.seen - before - ids.shape[1])
            self._positions = positions
            self._maker.answered(answer[cache.seen - before - ids.shape[1] :])
        return str(self._maker.tokenizer.decode(answer, skip_special_tokens=True)).strip()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream to a file, for `foveakv.load_stream`: its cache, its positions and its clock.

        Needs the option `saveable=True`; see `foveakv.CompressedCache.save`.

        Raises:
            CacheInUseError: an earlier block failed.
            InputError: nothing has been read.
            UnsupportedModeError: the stream was opened without `saveable=True`.
            StoreError: the file cannot be written.
        """
        saving.save(self, path)

    @property
    def cache(self) -> CompressedCache | None:
        """The compressed cache; None before the first block."""
        return None if self._session is None or not self._session.caches else self._session.cache

    @property
    def report(self) -> StreamReport:
        """What the stream holds now: bytes, frames, positions; of a stream that failed, what it had read."""
        if self._failed is not None:
            return self._failed
        cache = self.cache
        limit = positions_of(compat.text_config_of(self.model))
        if cache is None:
            return StreamReport(0, 0, 0, 0, (), 0, 0, 0, -1, limit)
        cache.note_peak()
        held = torch.zeros(cache.seen + 1, dtype=torch.long)
        for layer in cache.compressed:
            held[cache.kept(layer.layer_idx).flatten().cpu()] = 1  # -1, no token, is the last entry
        before = torch.nn.functional.pad(held[:-1].cumsum(0), (1, 0)).tolist()
        kept = tuple(i for i, (first, last) in enumerate(self._units) if before[last + 1] > before[first])
        slots = sum(layer.stored_slots for layer in cache.compressed)
        host = sum(layer.host_nbytes for layer in cache.compressed)
        return StreamReport(
            cache.stored_nbytes, cache.peak_nbytes, host, len(self._units), kept, cache.seen, self._blocks, slots,
            self._positions.highest, limit,
        )  # fmt: skip

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a pass that changes the stream: one that fails after it has begun leaves no state to go on from."""
        cache, session, method = self.cache, self._session, self.method
        before = 0 if cache is None else cache.seen
        try:
            yield
        except BaseException:
            if cache is None or (cache.forward_tokens is None and cache.seen == before):  # nothing was stored
                self._session, self.method = session, method
            else:
                self._session = None  # frees its memory
                self._failed = StreamReport(
                    0, cache.peak_nbytes, 0, len(self._units), (), before, self._blocks, 0, self._positions.highest,
                    positions_of(compat.text_config_of(self.model)), failed=True,
                )  # fmt: skip
            raise

    def _check(self) -> None:
        if self._failed is not None:
            raise CacheInUseError("an earlier block or kept answer of this stream failed; open a new stream")

    def _clock(self, count: int, times: Sequence[float] | None) -> list[float]:
        """Times of new frames in seconds."""
        last = -1.0 if self._last_time is None else self._last_time
        if times is None:
            return [last + 1 + i for i in range(count)]
        found = [float(time) for time in times]
        if len(found) != count:
            raise InputError(f"{count} frames need as many times, got {len(found)}")
        known = found if self._last_time is None else [self._last_time, *found]
        if not all(map(math.isfinite, found)) or any(after <= before for before, after in itertools.pairwise(known)):
            raise InputError("the times of frames must ascend, over the whole stream")
        return found

    def _opened(self, inputs: dict[str, Any], steps: int | None) -> Session:
        """The session; with the first block, the method learns how large a frame is."""
        if self._session is None:
            sizes = _frame_sizes(self.model, inputs, steps)
            known = {field.name for field in dataclasses.fields(self.method)}
            new = {k: v for k, v in sizes.items() if k in known and getattr(self.method, k) is None}
            self.method = dataclasses.replace(self.method, **new) if new else self.method
            self._session = compress(self.model, self.method, **self._options)
        return self._session


def _absolute(method: Method | str, budget: int | str | None) -> Method:
    """The method with an absolute budget."""
    made = get_method(method) if isinstance(method, str) else method
    if not isinstance(made, Method):
        raise MethodError(f"expected a method or its name, got {type(made).__name__}")
    has_budget = any(field.name == "budget" for field in dataclasses.fields(made))
    if budget is not None and not has_budget:
        raise MethodError(f"{made.name} takes no budget; leave it out, or use infinipotv, newest_frames or streaming")
    if budget is not None:
        made = dataclasses.replace(made, budget=budget)  # type: ignore[call-arg]
    if has_budget and parse_budget(made.budget).kind == "ratio":  # type: ignore[attr-defined]
        raise BudgetError(
            f"a stream has no length that {made.budget!r} could be a share of; give tokens per head (4096) or bytes "  # type: ignore[attr-defined]
            '("512MiB")'
        )
    if made.further == "keep" and made.name != "full":
        raise MethodError(
            f"{made.name} stores further blocks whole, so a stream would grow; use infinipotv or newest_frames"
        )
    return made


def _frame_sizes(model: Any, inputs: dict[str, Any], steps: int | None) -> dict[str, int]:
    """`row_tokens`, and for a video without text between its steps `frame_tokens`, where there is a grid."""
    video = inputs.get("video_grid_thw")
    grid = video if video is not None else inputs.get("image_grid_thw")
    if grid is None:
        return {}
    merge = model.config.vision_config.spatial_merge_size
    found = {"row_tokens": int(grid[0, 2]) // merge}
    if video is not None:
        found["frame_tokens"] = int(grid[0, 1] * grid[0, 2]) // merge**2
    return found


@contextmanager
def _stored_whole(cache: CompressedCache) -> Iterator[None]:
    """Inside, the cache stores further turns whole: a question does not evict what it is about."""
    options = cache.options
    cache.options = dataclasses.replace(options, turns="store")
    try:
        yield
    finally:
        cache.options = options
