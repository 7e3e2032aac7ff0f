"""Passes without a backward that a run or a command makes: requests that are scored, and prompts that are continued."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raymega.evaluate.requests import make_request
from raymega.evaluate.worker import score_requests
from raymega.plan.batch import row_length
from raymega.plan.sampling import Sampling
from raymega.train.build_scorer import forward_of, scorer_of
from raymega.train.sampling import TokenGenerator

if TYPE_CHECKING:
    from raymega.train.build import TrainingComponents

NUM_ROWS = 8
"""Rows that are scored, and prompts that are continued."""
REQUEST_TOKENS, TARGETS = 1000, 999
TARGETS_OF_CUT_ROWS = 10
"""Fewer where ranks share a row: the checker's notes of all its tokens take gigabytes."""
PROMPT_TOKENS = 16
NEW_TOKENS = 2


def score_rows(parts: TrainingComponents) -> None:
    """Score requests with the weights of a rank, as `raymega eval` and a run's tasks do."""
    tokens = np.arange(REQUEST_TOKENS)
    seq_len = parts.plan.job.data.seq_len
    targets = TARGETS if parts.plan.grid.cp == 1 else TARGETS_OF_CUT_ROWS
    # requests that differ in their tokens: equal ones would share a place in a row
    requests = [make_request(tokens + n, targets, seq_len=seq_len) for n in range(NUM_ROWS)]
    scorer = scorer_of(parts, lambda: None)
    score_requests(parts.plan, scorer, parts.groups, requests, device=parts.device)


def continue_prompts(parts: TrainingComponents) -> None:
    """Continue prompts with the weights of a rank, as `raymega generate --grid` and a run's samples do."""
    # rows as long as a prompt and its answer, as a run's samples have them
    generator = TokenGenerator(
        parts.plan,
        forward_of(parts, lambda: None),
        parts.groups,
        context=parts.modules[0].context,
        device=parts.device,
        seq_len=row_length(PROMPT_TOKENS + NEW_TOKENS, parts.plan.job),
    )
    prompts = [[*range(1, PROMPT_TOKENS + 1)] for _ in range(NUM_ROWS)]
    generator.answers(
        prompts,
        Sampling(max_tokens=NEW_TOKENS),
        is_done=lambda _, tokens: len(tokens) >= NEW_TOKENS,
    )
