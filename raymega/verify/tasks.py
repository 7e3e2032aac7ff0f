"""Evaluation tasks of a verification: drawn requests, and the number that their scores are compared by.

Files and tokenizers play no part: what depends on a layout is the score of each target. The requests have the two forms
of all tasks: windows over a long text, and contexts of any length with a few targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

import numpy as np
import numpy.typing as npt

from raymega.config.schema import Job
from raymega.errors import ConfigError
from raymega.evaluate.plan import plan_beside
from raymega.evaluate.requests import Request
from raymega.evaluate.tasks.windows import windows
from raymega.plan.fp8_layers import depends_on_micro_batch_size
from raymega.plan.layers.family_parts import parts_of

Floats = npt.NDArray[np.float64]

TASK_SCORES = "eval_loss of tasks"
"""Name of the compared number."""
DRAWN = {"task": "perplexity", "path": "drawn"}
"""Entry of run.eval_tasks in a verified job; no file is read."""
GRIDS = ("tp=1", "tp=2", "pp=2", "dp=2", "cp=2", "dp=3", "tp=2,pp=2")
"""Grids of workers beside a run, the simplest first."""
NUM_CONTEXTS = 7
"""Number of short requests: odd, so that micro-batches have empty slots."""


def tasks_of(job: Job) -> tuple[dict[str, str], ...]:
    """Return ``run.eval_tasks`` of a verified job.

    There are none of encoders and of other heads, which score no next token, none where a score depends on the rows of its request, and none with fp8: workers beside a run multiply in
    its dtype, so they have other scores by design.
    """
    has_none = depends_on_micro_batch_size(job) or job.precision.fp8 != "none"
    family = parts_of(job.model)
    has_none |= job.model.head.is_on or not family.is_causal or family.is_encoder_decoder
    return () if has_none else (DRAWN,)


def is_beside(job: Job) -> bool:
    """Return whether workers beside the job's run evaluate its tasks."""
    return bool(job.run.eval_tasks) and job.run.eval_tasks_on == "beside"


@lru_cache(maxsize=8)
def legal_grids(job: Job) -> tuple[str, ...]:
    """Return the grids on which workers beside the run can evaluate its tasks."""
    return tuple(grid for grid in GRIDS if job.run.eval_tasks and _is_legal(job, grid))


def _is_legal(job: Job, grid: str) -> bool:
    run = job.run.model_copy(update={"eval_tasks_grid": grid})
    try:
        plan_beside(job.model_copy(update={"run": run}))
    except ConfigError:
        return False
    return True


def drawn_requests(*, seq_len: int, vocab_size: int) -> list[Request]:
    """Return windows over a text of 2S tokens, and short requests of any length, the same in every process."""
    random = Random("tasks")

    def tokens(number: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(number)]

    text = windows(tokens(2 * seq_len), seq_len=seq_len, stride=max(1, seq_len // 4))
    contexts = [tokens(random.randint(2, seq_len)) for _ in range(NUM_CONTEXTS)]
    return text + [
        Request(tokens=np.array(each), num_targets=random.randint(1, min(3, len(each) - 1)))
        for each in contexts
    ]


def compared_number(log_probs: Sequence[Floats]) -> float:
    """Return the mean of -log p over all targets, each weighed by its place, so that none can change places."""
    every = np.concatenate([*log_probs])
    weights = 1 + np.arange(len(every)) / len(every)
    return -float((every * weights).sum() / weights.sum())
