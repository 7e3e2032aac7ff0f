"""The job file's checkpoint section: what is saved where and when, what a save may take, what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import NonNegative, Positive, Section

FunctionField = Literal[
    "family", "norm_eps", "rope_theta", "rope_scaling", "rope_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow", "rope_original_positions", "rope_mscale", "rope_mscale_all_dim", "moe.top_k", "moe.router_score_function",
    "moe.norm_topk_prob", "moe.routed_scaling_factor", "moe.n_group", "moe.topk_group", "moe.group_score",
    "moe.capacity_factor", "moe.token_drop_policy", "mup_base_width",
]  # fmt: skip
"""Fields of the model that change what it computes, but no tensor's shape."""


class CheckpointSection(Section):
    """Where and when state is saved."""

    uri: str = Field(
        default_factory=lambda: str(Path.home() / ".raymega" / "runs"),
        description="Root folder or s3://bucket/prefix; the run lives in `<uri>/<run.name>/`. "
        "Default: ~/.raymega/runs.",
    )
    local_uri: str = Field(
        default="none",
        description="Folder on each node's own disk where its workers' files of the two newest "
        "checkpoints are kept as well; a restart reads from there what is whole. `none` keeps no copy.",
    )
    init_from: str = Field(
        default="none",
        description="Checkpoint whose weights, and nothing else, the run starts with: of another run "
        "or by `raymega convert hf-import`. Read at the first step only; `none` draws weights.",
    )
    init_rename: tuple[str, ...] = Field(
        default=(),
        description="OLD=NEW for init_from: its tensors whose names begin with OLD are this model's "
        "that begin with NEW; * stands for one dotted part. The first rule that fits holds.",
    )
    reinit: tuple[str, ...] = Field(
        default=(),
        description="Patterns such as head.*: tensors of this model that init_from does not give "
        "and that begin with first values of their own.",
    )
    init_ignore: tuple[str, ...] = Field(
        default=(),
        description="Patterns such as layers.1?.*: tensors of init_from that are left behind.",
    )
    allow_changed: tuple[FunctionField, ...] = Field(
        default=(),
        description="Fields of the model section in which this run differs on purpose from what "
        "init_from was made with, such as [rope_theta] for longer sequences. Others are refused.",
    )
    init_upcycle: bool = Field(
        default=False,
        description="Where init_from has a dense feed-forward layer and this model experts, each expert "
        "begins as a copy of it, or with a smaller model.moe.intermediate_size as a part; routers begin fresh.",
    )
    every: NonNegative = Field(
        default=100, description="Steps between checkpoints; 0 is only at the end."
    )
    when_busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="When a save is due and the one before is still being written: training waits, or "
        "the save is left out. The last save and one on request always wait.",
    )
    file_bytes: Annotated[int, Field(ge=1, le=2**38)] = Field(
        default=2**30,
        description="Largest data file, but for a box that is larger; a worker writes two at a time.",
    )
    buffer_bytes: NonNegative = Field(
        default=0,
        description="Most host memory for a worker's copy of its share; 0 is as much as it needs. A "
        "larger share is copied and written piece by piece while training waits.",
    )
    bytes_per_s: NonNegative = Field(
        default=0,
        description="Most bytes a second that each worker writes, so the job writes as many times that as "
        "it has workers, and a node as many as it hosts; 0 is as many as the store takes.",
    )
    keep_last: Positive = Field(default=3, description="Newest checkpoints that are kept.")
    keep_every: NonNegative = Field(
        default=0,
        description="Checkpoints of steps that this divides are kept for ever; 0 is none.",
    )
    keep_best: NonNegative = Field(
        default=0,
        description="Checkpoints with the lowest validation loss (eval/loss) that are kept too.",
    )
