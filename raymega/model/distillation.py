"""Loss of next tokens beside the divergence from a teacher, on a last stage.

Both are sums over tokens, so ranks that hold parts of the tokens need nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raymega.config.distillation.section import DistillationSection
from raymega.model.layers.lm_head import Head
from raymega.model.preference import STATISTICS
from raymega.parallel.context_parallel.context import Context, TeacherBatch
from raymega.parallel.tensor_parallel.divergence import (
    DivergenceTerms,
    divergence_from_top,
    vocab_parallel_divergence,
)

DISTILLED = ("divergence", "cross_entropy")
"""Means over labels that are reported beside the loss, in the first places of the statistics."""


class DistillationObjective:
    """Loss of labels and of a teacher's distribution, and the statistics of a step's micro-batches.

    Attributes:
        sums: Sums of DISTILLED since they were taken, with zeros behind them, float64.
    """

    def __init__(
        self,
        section: DistillationSection,
        vocab_size: int,
        device: torch.device,
        columns_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the job's section, and a live teacher's function from residual streams to logits."""
        self.section, self._columns_of = section, columns_of
        self.terms = DivergenceTerms(
            vocab_size=vocab_size,
            temperature=section.temperature,
            is_reverse=section.loss_type == "reverse_kl",
        )
        self.sums = torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)

    def stage_loss(  # what a last stage has
        self,
        head: object,
        x: Tensor,
        targets: tuple[Tensor, Tensor],
        teacher: object,
        _context: Context,
    ) -> Tensor:
        """Return the sum over labels that count of (1 - a) * cross entropy + a * T^2 * divergence.

        Args:
            head: Head of the stage.
            x: Residual stream, [S/sp, B, D].
            targets: Labels and loss mask, [B, S/cp] each.
            teacher: Residual stream of a live teacher, or stored logits.
        """
        labels, mask = targets
        assert isinstance(teacher, TeacherBatch), "a step's micro-batches have it before its passes"
        assert isinstance(head, Head), "the divergence is over a vocabulary"
        columns = head.columns(x)
        # cross entropy overwrites the logits, so the divergence reads them first
        divergence = self._divergence(columns, teacher, head)
        losses = head.losses_of(columns, labels)
        # sums over labels: the step divides by their number in the whole batch
        counted = mask.t().to(losses.dtype)
        sums = torch.stack(((divergence * counted).sum(), (losses * counted).sum()))
        self.sums = self.sums + torch.nn.functional.pad(
            sums.detach().double(), (0, len(self.sums) - len(sums))
        )
        share = self.section.weight
        return share * self.terms.temperature**2 * sums[0] + (1 - share) * sums[1]

    def _divergence(self, columns: Tensor, teacher: TeacherBatch, head: Head) -> Tensor:
        """Return the divergence of each token, [S, B]."""
        if teacher.ids is not None and teacher.logits is not None:
            ids, top = (each.transpose(0, 1) for each in (teacher.ids, teacher.logits))
            return divergence_from_top(columns, ids, top, head.sp.tp, self.terms)
        assert self._columns_of is not None, "a live teacher has its head where the model has its"
        assert teacher.hidden is not None, "its pass before the step has left it here"
        of_teacher = self._columns_of(teacher.hidden)
        return vocab_parallel_divergence(columns, of_teacher, head.sp.tp, self.terms)

    def take_sums(self) -> Tensor:
        """Return and reset the sums of the statistics."""
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken
