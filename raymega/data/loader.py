"""Loads one rank's micro-batches for a position in the data, one step ahead in a thread.

It keeps no state. `raymega.plan.batch` assigns samples to micro-batches, `raymega.data.samples`
assigns rows to samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from raymega.config.heads.section import Pooling
from raymega.config.vision.section import VisionSection
from raymega.data.batch_copy import PackedBatches, pack_batches
from raymega.data.heads.score_batch import score_batch
from raymega.data.images.image_batch import ImageShare, row_axes
from raymega.data.preference.pair_batch import pair_batch
from raymega.data.prefetch import Ahead
from raymega.data.rows import TEXT, Image, NumberedRows, Row, empty_row, later_of, positions_of
from raymega.parallel.context_parallel.context import (
    Context,
    EncoderInput,
    MicroBatch,
    PairBatch,
    Rows,
    ScoreBatch,
    TeacherBatch,
    complete_rows,
    held_positions,
    no_context,
)
from raymega.parallel.context_parallel.stream_places import Places, stream_places
from raymega.plan.batch import BatchPlan

R = TypeVar("R", bound=NumberedRows)


class Loader(Generic[R]):
    """Loader of one rank's micro-batches, a pure function of the position in the data.

    From each row it keeps only the tokens that this rank of ``context`` holds.
    """

    def __init__(  # noqa: PLR0913  # raymega.train.build is the only caller
        self,
        source: R,
        *,
        dp_rank: int,
        device: torch.device | str,
        context: Context | None = None,
        depth: int = 0,
        is_guessing: bool = False,
        is_encoder: bool = False,
        empty: Callable[[int], Row] = empty_row,
        pooling: Pooling | Literal["none"] = "none",
        images: ImageShare | None = None,
        vision: VisionSection | None = None,
        images_of: Callable[[int], Sequence[Image]] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Make the loader of one rank.

        Args:
            source: Rows by global sample.
            dp_rank: Data-parallel rank of the loader.
            device: Device of the micro-batches' tensors.
            context: Context-parallel context of this rank; None for whole rows.
            depth: Number of further tokens to predict, see `MicroBatch.later`; 0 for none.
            is_encoder: True where rows have masks, so that micro-batches have an encoder's input.
            empty: Function from S to the row of a slot without a sample.
            pooling: Tokens of a document that a head's scores are read at; none where documents have no scores.
            images: Share of the images that this rank's tower reads; None without images, and behind the first stage.
            vision: Section of the tower, on all stages; None for rows of text.
            images_of: Function of a sample to the images of its row alone, for the rows of other dp ranks; None reads them whole.
            is_guessing: True to load the next step while a step runs.
            timeout_s: Longest wait for a step's micro-batches, in seconds.
        """
        self.source, self._dp_rank, self._depth = source, dp_rank, depth
        self._device, self._context = device, context or no_context()
        self._is_encoder, self._empty, self._pooling = is_encoder, empty, pooling
        self._images, self._vision = images, vision or VisionSection()
        self._images_of = images_of or (lambda sample: source.row(sample).images)
        self._steps = Ahead[PackedBatches](is_guessing=is_guessing, timeout_s=timeout_s)

    def begin(self, batch: BatchPlan, first_sample: int) -> None:
        """Begin to load the micro-batches of a step, as soon as it is known which one is the first."""
        self._steps.begin(self._load, batch, first_sample)

    def micro_batches(self, batch: BatchPlan, first_sample: int) -> list[MicroBatch]:
        """Return the micro-batches of a step with ``batch`` that begins at ``first_sample``."""
        return self._steps.of(self._load, batch, first_sample).on_device(self._device)

    @property
    def waited_s(self) -> float:
        """Seconds for which the newest step's micro-batches were waited for."""
        return self._steps.waited_s

    def _load(self, batch: BatchPlan, first_sample: int) -> PackedBatches:
        def others(index: int, dp_rank: int) -> list[Image]:
            samples = batch.samples(index, dp_rank, first_sample)
            # a masked slot has none
            return [image for sample in samples if sample >= 0 for image in self._images_of(sample)]

        made = [
            self._micro_batch(
                batch.samples(index, self._dp_rank, first_sample), partial(others, index)
            )
            for index in range(batch.num_micro_batches)
        ]
        return pack_batches(made, self._device)

    def _micro_batch(
        self, samples: tuple[int, ...], others: Callable[[int], Sequence[Image]]
    ) -> MicroBatch:
        """Return the micro-batch of samples; ``others`` are the images that another dp rank has at its place."""
        rows = [self._row(sample) for sample in samples]
        # Rows with equal documents share one entry of positions.
        documents = tuple(row.documents for row in rows)
        if len(set(documents)) == 1:
            documents = documents[:1]
        # positions that this context-parallel rank holds: [1 or B, S/cp]
        held = held_positions(documents, self._context)
        mine = held.expand(len(rows), -1).numpy()

        def take(arrays: Sequence[np.ndarray], at: np.ndarray = mine) -> torch.Tensor:
            return torch.from_numpy(np.take_along_axis(np.stack(arrays), at, axis=1))

        # [depth, B, S/cp]: by depth first, then by row
        def take_later() -> tuple[torch.Tensor, torch.Tensor]:
            labels, masks = zip(*(later_of(row, self._depth) for row in rows), strict=True)
            by_depth = [[row[k] for row in labels] for k in range(self._depth)]
            counts = [[row[k] for row in masks] for k in range(self._depth)]
            return torch.stack([*map(take, by_depth)]), torch.stack([*map(take, counts)]).float()

        # A row of one document has its positions already.
        is_whole = all(len(lengths) == 1 for lengths in documents)
        positions = (
            held
            if is_whole
            else take([positions_of(lengths) for lengths in documents], held.numpy())
        )
        mask = take([row.mask for row in rows]).float()
        return MicroBatch(
            tokens=take([row.tokens for row in rows]),
            # Shifted by one in the whole row: the last token of a rank's part has a label too.
            labels=take([row.labels for row in rows]),
            mask=mask,
            num_counted=int(mask.sum()),
            samples=torch.tensor(samples),
            rows=complete_rows(
                Rows(
                    positions,
                    documents,
                    row_positions=held,
                    streams=self._places(rows),
                    images=None
                    if self._images is None
                    else self._images.images(rows, take, others),
                    axes=row_axes(rows, take, self._vision.num_patches)
                    if self._vision.mrope_section
                    else None,
                ),
                self._context,
            ),
            later=take_later() if self._depth else None,
            encoder=_encoder_input(rows, take) if self._is_encoder else None,
            pairs=self._groups(rows, held),
            teacher=_taught(rows, mine),
            image_counts=_image_counts(rows, mine, self._vision.num_patches),
        )

    def _places(self, rows: Sequence[Row]) -> tuple[Places, Places] | None:
        """Return the places of both streams of an encoder-decoder model on this rank; None in other families."""
        places = [(row.stream_documents, row.stream_positions) for row in rows]
        if places[0][0] is None:
            return None
        # rows with equal documents share one entry
        documents, positions = (
            torch.from_numpy(np.stack(part)) for part in zip(*places, strict=True)
        )
        if (documents == documents[:1]).all() and (positions == positions[:1]).all():
            documents, positions = documents[:1], positions[:1]
        cp, cp_rank = self._context.degree, self._context.index
        return stream_places(documents, positions, rows[0].documents, cp=cp, cp_rank=cp_rank)

    def _groups(self, rows: Sequence[Row], held: torch.Tensor) -> PairBatch | ScoreBatch | None:
        """Return the pairs of answers of rows, or their scored documents, of which there may be none."""
        if self._pooling != "none":
            return score_batch(rows, held, self._context, pooling=self._pooling)
        has_pairs = any(row.num_pairs for row in rows)
        return pair_batch(rows, held, self._context) if has_pairs else None

    def _row(self, sample: int) -> Row:
        """Return the row of a global sample; a masked slot gets an empty row, without labels."""
        if sample < 0:
            return self._empty(self.source.seq_len)
        return self.source.row(sample)


