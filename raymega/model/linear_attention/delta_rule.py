"""States in their exact chunked form, and the convolution before them, on whole rows of documents.

Yang et al. 2024, Gated Delta Networks; Dao and Gu 2024, Mamba-2. A value head has a state M [K, V], 0 at the start of a document. A
token multiplies it by exp(decay), replaces what it holds at its key by a share beta of its value, M += k
beta (v - k M), and reads q M. Mamba-2 adds M += k v. A chunk of tokens does all of that by matrix products. No other rank takes part.
"""

from __future__ import annotations

from typing import NamedTuple

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
    q, k, v, decays = _by_chunk(q, k, v, decay, positions)
    beta = _chunks(beta.unsqueeze(-1))
    # a token's update depends on those before it in the chunk: solve for all of them
    system = k @ k.mT * decays.between * beta
    wanted = torch.cat((v * beta, k * beta * decays.read), dim=-1)
    fresh, known = torch.linalg.solve_triangular(
        system, wanted, upper=False, unitriangular=True
    ).split((v.shape[-1], k.shape[-1]), dim=-1)
    # from chunk to chunk
    inside = q @ k.mT * decays.between
    from_state, to_state = q * decays.read, (k * decays.kept).mT
    state = v.new_zeros(*fresh.shape[:3], k.shape[-1], v.shape[-1])
    found = []
    for number in range(fresh.shape[3]):
        update = fresh[:, :, :, number] - known[:, :, :, number] @ state
        found.append(from_state[:, :, :, number] @ state + inside[:, :, :, number] @ update)
        state = state * decays.carried[:, :, :, number] + to_state[:, :, :, number] @ update
    return _by_token(torch.stack(found, 3), num_tokens)


def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, positions: Tensor) -> Tensor:
    """Return what each token reads of states to which tokens add k v; arguments as :func:`gated_delta_rule`'s."""
    num_tokens = len(q)
    q, k, v, decays = _by_chunk(q, k, v, decay, positions)
    y = (q @ k.mT * decays.between) @ v
    from_state, added = q * decays.read, (k * decays.kept).mT @ v
    state, found = torch.zeros_like(added[:, :, :, 0]), []
    for number in range(added.shape[3]):
        found.append(from_state[:, :, :, number] @ state)
        state = state * decays.carried[:, :, :, number] + added[:, :, :, number]
    return _by_token(y + torch.stack(found, 3), num_tokens)


class _Decays(NamedTuple):
    """Decays of a chunk's tokens, 0 across borders of documents; dims are B, h, r, chunk, token.

    Attributes:
        between: Decays from a token to each of the chunk, [..., CHUNK, CHUNK].
        read: Decays from the state before the chunk to a token, [..., CHUNK, 1].
        kept: Decays from a token to the state behind the chunk, [..., CHUNK, 1].
        carried: Decays from the state before the chunk to the one behind it, [..., 1, 1].
    """

    between: Tensor
    read: Tensor
    kept: Tensor
    carried: Tensor


def _by_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, _Decays]:
    """Return queries, keys and values by chunk, [B, h, r or 1, N / CHUNK, CHUNK, features], and decays."""
    at = _chunks(positions[..., None, None, None])
    # which tokens of a chunk share a document with which, with the state before, with the last token
    place = torch.arange(CHUNK, device=q.device)
    back = place[:, None] - place
    is_seen, is_open = (back >= 0) & (back <= at), at > place[:, None]
    last = at[..., -1:, :]
    is_kept, is_carried = back[-1:].mT <= last, last >= CHUNK
    total = _chunks(decay.unsqueeze(-1)).cumsum(-2)
    decays = _Decays(
        between=(total - total.mT).masked_fill(~is_seen, float("-inf")).exp(),
        read=total.exp() * is_open,
        kept=(total[..., -1:, :] - total).exp() * is_kept,
        carried=total[..., -1:, :].exp() * is_carried,
    )
    return _chunks(q.unsqueeze(3)), _chunks(k.unsqueeze(3)), _chunks(v), decays


def _by_token(y: Tensor, num_tokens: int) -> Tensor:
    """Return y [B, h, r, N / CHUNK, CHUNK, V] by token, [N, B, h, r, V]."""
    return y.flatten(3, 4)[:, :, :, :num_tokens].permute(3, 0, 1, 2, 4)


def _chunks(x: Tensor) -> Tensor:
    """Return x [N, B, h, r, C] by chunk, [B, h, r, N / CHUNK, CHUNK, C], with zeros behind the last token."""
    padded = pad(x.permute(1, 2, 3, 0, 4), (0, 0, 0, -len(x) % CHUNK))
    return padded.unflatten(3, (-1, CHUNK))
