"""The job file's distillation section: a teacher whose next-token distribution the model learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import Positive, PositiveFloat, Section
from raymega.config.model import ModelSection

DistillationLoss = Literal["none", "forward_kl", "reverse_kl"]


class DistillationSection(Section):
    """Training on the distribution of a teacher, beside the labels (Hinton et al. 2015)."""

    loss_type: DistillationLoss = "none"
    """Divergence of a token. none: no teacher. forward_kl: KL(teacher || model), which covers all that the
    teacher finds likely. reverse_kl: KL(model || teacher), which avoids what it finds unlikely (MiniLLM, Gu et al.
    2024). It counts where a label counts, over the tokens of the vocabulary, without its padding."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share a of the divergence in the loss (1 - a) * cross entropy + a * temperature^2 * divergence."""
    temperature: PositiveFloat = 1.0
    """Divisor of both models' logits in the divergence. Its square keeps the size of the gradient."""
    teacher: Literal["live", "stored"] = "live"
    """Source of the teacher's logits. live: its frozen weights on the workers of the run, cut by the same grid, in a
    forward pass of their own before each step. stored: the largest ones of each token, which `raymega data
    teacher` has put beside the dataset."""
    teacher_checkpoint: str = "none"
    """Checkpoint of the teacher's weights, of any grid: of a run or by `raymega convert hf-import`. `none`, with
    a live teacher, draws them at random by run.seed + 1, for a trial."""
    teacher_model: ModelSection | Literal["same"] = "same"
    """Model section of the teacher, as `raymega checkpoint show` prints it; its vocabulary must be the model's.
    same: that of the model section, without adapters."""
    top_k: Positive = 64
    """stored only: number of logits of a token. The teacher's distribution is that of these tokens alone."""

    @property
    def is_on(self) -> bool:
        """True if the run learns from a teacher."""
        return self.loss_type != "none"

    @property
    def is_live(self) -> bool:
        """True if a teacher runs on the workers that train."""
        return self.is_on and self.teacher == "live"

    def model_of_teacher(self, model: ModelSection) -> ModelSection:
        """Return the model section of the teacher of a job with this ``model``, as it was written."""
        return model if self.teacher_model == "same" else self.teacher_model
