"""The job file's checkpoint section: where and when state is saved, limits of a save, retention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import NonNegative, NonNegativeFloat, Positive, Section

FunctionField = Literal[
    "family", "norm_eps", "rope_theta", "rope_scaling", "rope_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow", "rope_original_positions", "rope_mscale", "rope_mscale_all_dim", "moe.top_k", "moe.router_score_function",
    "moe.norm_topk_prob", "moe.routed_scaling_factor", "moe.n_group", "moe.topk_group", "moe.group_score",
    "moe.capacity_factor", "moe.token_drop_policy", "mup_base_width", "rope_truncate", "swiglu_alpha",
    "swiglu_limit", "moe.apply_probs_on_input", "attention.chunk_size", "attention.temperature_floor",
    "attention.temperature_scale", "attention.qk_norm",
    "attention.layer_types", "attention.sliding_window", "attention.score_scale", "attention.softcap",
    "attention.partial_rotary_factor", "attention.sliding_rope_theta", "multipliers.embedding",
    "multipliers.residual", "multipliers.logits_scaling", "multipliers.logit_softcap", "head.pooling",
    "linear_attention.time_step_min", "encoder_decoder.relative_attention_max_distance",
    "vision.activation", "vision.norm_eps", "vision.feature_layer", "vision.mrope_section", "vision.image_token_id", "vision.image_mean",
    "vision.image_std",
]  # fmt: skip
"""Fields of the model that change what it computes, but no tensor's shape."""


class CheckpointSection(Section):
    """Places and times of saves, limits of a save, and retention."""

    # Places.
    uri: str = Field(min_length=1, default_factory=lambda: str(Path.home() / ".raymega" / "runs"))
    """Root folder or s3://bucket/prefix; the run lives in `<uri>/<run.name>/`. Default:
    ~/.raymega/runs."""
    local_uri: str = "none"
    """Folder on each node's own disk for copies of its workers' files of the two newest
    checkpoints; a restart reads the intact ones from there. `none` keeps no copies."""
    # Start from another checkpoint's weights.
    init_from: str = "none"
    """Checkpoint whose weights, and nothing else, the run starts with: of another run or by
    `raymega convert hf-import`. Read at the first step, with model.lora in each restart; `none`
    initialises at random."""
    init_adapter: str = "none"
    """Checkpoint whose LoRA adapters the run starts with, beside init_from: of another run or by
    `raymega convert peft-import`. `none` starts new ones, which change nothing yet."""
    init_rename: tuple[str, ...] = ()
    """Rules OLD=NEW for init_from: its tensors whose names begin with OLD become this model's that
    begin with NEW; * stands for one dotted part. The first rule that matches applies."""
    reinit: tuple[str, ...] = ()
    """Patterns such as head.*: tensors of this model that are initialised at random instead of
    taken from init_from."""
    init_ignore: tuple[str, ...] = ()
    """Patterns such as layers.1?.*: tensors of init_from that are not used."""
    allow_changed: tuple[FunctionField, ...] = ()
    """Fields of the model section in which this run differs on purpose from that of init_from, such
    as [rope_theta] for longer sequences. Other differences are refused."""
    init_upcycle: bool = False
    """Start experts from the dense feed-forward layers of init_from: each as a copy of the layer, or as
    a part of it with a smaller model.moe.intermediate_size; routers are initialised at random."""
    # When to save, and what a save may use.
    every: NonNegative = 100
    """Steps between checkpoints; 0 saves at the end only."""
    when_busy: Literal["wait", "skip"] = "wait"
    """Reaction to a save that is due while the one before is still being written: wait for it, or skip.
    The last save and a save on request always wait."""
    file_bytes: Annotated[int, Field(ge=1, le=2**38)] = 2**30
    """Largest data file in bytes, unless one box is larger; a worker writes two at a time."""
    buffer_bytes: NonNegative = 0
    """Largest host memory in bytes for a worker's copy of its share; 0 is no limit. A larger share
    is copied and written in portions while training waits."""
    bytes_per_s: NonNegative = 0
    """Largest rate in bytes per second at which each worker writes; the rate of a job or node is
    this times its workers. 0 is no limit."""
    last_save_retry_s: NonNegativeFloat = 600.0
    """Seconds for which the last save of a run is tried again while the store refuses it. The state
    stays in memory, and no step is trained twice. Earlier saves are tried three times each."""
    # Retention: a checkpoint is kept when any of the three rules keeps it.
    keep_last: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Checkpoints of steps that this divides are never deleted; 0 turns the rule off."""
    keep_best: NonNegative = 0
    """Number of checkpoints with the lowest validation loss (eval/loss) to keep as well."""
