"""The section of the job file that says how weights are updated, and at which learning rates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import Decay, Fraction, NonNegative, Positive, PositiveFloat, Section

OwnRate = PositiveFloat | Literal["lr"]


class OptimizerSection(Section):
    """The update and its schedule."""

    name: Literal["adamw", "sgd", "lion", "muon"] = Field(
        default="adamw",
        description="adamw: decoupled weight decay. sgd: with momentum, and the decay in the "
        "gradient. lion: the sign of a moment. muon: matrices inside blocks by their momentum made "
        "orthogonal, everything else by adamw.",
    )

    lr: PositiveFloat = Field(description="Peak learning rate.")
    min_lr_ratio: Fraction = Field(
        default=0.1, description="Learning rate at the end of the decay, as a share of lr."
    )
    lr_warmup_steps: NonNegative = Field(
        default=0, description="Steps of linear growth from 0 to lr."
    )
    lr_schedule: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = Field(
        default="cosine",
        description="What follows the warm-up. wsd: stable at lr, then a linear decay over the last "
        "lr_cooldown_steps. inverse_sqrt: lr * sqrt(lr_warmup_steps / step), without an end.",
    )
    lr_decay_steps: Positive | Literal["steps"] = Field(
        default="steps",
        description="Step at which the schedule reaches its end; `steps` is run.steps.",
    )
    lr_cooldown_steps: NonNegative = Field(
        default=0, description="Steps of wsd's decay, the last ones before lr_decay_steps."
    )
    beta1: Decay = Field(
        default=0.9,
        description="Decay of the first moment; of lion the moment's share in the sign.",
    )
    beta2: Decay = Field(
        default=0.95, description="Decay of the second moment; of lion of its only one."
    )
    eps: PositiveFloat = Field(default=1e-8, description="Added to the root of the second moment.")
    momentum: Decay = Field(
        default=0.9, description="sgd and muon only: share of the last update kept."
    )
    newton_schulz_steps: Positive = Field(
        default=5, description="muon only: iterations that make a matrix orthogonal."
    )
    state_dtype: Literal["master", "bfloat16", "8bit"] = Field(
        default="master",
        description="How the state of matrices and tables is kept between steps: in the format of "
        "masters, in bfloat16, or in 8 bits and a scale for each 256 neighbours of a row. Norms and "
        "biases keep the masters' format.",
    )
    embedding_lr: OwnRate = Field(
        default="lr",
        description="Peak learning rate of token and position tables, which does not follow lr; `lr` "
        "is the same as lr.",
    )
    head_lr: OwnRate = Field(
        default="lr",
        description="The same for the head's own weight; a tied one is an embedding.",
    )
    norm_lr: OwnRate = Field(
        default="lr", description="The same for norms' weights and all biases."
    )
    layer_lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Each block's learning rate as a share of the one's above it; the last block has "
        "it of the head's, tables that of the first block.",
    )
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1, description="Weight decay of matrices; norms and biases have none."
    )
    is_embedding_decayed: bool = Field(
        default=True, description="Weight decay applies to token and position tables too."
    )
    max_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="Largest global gradient norm; 0 turns clipping off."
    )
