"""Gated delta rule in its exact chunked form, and the convolution before it, on whole rows of documents.

Yang et al. 2024, Gated Delta Networks. A value head has a state M [K, V], 0 at the start of a document. A
token multiplies it by exp(decay), replaces what it holds at its key by a share beta of its value, M += k
beta (v - k M), and reads q M. A chunk of tokens does all of that by matrix products. No other rank takes part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64
"""Number of tokens whose updates are solved together, as in the published kernels."""
NORM_EPS = 1e-6
"""Term added to the square of a query's or key's length."""


def convolve(x: Tensor, filters: Tensor, positions: Tensor) -> Tensor:
    """Return the causal convolution of each channel, which begins anew with each document.

    Args:
        x: Channels of the rows' tokens in order, [N, B, h, C].
        filters: Weights of the last tokens, the token's own last: [h, C, taps].
        positions: Position of each token in its document, [N, B] or [N, 1] int64.

    Returns:
        [N, B, h, C].
    """
    num_tokens, taps = len(x), filters.shape[-1]
    y = x * filters[..., -1]
    for back in range(1, min(taps, num_tokens)):
        earlier = pad(x[:-back], (0, 0, 0, 0, 0, 0, back, 0))
        is_same = (positions >= back).to(x.dtype)[..., None, None]
        y = y + earlier * is_same * filters[..., -1 - back]
    return y


def normalise(heads: Tensor) -> Tensor:
    """Return heads [..., K] of length 1."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_rule(  # the published rule's arguments
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, positions: Tensor
) -> Tensor:
    """Return what each token reads of its document's states.

    Args:
        q: Queries of the rows' tokens in order, [N, B, h, K], scaled.
        k: Keys of length 1, [N, B, h, K].
        v: Values, [N, B, h, r, V]; r value heads share a query and a key.
        decay: Logarithms of the states' decay, at most 0: [N, B, h, r].
        beta: Share of a key's content that a token replaces, [N, B, h, r].
        positions: Position of each token in its document, [N, B] or [N, 1] int64.

    Returns:
        [N, B, h, r, V].
    """
    num_tokens = len(q)
    # by chunk; dims are B, h, r, chunk, token, feature
    q, k = (_chunks(t.unsqueeze(3)) for t in (q, k))
    v, decay, beta = _chunks(v), _chunks(decay.unsqueeze(-1)), _chunks(beta.unsqueeze(-1))
    at = _chunks(positions[..., None, None, None])
    # which tokens of a chunk share a document with which, with the state before, with the last token
    place = torch.arange(CHUNK, device=q.device)
    back = place[:, None] - place
    is_seen, is_open = (back >= 0) & (back <= at), at > place[:, None]
    last = at[..., -1:, :]
    is_kept, is_carried = back[-1:].mT <= last, last >= CHUNK
    # decays from token to token, from the state to a token, from a token to the next state, over the chunk
    total = decay.cumsum(-2)
    between = (total - total.mT).masked_fill(~is_seen, float("-inf")).exp()
    read = total.exp() * is_open
    kept = (total[..., -1:, :] - total).exp() * is_kept
    carried = total[..., -1:, :].exp() * is_carried
    # a token's update depends on those before it in the chunk: solve for all of them
    system = k @ k.mT * between * beta
    wanted = torch.cat((v * beta, k * beta * read), dim=-1)
    fresh, known = torch.linalg.solve_triangular(
        system, wanted, upper=False, unitriangular=True
    ).split((v.shape[-1], k.shape[-1]), dim=-1)
    # from chunk to chunk
    inside, from_state, to_state = q @ k.mT * between, q * read, (k * kept).mT
    state = v.new_zeros(*fresh.shape[:3], k.shape[-1], v.shape[-1])
    found = []
    for number in range(fresh.shape[3]):
        update = fresh[:, :, :, number] - known[:, :, :, number] @ state
        found.append(from_state[:, :, :, number] @ state + inside[:, :, :, number] @ update)
        state = state * carried[:, :, :, number] + to_state[:, :, :, number] @ update
    y = torch.stack(found, 3).flatten(3, 4)[:, :, :, :num_tokens]
    return y.permute(3, 0, 1, 2, 4)


def _chunks(x: Tensor) -> Tensor:
    """Return x [N, B, h, r, C] by chunk, [B, h, r, N / CHUNK, CHUNK, C], with zeros behind the last token."""
    padded = pad(x.permute(1, 2, 3, 0, 4), (0, 0, 0, -len(x) % CHUNK))
    return padded.unflatten(3, (-1, CHUNK))
