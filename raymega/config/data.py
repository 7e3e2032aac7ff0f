"""The job file's data section: the tokens to train on, and the sizes of sequences and batches."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from raymega.config.encoder import MaskingSection, SpanCorruptionSection
from raymega.config.fields import (
    PLUGIN_NAME,
    NonNegativeFloat,
    PluginName,
    Positive,
    PositiveFloat,
    Section,
)
from raymega.config.vision.augment import AugmentSection

NO_PATH = "none"
"""Value of data.path in a job that has data.sources."""
SHUFFLE_BLOCK_BYTES, CACHE_BYTES = 8 << 30, 256 << 30
SYNTHETIC_PATH = "synthetic"
MEGATRON = "megatron:"
"""Start of a path that names Megatron's files by their prefix."""
PATH_FORMS = (
    "Folder or s3://bucket/prefix written by `raymega data prepare`, `megatron:PREFIX` for Megatron's files "
    "PREFIX.bin and PREFIX.idx, or `synthetic` (or `synthetic:NAME`, other tokens for each name) for built-in "
    "tokens that need no file; `acme.source:...` for a data source of a plug-in."
)


def source_name(path: str) -> str:
    """Return the data source that a path names: NAME of ``NAME`` or ``NAME:...``; empty for a dataset's own path."""
    name, colon, rest = path.partition(":")
    if name == SYNTHETIC_PATH or path.startswith(MEGATRON):
        return name
    is_plugin = colon and not rest.startswith("//") and re.fullmatch(PLUGIN_NAME, name)
    return name if is_plugin else ""


def is_synthetic(path: str) -> bool:
    """Return True if ``path`` names built-in tokens: ``synthetic`` or ``synthetic:NAME``."""
    return source_name(path) == SYNTHETIC_PATH


def is_computed(path: str) -> bool:
    """Return True if ``path`` names tokens that no file holds: ``synthetic``, or those of a plug-in."""
    return source_name(path) not in ("", MEGATRON[:-1])


class BatchStage(Section):
    """Entry of a batch ramp: a batch size, and the sample count up to which it applies."""

    until_samples: Positive = Field(
        description="Samples that the run has consumed when the entry ends."
    )
    global_batch_size: Positive = Field(description="Sequences of one optimizer step until then.")


class DataSource(Section):
    """Entry of a blend: a dataset, and its share of the samples."""

    path: str = Field(description=f"Dataset: as data.path. {PATH_FORMS}")
    weight: PositiveFloat = Field(
        default=1.0, description="Share of the samples, relative to the other weights of the blend."
    )
    max_epochs: NonNegativeFloat = Field(
        default=0.0,
        description="Most passes over the dataset that the run may make, counted from its begin to the end "
        "of this blend; a run that would make more is refused. 0 is no limit.",
    )


class DataStage(Section):
    """Later blend of a run, and the token count from which it applies."""

    from_tokens: Positive = Field(
        description="Tokens of the run before the stage, rounded up to whole sequences of seq_len."
    )
    sources: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(
        description="Blend from there on; a dataset of an earlier blend continues where that ended."
    )


