"""Gated delta nets and Mamba-2 written out token by token, a document at a time, on whole weights."""

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


def sums(q, k, v, decay):
    """Return what each token reads of sums; arguments as :func:`recurrence`'s."""
    state, found = q.new_zeros(q.shape[-1], v.shape[-1]), []
    for t in range(len(q)):
        state = decay[t].exp() * state + torch.outer(k[t], v[t])
        found.append(q[t] @ state)
    return torch.stack(found)


def _unit(heads):
    return heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _normal(y, eps):
    return y / (y.square().mean(-1, keepdim=True) + eps).sqrt()


def _project(x, weights, name):
    return x @ weights[f"{name}.weight"].T


def _channels(x, weights, name):
    kernel, bias = weights[f"{name}_conv.weight"], weights.get(f"{name}_conv.bias")
    wide = pad(_project(x, weights, name).T[None], (kernel.shape[-1] - 1, 0))
    return silu(conv1d(wide, kernel, bias, groups=len(kernel))[0].T)


def delta_net(model, weights, x):
    """Return a document's output of a gated delta net: x [S, D] -> [S, D]."""
    sizes, heads = model.linear_attention, []
    num_keys, ratio = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    q, k = (_unit(_channels(x, weights, name).unflatten(-1, (num_keys, -1))) for name in "qk")
    v, z = _channels(x, weights, "v"), _project(x, weights, "z")
    v, z = (t.unflatten(-1, (sizes.num_value_heads, -1)) for t in (v, z))
    beta = _project(x, weights, "b").sigmoid()
    step = softplus(_project(x, weights, "a") + weights["dt_bias"])
    decay = -weights["A_log"].exp() * step
    for head in range(sizes.num_value_heads):
        key, scale = head // ratio, sizes.key_head_dim**-0.5
        y = recurrence(scale * q[:, key], k[:, key], v[:, head], decay[:, head], beta[:, head])
        y = _normal(y, model.norm_eps) * weights["norm.weight"]
        heads.append(y * silu(z[:, head]))
    return _project(torch.cat(heads, -1), weights, "out")


def mamba(model, weights, x):
    """Return a document's output of Mamba-2: x [S, D] -> [S, D]."""
    sizes, found = model.linear_attention, []
    num_groups, ratio = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    k, q = (_channels(x, weights, name).unflatten(-1, (num_groups, -1)) for name in "BC")
    v = _channels(x, weights, "x").unflatten(-1, (sizes.num_value_heads, -1))
    step = softplus(_project(x, weights, "dt") + weights["dt_bias"])
    step = torch.where(step < sizes.time_step_min, sizes.time_step_min, step)
    gates = silu(_project(x, weights, "z")).chunk(num_groups, -1)
    for group, scale in enumerate(weights["norm.weight"].chunk(num_groups)):
        heads = []
        for head in range(group * ratio, (group + 1) * ratio):
            decay, value = -weights["A_log"][head].exp() * step[:, head], v[:, head]
            y = sums(q[:, group], k[:, group], step[:, head, None] * value, decay)
            heads.append(y + weights["D"][head] * value)
        found.append(_normal(torch.cat(heads, -1) * gates[group], model.norm_eps) * scale)
    return _project(torch.cat(found, -1), weights, "out")


def layer(document, model, weights, x, documents):
    """Return the layer's output: x [S, B, D] -> [S, B, D], with the lengths of each row's documents."""
    rows = documents if len(documents) > 1 else documents * x.shape[1]
    columns = []
    for row, lengths in enumerate(rows):
        made = [document(model, weights, part) for part in x[:, row].split(lengths)]
        columns.append(torch.cat(made))
    return torch.stack(columns, 1)
