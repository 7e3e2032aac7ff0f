"""Drawn tokens have the probabilities of the model, cut as transformers cuts them, and depend on their key alone."""

import numpy as np
import pytest
import torch

from raymega.config.encoder import NO_TOKEN
from raymega.parallel.tensor_parallel.token_choice import choose_tokens
from raymega.parallel.tensor_parallel.token_scores import top_tokens
from raymega.plan.sampling import Sampling
from tests.support.params import ALONE

LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.0, -1.0, -3.0], dtype=torch.float64)
IDS = torch.tensor([7, 3, 9, 70000, 0, 12])
NUM_DRAWS = 20000


def _draw(sampling, n=NUM_DRAWS, first=0):
    """A token for each of n prompts."""
    numbers = torch.arange(first, first + n)
    return choose_tokens(
        LOGITS.expand(n, -1), IDS.expand(n, -1), sampling,
        prompts=numbers, places=torch.zeros_like(numbers),
    )  # fmt: skip


def _wanted(temperature, kept):
    """Probabilities of the first ``kept`` tokens, by plain numpy."""
    weights = np.exp(LOGITS.numpy() / temperature)
    weights[kept:] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("sampling", "temperature", "kept"),
    [
        (Sampling(temperature=1.0), 1.0, 6),
        (Sampling(temperature=2.0), 2.0, 6),
        (Sampling(temperature=0.5), 0.5, 6),
        (Sampling(temperature=1.0, top_k=2), 1.0, 2),
        # shares 0.416, 0.252, 0.252, 0.056: the third token reaches 0.7, the fourth 0.95
        (Sampling(temperature=1.0, top_p=0.7), 1.0, 3),
        (Sampling(temperature=1.0, top_p=0.95), 1.0, 4),
        (Sampling(temperature=1.0, top_p=1e-9), 1.0, 1),
        # of two kept tokens the first has 0.62
        (Sampling(temperature=1.0, top_k=2, top_p=0.6), 1.0, 1),
        (Sampling(temperature=0.0, top_k=4), 1.0, 1),
    ],
)
def test_shares_are_the_models(sampling, temperature, kept):
    found = _draw(sampling)
    shares = np.array([(found == token).double().mean() for token in IDS])
    np.testing.assert_allclose(shares, _wanted(temperature, kept), atol=0.012)
    assert (shares[kept:] == 0).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=2, top_p=0.9)])
def test_logits_that_are_no_numbers_choose_no_token(sampling):
    """A NaN, which is sorted before all numbers, an Inf, or minus Inf alone; the other rows choose."""
    rows = torch.stack([LOGITS] * 4)
    rows[1, 2], rows[2, 5], rows[3] = torch.nan, torch.inf, -torch.inf
    logits, ids = top_tokens(rows[None], 6, ALONE.tp, num_rows=6)
    numbers = torch.arange(4)
    found = choose_tokens(logits[0], ids[0], sampling, prompts=numbers, places=numbers)
    assert found[0] >= 0 and found[1:].tolist() == [NO_TOKEN] * 3


def test_choice_depends_on_seed_prompt_place_and_token_alone():
    drawn = Sampling(temperature=3.0, seed=5)
    alone = torch.cat([_draw(drawn, n=1, first=number) for number in range(40)])
    assert (alone == _draw(drawn, n=40)).all()  # of a batch, each row by itself
    # another order of the candidates, as of equal logits, chooses the same
    order = torch.tensor([1, 0, 2, 5, 4, 3])
    numbers = torch.arange(40)
    shuffled = choose_tokens(
        LOGITS[order].expand(40, -1), IDS[order].expand(40, -1), drawn,
        prompts=numbers, places=torch.zeros_like(numbers),
    )  # fmt: skip
    assert (shuffled == alone).all()
    # each part of the key matters
    assert (_draw(drawn, n=40, first=40) != alone).any()
    assert (_draw(Sampling(temperature=3.0, seed=6), n=40) != alone).any()
    zeros = torch.zeros_like(numbers)
    later = choose_tokens(
        LOGITS.expand(40, -1), IDS.expand(40, -1), drawn, prompts=zeros, places=numbers
    )
    assert len(set(later.tolist())) > 1


@pytest.mark.wide
@pytest.mark.parametrize("top_k", [0, 5, 200])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 1.0])
def test_kept_tokens_are_those_of_transformers(top_k, top_p):
    from transformers.generation import logits_process as theirs

    rows = torch.randn(50, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = theirs.TemperatureLogitsWarper(0.7)(None, rows)
    if top_k:
        kept = theirs.TopKLogitsWarper(top_k)(None, kept)
    kept = theirs.TopPLogitsWarper(top_p)(None, kept).isfinite()
    logits, ids = rows.sort(dim=-1, descending=True)
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
    seen = torch.zeros_like(kept)
    for place in range(400):
        where = {"prompts": torch.arange(50), "places": torch.full((50,), place)}
        seen.scatter_(1, choose_tokens(logits, ids, sampling, **where)[:, None], True)
    assert not (seen & ~kept).any()
    if kept.sum(1).max() <= 6:  # few enough to be drawn all
        assert (seen | ~kept | (rows.softmax(-1) < 0.02)).all()
