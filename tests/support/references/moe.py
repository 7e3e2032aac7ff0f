"""A layer of experts on one rank, token by token and expert by expert, from the papers' formulas.

Also here: whole weights, and a factory that cuts them for a rank.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch.nn import functional

from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel


def draw_weights(moe, *, width, ffn_hidden_size, is_gated=True, seed=0):
    """Every tensor of the layer ``moe``, large enough that no mistake hides in small numbers."""
    generator = torch.Generator().manual_seed(seed)
    E, D, F = (
        moe.num_experts,
        width,
        ffn_hidden_size if moe.intermediate_size == "ffn_hidden_size" else moe.intermediate_size,
    )
    # names and shapes as in raymega's table of tensors
    shapes = {"router.weight": (E, D), "experts.up.weight": (E, F, D)}
    shapes |= {"experts.down.weight": (E, D, F)}
    if is_gated:
        shapes["experts.gate.weight"] = (E, F, D)
    if moe.expert_bias:
        shapes["router.bias"] = (E,)
    if moe.load_balancing_type == "global":
        shapes["router.counts"] = (E,)
    if moe.shared_expert_intermediate_size:
        names = ("gate", "up") if is_gated else ("up",)
        shapes |= {
            f"shared.{name}.weight": (moe.shared_expert_intermediate_size, D) for name in names
        }
        shapes["shared.down.weight"] = (D, moe.shared_expert_intermediate_size)
    if moe.shared_expert_gate:
        shapes["shared_gate.weight"] = (1, D)
    drawn = {n: 0.5 * torch.randn(s, generator=generator).double() for n, s in shapes.items()}
    if moe.load_balancing_type == "global":
        drawn["router.counts"] = drawn["router.counts"].abs() * 100
    return drawn


@dataclass
class Factory:
    """Makes a rank's blocks of whole weights, as a ParameterFactory does."""

    weights: dict
    sp: SequenceParallel
    ep: tuple[int, int] = (1, 0)
    etp: tuple[int, int] = (1, 0)
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 7
    is_fused: bool = False
    fp8: None = None
    grad_queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    token_layout: dict = field(default_factory=dict)

    @property
    def tp(self):
        return self.sp.tp

    @property
    def table(self):
        return {f"moe.{name}": values for name, values in self.weights.items()}

    def make(self, *names):
        blocks = []
        for name in names:
            place = self.place(name.removeprefix("moe."))
            blocks.append(self.table[name][place].to(self.dtype))
        # gate and up of experts lie beside each other: [E, 2 F, D]
        dim = 1 if len(blocks) > 1 and blocks[0].dim() == 3 else 0
        param = torch.nn.Parameter(torch.cat(blocks, dim).contiguous())
        self.token_layout[id(param)] = [n.removeprefix("moe.") for n in names]
        return param

    def make_if_any(self, *names):
        return self.make(*names) if names[0] in self.table else None

    def make_adapters(self, _names, _weight, _place):
        return None

    def place(self, name):
        """Return the slices of the whole tensor that this rank holds."""
        shape = self.weights[name].shape
        cuts = {}
        # experts are cut by ep, their hidden width by etp; a shared expert by tp
        if name.startswith("experts."):
            cuts = {0: self.ep, (2 if ".down." in name else 1): self.etp}
        elif name.startswith("shared."):
            cuts = {1 if ".down." in name else 0: (self.tp.size, self.tp.index)}
        slices = [slice(None)] * len(shape)
        for dim, (size, index) in cuts.items():
            part = shape[dim] // size
            slices[dim] = slice(part * index, part * (index + 1))
        return tuple(slices)

    def gradients(self, module):
        """Return (name, block, gradient) of each tensor that has a gradient."""
        found = []
        for param in module.parameters():
            if param.grad is None:
                continue
            names = self.token_layout[id(param)]
            dim = 1 if len(names) > 1 and param.dim() == 3 else 0
            for name, grad in zip(names, param.grad.chunk(len(names), dim), strict=True):
                found.append((name, self.place(name), grad.clone()))
        return found


