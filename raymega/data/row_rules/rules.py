"""Rules by which a sample's row is made of the documents that are read: masks or spans, then transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymega.config.schema import Job
from raymega.data.images.image_rows import ImageRows, image_rows_of
from raymega.data.row_rules.masking import Masks, masks_of
from raymega.data.row_rules.plugin_rows import Transform, transforms_of
from raymega.data.row_rules.span_corruption import SpanCorruption, span_corruption_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRules:
    """Rules of the rows of a split.

    Attributes:
        masks: Rule of an encoder's rows; None for rows that predict the next token.
        spans: Rule of an encoder-decoder model's rows; None for others.
        images: Rule of the rows of a model that reads images; None for others.
        transforms: Functions of a row and its sample's number to a row, applied in order.
    """

    masks: Masks | None = None
    spans: SpanCorruption | None = None
    images: ImageRows | None = None
    transforms: Sequence[Transform] = ()


PLAIN_ROWS = RowRules()


def row_rules(job: Job, split: str) -> RowRules:
    """Return the rules of a job's split.

    Raises:
        ConfigError: The code of a plug-in failed; the error has its line.
        DataError: Whole words are asked for, and the dataset has no tokenizer.
    """
    return RowRules(
        masks=masks_of(job, split),
        spans=span_corruption_of(job, split),
        images=image_rows_of(job, split),
        transforms=transforms_of(job, split),
    )
