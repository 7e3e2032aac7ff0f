"""The job file's preference section: the loss of pairs of a chosen and a rejected answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import PositiveFloat, Section

PreferenceLoss = Literal["none", "sigmoid", "ipo", "hinge", "orpo"]
REFERENCE_FREE = ("none", "orpo")
"""Losses that ask no reference for log-probabilities."""


class PreferenceSection(Section):
    """Training on pairs of a chosen and a rejected answer; fields as TRL's."""

    loss_type: PreferenceLoss = "none"
    """Loss of a pair. none: the loss of tokens. sigmoid: DPO (Rafailov et al. 2023). hinge: SLiC's margin on
    DPO's rewards. ipo: squared distance from a margin (Azar et al. 2023). orpo: odds ratio beside the loss of the
    chosen answer, without a reference (Hong et al. 2024)."""
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

    @property
    def is_on(self) -> bool:
        """True if the run trains on pairs."""
        return self.loss_type != "none"

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with a reference."""
        return self.loss_type not in REFERENCE_FREE
