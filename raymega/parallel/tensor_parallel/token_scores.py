"""Log-probability of each token, and the likeliest tokens, from logits that are cut over the vocabulary.

Logits are never gathered: ranks exchange four numbers a token, or k candidates each. Nothing here is differentiable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raymega.parallel.comm.collectives import all_gather, all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.tensor_parallel.vocab_embedding import local_rows

MAX_PORTION = 2**24
"""Logits that are copied to float32 at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Scores of given tokens, equal on all tensor-parallel ranks.

    Attributes:
        log_probs: Log-probability of each token, [S, B] in max(fp32, dtype).
        is_greedy: True where the token is the likeliest one, of equally likely ones the first: [S, B].
    """

    log_probs: Tensor
    is_greedy: Tensor


def token_scores(logits: Tensor, labels: Tensor, tp: Group, *, num_rows: int) -> TokenScores:
    """Return the scores of ``labels`` under softmax(logits).

    Args:
        logits: Logits [S, B, columns] of this rank's part of the vocabulary, without padding; unchanged.
        labels: Tokens [S, B] int64.
        tp: Tensor-parallel ranks.
        num_rows: Columns of a rank with its padding, V/tp; this rank's tokens begin at its index times that.
    """
    wide, columns = torch.promote_types(logits.dtype, torch.float32), logits.shape[-1]
    # in portions: whole copies in float32 would be more than a training step has
    portions = logits.flatten(0, -2).split(max(1, MAX_PORTION // max(1, columns)))
    # first exchange: the largest logit of all ranks
    found = zip(*(_peak(each.to(wide)) for each in portions), strict=True)
    own_peak, own_best = (torch.cat(each).view_as(labels) for each in found)
    peak = all_reduce(own_peak.clone(), tp, op="max")
    # second exchange: sum of exponentials, and the label's logit, which one rank holds
    rows, is_elsewhere = local_rows(labels, num_rows, tp)
    aim = torch.zeros_like(peak)
    if columns:
        at = rows.clamp(max=columns - 1).unsqueeze(-1)
        aim = (logits.gather(-1, at).squeeze(-1).to(wide) - peak).masked_fill_(is_elsewhere, 0.0)
    peaks = peak.flatten().split(len(portions[0]) or 1)
    sums = [
        (each.to(wide) - top.unsqueeze(-1)).exp_().sum(-1)
        for each, top in zip(portions, peaks, strict=True)
    ]
    sum_exp, aim = all_reduce(torch.stack((torch.cat(sums).view_as(labels), aim)), tp)
    # third exchange: the first of the likeliest tokens; the largest negative number is the smallest id
    nowhere = torch.iinfo(torch.int64).min
    candidate = torch.where(own_peak == peak, -(own_best + num_rows * tp.index), nowhere)
    best = -all_reduce(candidate, tp, op="max")
    return TokenScores(log_probs=aim - sum_exp.log(), is_greedy=best == labels)


def top_tokens(logits: Tensor, k: int, tp: Group, *, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token and their ids, largest first; of equal ones the first id.

    Args:
        logits: Logits [S, B, columns] of this rank's part of the vocabulary, without padding.
        k: Number of tokens, at most the vocabulary's.
        tp: Tensor-parallel ranks.
        num_rows: Columns of a rank with its padding, V/tp.

    Returns:
        Logits in max(fp32, dtype) and ids int64, [S, B, k] each, equal on all ranks.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    shape = (*logits.shape[:-1], k)
    values = logits.new_full(shape, -torch.inf, dtype=wide)
    ids = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    # stable: equal logits keep the order of their ids
    found, columns = logits.to(wide).sort(dim=-1, descending=True, stable=True)
    num_found = min(k, found.shape[-1])
    values[..., :num_found] = found[..., :num_found]
    ids[..., :num_found] = columns[..., :num_found] + num_rows * tp.index
    # all ranks' candidates in the order of their ids, then the largest of them
    everyone = [all_gather(each.movedim(-1, 0).contiguous(), tp) for each in (values, ids)]
    candidates, names = (each.movedim(0, -1) for each in everyone)
    best, places = candidates.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], names.gather(-1, places[..., :k])


def _peak(real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each token and its first column; -inf and 0 on a rank with only padding."""
    if not real.shape[-1]:
        shape = real.shape[:-1]
        return real.new_full(shape, -torch.inf), torch.zeros(
            shape, dtype=torch.int64, device=real.device
        )
    peak = real.amax(-1)
    return peak, (real == peak.unsqueeze(-1)).view(torch.uint8).argmax(-1)
