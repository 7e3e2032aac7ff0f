"""The job file's data section: the tokens to train on, and the sizes of sequences and batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raymega.config.fields import Positive, Section


class BatchStage(Section):
    """Entry of a batch ramp: a batch size, and the sample count up to which it applies."""

    until_samples: Positive = Field(
        description="Samples that the run has consumed when the entry ends."
    )
    global_batch_size: Positive = Field(description="Sequences of one optimizer step until then.")


class DataSection(Section):
    """Tokens to train on, and the sizes of sequences and batches."""

    # Tokens and batches.
    path: str = Field(
        description="Folder or s3://bucket/prefix written by `raymega data prepare`, or `synthetic` "
        "for built-in tokens that need no file."
    )
    seq_len: Positive = Field(description="S, tokens of one sequence.")
    global_batch_size: Positive = Field(description="Sequences of one optimizer step, all ranks.")
    batch_ramp: tuple[BatchStage, ...] = Field(
        default=(),
        description="Smaller batches at the start: each entry `{until_samples, global_batch_size}` "
        "applies until the run has consumed until_samples samples. After the last entry "
        "data.global_batch_size applies.",
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