class ValidationSet(Section):
    """Validation set with a loss and a perplexity of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,49}$")] = Field(
        description="Name in metrics: eval/set_loss/NAME and eval/set_perplexity/NAME."
    )
    path: str = Field(description="Dataset, as data.path.")
    split: Literal["valid", "train"] = Field(
        default="valid",
        description="Split of the dataset. `train` is all of a dataset that was prepared with --valid-fraction 0, "
        "or of Megatron's files.",
    )


class DataSection(Section):
    """Tokens to train on, and the sizes of sequences and batches."""

    # Tokens and batches.
    path: str = Field(
        default=NO_PATH, description=f"The one dataset of a run without data.sources. {PATH_FORMS}"
    )
    sources: tuple[DataSource, ...] = Field(
        default=(),
        description="Blend of datasets, in place of data.path: each entry `{path, weight, max_epochs}`. Of the "
        "first n samples each dataset has its share of n, rounded up or down, for every n.",
    )
    stages: tuple[DataStage, ...] = Field(
        default=(),
        description="Later blends, as for annealing: each entry `{from_tokens, sources}` replaces the blend "
        "before it. Stages ahead of a run's position may be added or changed.",
    )
    validation: tuple[ValidationSet, ...] = Field(
        default=(),
        description="Validation sets, each entry `{name, path, split}`, in place of the validation split of "
        "data.path or the blend. eval/loss is that of the first.",
    )
    transforms: tuple[PluginName, ...] = Field(
        default=(),
        description="Transforms of plug-ins, each applied to every sequence in this order, in training and evaluation.",
    )
    seq_len: Positive = Field(description="S, tokens of one sequence.")
    global_batch_size: Positive = Field(description="Sequences of one optimizer step, all ranks.")
    batch_ramp: tuple[BatchStage, ...] = Field(
        default=(),
        description="Smaller batches at the start: each entry `{until_samples, global_batch_size}` "
        "applies until the run has consumed until_samples samples. After the last entry "
        "data.global_batch_size applies.",
    )
    shuffle_block_bytes: Positive = Field(
        default=SHUFFLE_BLOCK_BYTES,
        description="Most bytes of a block of shards. A dataset's shards are shuffled in each epoch and cut into "
        "blocks; rows are shuffled within a block. A run keeps it. More of them mix better and take more of "
        "a node's disk.",
    )
    cache_bytes: Positive = Field(
        default=CACHE_BYTES,
        description="Most bytes of shards of datasets in object stores that a node keeps on its disk, in "
        "~/.raymega/cache; at least two blocks of each. It may be changed at any time.",
    )
    loss_on: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto",
        description="Labels of a conversation that count. auto: those of assistant for datasets of conversations, "
        "all for others. assistant: what the assistant writes. completion: its last message. all: every token.",
    )
    masking: MaskingSection = Field(
        default=MaskingSection(),
        description="Masks of encoders, drawn anew for each sample of the run and the same on every layout.",
    )
    augment: AugmentSection = Field(
        default=AugmentSection(),
        description="Random changes of images in training, drawn anew for each sample of the run and the same on every "
        "layout.",
    )
    span_corruption: SpanCorruptionSection = Field(
        default=SpanCorruptionSection(),
        description="Spans that encoder-decoder models predict, drawn anew for each sample of the run and the same on "
        "every layout.",
    )
    # Packing of documents into sequences.
    packing: Literal["none", "best_fit"] = Field(
        default="none",
        description="none: a sequence is the next S tokens of the stream, across document boundaries. "
        "best_fit: a sequence holds whole documents and padding; tokens attend to their own document only, "
        "and positions restart with each document. Documents longer than seq_len are cut.",
    )
    packing_window: Positive = Field(
        default=4096,
        description="best_fit only: number of documents that are packed together. More of them leave less "
        "padding and take longer to open.",
    )
    document_multiple: Positive = Field(
        default=1,
        description="best_fit only: each document is padded to a multiple of this many tokens, "
        "whatever the layout is; it must divide seq_len. Context parallelism cuts documents, so 2 * "
        "parallel.cp must divide it.",
    )

    @property
    def text_len(self) -> int:
        """Tokens of text that are read for a row: more than S where spans are replaced by sentinels."""
        return self.span_corruption.text_seq_len or self.seq_len

    @property
    def blends(self) -> tuple[tuple[int, tuple[DataSource, ...]], ...]:
        """Blends of the run in order, each with the tokens before it; data.path alone is a blend of one."""
        first = self.sources or (DataSource(path=self.path),)
        return ((0, first), *((stage.from_tokens, stage.sources) for stage in self.stages))

    @property
    def datasets(self) -> dict[str, str]:
        """Training datasets by path in order of appearance, each with the field that first names it."""
        found = {} if self.sources else {self.path: "data.path"}
        blends = {"data.sources": self.sources} | {
            f"data.stages[{number}].sources": stage.sources
            for number, stage in enumerate(self.stages)
        }
        for field, sources in blends.items():
            for number, source in enumerate(sources):
                found.setdefault(source.path, f"{field}[{number}].path")
        return found
