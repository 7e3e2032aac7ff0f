"""The job file's preference section: the loss of pairs of a chosen and a rejected answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import PositiveFloat, Section

PreferenceLoss = Literal["none", "sigmoid", "ipo", "hinge", "orpo", "kto", "bradley_terry"]
REFERENCE_FREE = ("none", "orpo", "bradley_terry")
"""Losses that ask no reference for log-probabilities."""


class PreferenceSection(Section):
    """Training on pairs of a chosen and a rejected answer; fields as TRL's."""

    loss_type: PreferenceLoss = "none"
    """Loss of a pair. none: the loss of tokens. sigmoid: DPO (Rafailov et al. 2023). hinge: SLiC's margin on
    DPO's rewards. ipo: squared distance from a margin (Azar et al. 2023). orpo: odds ratio beside the loss of the
    chosen answer, without a reference (Hong et al. 2024). kto: value of an answer that is desirable or not, beside
    the divergence on answers to other prompts (Ethayarajh et al. 2024). bradley_terry: -log sigmoid of the difference of two
    scores, for a reward model (model.head.kind=reward)."""
    beta: PositiveFloat = 0.1
    """Weight of the divergence from the reference; ORPO's weight of the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """sigmoid only: share of pairs that are taken to be labelled the wrong way round (conservative DPO)."""
    length_normalized: bool = False
    """sigmoid, ipo, hinge: log-probabilities of answers are means over their tokens instead of sums. TRL's ipo
    has them as means always; orpo has means by definition."""
    reference: Literal["base", "stored"] = "base"
    """Model whose log-probabilities the loss starts from. base: the frozen weights under the adapters, in a
    forward pass of their own in each step. stored: what `raymega data reference` has put beside the dataset."""

    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """bradley_terry only: difference that the chosen answer's score should exceed."""
    center_rewards_coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """bradley_terry only: weight of (chosen + rejected)^2, which keeps scores around 0; TRL's name."""

    desirable_weight: PositiveFloat = 1.0
    """kto only: weight of the losses of desirable answers."""
    undesirable_weight: PositiveFloat = 1.0
    """kto only: weight of the losses of undesirable answers."""

    @property
    def is_on(self) -> bool:
        """True if the run trains on pairs."""
        return self.loss_type != "none"

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with a reference."""
        return self.loss_type not in REFERENCE_FREE
