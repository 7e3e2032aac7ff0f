"""Gated delta net written out token by token, a document at a time, on whole weights."""

import torch
from torch.nn.functional import conv1d, pad, silu, softplus


def recurrence(q, k, v, decay, beta):
    """Return what each token reads. q, k: [S, K], v: [S, V], decay and beta: [S] -> [S, V]."""
    state, found = q.new_zeros(q.shape[-1], v.shape[-1]), []
    for t in range(len(q)):
        state = decay[t].exp() * state
        state = state + torch.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        found.append(q[t] @ state)
    return torch.stack(found)


def _unit(heads):
    return heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def document(sizes, weights, x, eps):
    """Return a document's output: x [S, D] -> [S, D]; ``weights`` by the ends of their names."""
    num_keys, ratio = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads

    def channels(name):
        wide = pad((x @ weights[f"{name}.weight"].T).T[None], (sizes.conv_kernel_dim - 1, 0))
        kernel = weights[f"{name}_conv.weight"]
        return silu(conv1d(wide, kernel, groups=len(kernel))[0].T)

    q, k = (_unit(channels(name).unflatten(-1, (num_keys, -1))) for name in ("q", "k"))
    v = channels("v").unflatten(-1, (sizes.num_value_heads, -1))
    beta = (x @ weights["b.weight"].T).sigmoid()
    decay = -weights["A_log"].exp() * softplus(x @ weights["a.weight"].T + weights["dt_bias"])
    z = (x @ weights["z.weight"].T).unflatten(-1, (sizes.num_value_heads, -1))
    heads = []
    for head in range(sizes.num_value_heads):
        key = head // ratio
        scaled = q[:, key] * sizes.key_head_dim**-0.5
        y = recurrence(scaled, k[:, key], v[:, head], decay[:, head], beta[:, head])
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weights["norm.weight"]
        heads.append(y * silu(z[:, head]))
    return torch.cat(heads, -1) @ weights["out.weight"].T


def layer(model, weights, x, documents):
    """Return the layer's output: x [S, B, D] -> [S, B, D], with the lengths of each row's documents."""
    rows = documents if len(documents) > 1 else documents * x.shape[1]
    columns = []
    for row, lengths in enumerate(rows):
        parts = x[:, row].split(lengths)
        made = [document(model.linear_attention, weights, part, model.norm_eps) for part in parts]
        columns.append(torch.cat(made))
    return torch.stack(columns, 1)
