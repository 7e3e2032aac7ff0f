"""Names the losses that read more of a micro-batch than its labels."""

from __future__ import annotations

from raymega.model.distillation import DistillationObjective
from raymega.model.heads.objective import ScoreObjective
from raymega.model.preference import PairObjective

Objective = PairObjective | ScoreObjective | DistillationObjective
"""Loss of a last stage that is not that of tokens alone."""