def _taught(rows: Sequence[Row], held: npt.NDArray[np.int64]) -> TeacherBatch | None:
    """Return a teacher's stored logits at this rank's positions ``held`` [B, S/cp]; zeros of empty rows."""
    some = next((row.taught for row in rows if row.taught is not None), None)
    if some is None:
        return None
    nothing = tuple(map(np.zeros_like, some))
    ids, logits = zip(*(row.taught or nothing for row in rows), strict=True)

    def take(arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.stack([each[at] for each, at in zip(arrays, held, strict=True)]))

    return TeacherBatch(ids=take(ids).long(), logits=take(logits))


def _image_counts(
    rows: Sequence[Row], held: npt.NDArray[np.int64], num_patches: int
) -> tuple[int, float]:
    """Return how many tokens at this rank's positions ``held`` [B, S/cp] stand for patches, and how many images these are.

    A patch of n is one n-th of its image, so that the parts of ranks add up. Places count images by ``num_patches``.
    """
    tokens, images = 0, 0.0
    for row, at in zip(rows, held, strict=True):
        # a row of text, or a loader without a section, whose counts are unread
        if row.image_places is None or not row.images or not num_patches:
            continue
        found = row.image_places[at]
        sizes = np.array([image.num_patches for image in row.images])
        own = sizes[found[found != TEXT] // num_patches]
        tokens, images = tokens + len(own), images + float((1 / own).sum())
    return tokens, images


def _encoder_input(
    rows: Sequence[Row], take: Callable[[Sequence[np.ndarray]], torch.Tensor]
) -> EncoderInput:
    """Return token types and pairs of rows, by the tokens that ``take`` leaves a rank.

    Empty rows have neither. Their micro-batch has an input all the same: every rank's backward has the
    same gradients in the same order.
    """
    nothing = np.zeros_like(rows[0].tokens)
    types = [nothing if row.token_types is None else row.token_types for row in rows]
    pairs = take(
        [nothing - 1 if row.segment_pairs is None else row.segment_pairs for row in rows]
    ).t()
    first = (pairs.flatten() >= 0).nonzero()[:, 0]
    return EncoderInput(token_types=take(types), first=first, labels=pairs.flatten()[first])
