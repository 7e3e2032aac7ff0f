"""The job file's optimizer section: the update of the weights, and its learning rates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import (
    Decay,
    Fraction,
    NonNegative,
    PluginName,
    Positive,
    PositiveFloat,
    Section,
)

OwnRate = PositiveFloat | Literal["lr"]


class OptimizerSection(Section):
    """The optimizer, its learning rates and their schedule."""

    # The update rule.
    name: Literal["adamw", "sgd", "lion", "muon"] | PluginName = "adamw"
    """adamw: Adam with decoupled weight decay. sgd: with momentum, and weight decay in the
    gradient. lion: the sign of a moment. muon: orthogonalised momentum for matrices inside blocks,
    adamw for everything else. A name with a dot is a plug-in's."""

    # Learning rate and its schedule.
    lr: PositiveFloat
    """Peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the end of the decay, as a share of lr."""
    lr_warmup_steps: NonNegative = 0
    """Steps of linear growth from 0 to lr."""
    lr_schedule: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] | PluginName = (
        "cosine"
    )
    """Schedule after the warm-up. wsd: stable at lr, then a linear decay over the last
    lr_cooldown_steps. inverse_sqrt: lr * sqrt(lr_warmup_steps / step), without an end. A name
    with a dot is a plug-in's."""
    lr_decay_steps: Positive | Literal["steps"] = "steps"
    """Step at which the schedule reaches its end; `steps` is run.steps."""
    lr_cooldown_steps: NonNegative = 0
    """Steps of wsd's decay, the last ones before lr_decay_steps."""
    # Constants of the update rules, and the format of their state.
    beta1: Decay = 0.9
    """Decay of the first moment; for lion the moment's share in the signed sum."""
    beta2: Decay = 0.95
    """Decay of the second moment; for lion that of its only moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    momentum: Decay = 0.9
    """sgd and muon only: share of the last update kept."""
    newton_schulz_steps: Positive = 5
    """muon only: iterations that make a matrix orthogonal."""
    state_dtype: Literal["master", "bfloat16", "8bit"] = "master"
    """Number format of the optimizer state of matrices and tables between steps: that of the
    masters, bfloat16, or 8 bits with a scale for each 256 neighbours of a row. The state of norms
    and biases keeps the masters' format."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay d of a moving average of the weights, kept with the masters: d * average + (1 - d) * weights after
    each update, from the first weights on. `raymega checkpoint merge --ema` writes it as a model. 0 keeps none."""
    # Learning rates of groups of tensors.
    embedding_lr: OwnRate = "lr"
    """Peak learning rate of token and position tables, independent of lr; `lr` is the same as lr."""
    head_lr: OwnRate = "lr"
    """Peak learning rate of the head's own weight, as for embedding_lr; a tied head counts as an
    embedding."""
    norm_lr: OwnRate = "lr"
    """Peak learning rate of norms' weights and all biases, as for embedding_lr."""
    layer_lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Ratio of each block's learning rate to that of the block above it. The last block's is this
    ratio of the head's, and tables have that of the first block."""
    # Weight decay and clipping.
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Weight decay of matrices; norms and biases have none."""
    is_embedding_decayed: bool = True
    """Apply weight decay to token and position tables too."""
    max_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
