"""Choice of the next token from logits, by random numbers that do not depend on the layout.

A token is drawn by the Gumbel-max rule: the largest logit after Gumbel noise is added to each. The noise of a token
is a function of its id, so a change of another token's logit, or of the order of equal ones, does not move it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raymega.config.encoder import NO_TOKEN
from raymega.parallel.core import rng
from raymega.plan.sampling import Sampling


def choose_tokens(
    logits: Tensor, ids: Tensor, sampling: Sampling, *, prompts: Tensor, places: Tensor
) -> Tensor:
    """Return the next token of each of n texts, int64 [n]; NO_TOKEN where the largest logit is no finite number.

    Args:
        logits: Logits [n, k] of the likeliest tokens, largest first: all tokens, or at least ``top_k``.
        ids: Tokens of these logits, [n, k] int64.
        sampling: Temperature, cuts and seed.
        prompts: Number of each text's prompt, [n] int64.
        places: Number of tokens that each text's answer has already, [n] int64.
    """
    # a NaN is sorted before all numbers
    is_known = logits[:, 0].isfinite()
    if sampling.temperature == 0:
        return ids[:, 0].where(is_known, NO_TOKEN)
    kept = logits.double() / sampling.temperature
    # top-k, then top-p of what is left: tokens before which less than the share lies
    if sampling.top_k:
        kept[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        probs = kept.softmax(-1)
        before = probs.cumsum(-1) - probs
        kept = kept.masked_fill(before >= sampling.top_p, -torch.inf)
    noise = _gumbel(ids, sampling.seed, prompts=prompts, places=places)
    chosen = ids.gather(-1, (kept + noise).argmax(-1, keepdim=True)).squeeze(-1)
    return chosen.where(is_known, NO_TOKEN)


def _gumbel(ids: Tensor, seed: int, *, prompts: Tensor, places: Tensor) -> Tensor:
    """Return Gumbel noise [n, k] of tokens ``ids`` [n, k], float64."""
    key = rng.key(seed, "generate", "tokens")
    where = (ids, places.unsqueeze(-1), prompts.unsqueeze(-1), torch.zeros_like(prompts)[:, None])
    counter = [each.to(torch.int64) & rng.MASK for each in torch.broadcast_tensors(*where)]
    uniform = rng.uniform((counter[0], counter[1], counter[2], counter[3]), key)
    return -(-uniform.log()).log()