def layer(moe, weights, x, mask, *, noise=None):
    """Compute the layer on one micro-batch.

    Args:
        moe: The section.
        weights: Whole tensors.
        x: [S, B, D].
        mask: [S, B] bool, tokens that count.
        noise: [B * S, D] that the router's input is times, or None.

    Returns:
        Output [S, B, D]; the sum of the router's losses; what was chosen and kept.
    """
    S, B, _ = x.shape
    tokens, counted = x.transpose(0, 1).flatten(0, 1), mask.t().flatten().tolist()
    # 1. scores: what the router sees, and what it chooses by
    seen = tokens if noise is None else tokens * noise
    logits = seen @ weights["router.weight"].T
    scores = logits.softmax(1) if moe.router_score_function == "softmax" else torch.sigmoid(logits)
    choice = scores.detach()
    if moe.load_balancing_type == "sinkhorn":
        choice = _sinkhorn(logits.detach(), counted, moe.sinkhorn_rounds)
    if moe.expert_bias:
        choice = choice + weights["router.bias"].detach()
    # 2. choice and weights: top-k of each token, by plain loops
    chosen = [_choose(row, moe) for row in choice.tolist()]
    gates = torch.zeros_like(scores)
    for token, experts in enumerate(chosen):
        picked = scores[token, experts]
        if moe.norm_topk_prob:
            picked = picked / picked.sum()
        gates = gates.index_put(
            (torch.tensor([token]), torch.tensor(experts)), picked * moe.routed_scaling_factor
        )
    # 3. capacity: tokens that an expert has no room for are dropped
    kept = _keep(moe, chosen, gates.detach(), counted)
    # 4. experts: each on its tokens, weighted and added up
    y = torch.zeros_like(tokens)
    for expert in range(moe.num_experts):
        rows = [token for token in range(S * B) if expert in kept[token]]
        out = _expert(weights, expert, tokens[rows])
        y = y.index_add(0, torch.tensor(rows, dtype=torch.int64), gates[rows, expert, None] * out)
    y = y.unflatten(0, (B, S)).transpose(0, 1)
    if moe.shared_expert_intermediate_size:
        y = y + _shared(moe, weights, x)
    loss = _losses(moe, weights, logits, scores, chosen, counted, S)
    return y, loss, SimpleNamespace(chosen=chosen, kept=kept)


def _choose(row, moe):
    """The best experts of the best groups; of equals the lower."""
    size = moe.num_experts // moe.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(moe.n_group)]
    if moe.n_group > 1:
        take = 2 if moe.group_score == "top2" else 1
        worth = [sum(sorted((row[e] for e in group), reverse=True)[:take]) for group in groups]
        best = sorted(range(moe.n_group), key=lambda g: (-worth[g], g))[: moe.topk_group]
        groups = [groups[g] for g in best]
    open_ = [e for group in groups for e in group]
    return sorted(open_, key=lambda e: (-row[e], e))[: moe.top_k]


def _keep(moe, chosen, gates, counted):
    if not moe.capacity_factor:
        return chosen
    capacity = math.ceil(sum(counted) * moe.top_k * moe.capacity_factor / moe.num_experts)
    kept: list[list[int]] = [[] for _ in chosen]
    for expert in range(moe.num_experts):
        tokens = [t for t, experts in enumerate(chosen) if expert in experts]
        weight = gates[:, expert].tolist()
        # padding goes first, then the smallest weight or the latest position
        by_weight = moe.token_drop_policy == "probability"
        tokens.sort(key=lambda t: (not counted[t], -weight[t] if by_weight else 0, t))
        for token in tokens[:capacity]:
            kept[token].append(expert)
    return kept


def _expert(weights, expert, x):
    up = x @ weights["experts.up.weight"][expert].T
    if "experts.gate.weight" in weights:
        inner = functional.silu(x @ weights["experts.gate.weight"][expert].T) * up
    else:
        inner = functional.gelu(up, approximate="tanh")
    return inner @ weights["experts.down.weight"][expert].T


def _shared(moe, weights, x):
    up = x @ weights["shared.up.weight"].T
    inner = functional.gelu(up, approximate="tanh")
    if "shared.gate.weight" in weights:
        inner = functional.silu(x @ weights["shared.gate.weight"].T) * up
    y = inner @ weights["shared.down.weight"].T
    return y * torch.sigmoid(x @ weights["shared_gate.weight"].T) if moe.shared_expert_gate else y


def _losses(moe, weights, logits, scores, chosen, counted, row_length):
    """Sum the losses token by token, without a division by the number of tokens."""
    # probabilities, whatever the score function is
    shares = scores / scores.sum(1, keepdim=True)
    total = logits.new_zeros(())
    for token, is_counted in enumerate(counted):
        if not is_counted:
            continue
        total = total + moe.router_z_loss_coef * logits[token].logsumexp(0) ** 2
        load = _load(moe, weights, chosen, counted, token // row_length, row_length)
        if load is not None:
            balance = (load / load.sum() * shares[token]).sum()
            total = total + moe.router_aux_loss_coef * moe.num_experts * balance
    return total


def _load(moe, weights, chosen, counted, row, row_length):
    if moe.load_balancing_type == "global":
        return weights["router.counts"].detach()
    if moe.load_balancing_type not in ("micro_batch", "sequence"):
        return None
    load = torch.zeros(moe.num_experts, dtype=torch.float64)
    for token, experts in enumerate(chosen):
        is_same = moe.load_balancing_type == "micro_batch" or token // row_length == row
        if counted[token] and is_same:
            load[experts] += 1
    return load


def _sinkhorn(logits, counted, rounds):
    """Rows to sum 1, columns to equal sums, by the matrix itself."""
    counted = torch.tensor(counted)
    matrix, factors = logits.exp(), torch.ones(logits.shape[1], dtype=logits.dtype)
    for _ in range(rounds):
        scaled = matrix * factors
        scaled = scaled / scaled.sum(1, keepdim=True)
        factors = factors / scaled[counted].sum(0)
    return matrix * factors
