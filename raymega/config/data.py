"""The section of the job file that says which tokens are read, and in which portions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raymega.config.fields import Positive, Section


class BatchStage(Section):
    """One stage of a batch ramp."""

    until_samples: Positive = Field(description="Samples of the run consumed when it ends.")
    global_batch_size: Positive = Field(description="Sequences of one optimizer step until then.")


class DataSection(Section):
    """Which tokens, in which portions."""

    path: str = Field(
        description="Folder or s3://bucket/prefix written by `raymega data prepare`, or `synthetic` "
        "for built-in tokens that need no file."
    )
    seq_len: Positive = Field(description="S, tokens of one sequence.")
    global_batch_size: Positive = Field(description="Sequences of one optimizer step, all ranks.")
    batch_ramp: tuple[BatchStage, ...] = Field(
        default=(),
        description="Smaller batches at the start: each entry `{until_samples, global_batch_size}` "
        "holds until so many samples of the run are consumed, then the next, then "
        "global_batch_size.",
    )
    packing: Literal["none", "best_fit"] = Field(
        default="none",
        description="none: a sequence is S tokens of the stream, whatever documents they are of. "
        "best_fit: it holds whole documents and padding; tokens see their own document only, and "
        "positions begin anew with each. Documents longer than seq_len are cut.",
    )
    packing_window: Positive = Field(
        default=4096,
        description="best_fit only: documents that are packed together. More leave less padding "
        "and take longer to open.",
    )
    document_multiple: Positive = Field(
        default=1,
        description="best_fit only: each document is padded to a multiple of this many tokens, "
        "whatever the layout is; it must divide seq_len. Context parallelism cuts documents, so 2 * "
        "parallel.cp must divide it.",
    )
