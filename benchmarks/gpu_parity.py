"""Raymega's kernels on a GPU beside the same functions in float64 on the CPU: the largest error of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from raymega.config.schema import ModelSection, OptimizerSection
from raymega.model.attention.rope import Rope
from raymega.model.layers.fused_ops import bias_gelu, rms_norm, swiglu
from raymega.optim.updates import UpdateGroup, apply_adamw
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.attention_blocks import PLAIN, ScoreRules
from raymega.parallel.context_parallel.context import (
    Rows,
    make_token_layout,
    no_context,
    whole_rows,
)
from raymega.parallel.expert_parallel.grouped_gemm import (
    group_sizes,
    grouped_outer,
    grouped_product,
)
from raymega.parallel.tensor_parallel.cross_entropy import LossTerms, vocab_parallel_cross_entropy
from raymega.parallel.tensor_parallel.fp8_tensor import (
    FORWARD,
    largest,
    product,
    quantise,
    quantise_rows,
    scale_for,
)
from raymega.parallel.workarounds.matmul import add_outer

ALONE = Group(name="tp", ranks=(0,), index=0, timeout_s=60.0, handle=None)
VOCAB = 1024
Function = Callable[..., Any]


def errors(shape: int, device: torch.device) -> dict[str, float]:
    """Return the largest relative error of each function's outputs and gradients, inputs in bfloat16.

    Args:
        shape: Number of positions.
        device: Device that is compared with float64 on the CPU.
    """
    found = {}
    for name, function, inputs in _cases(shape):
        # inputs are bfloat16's values on both sides, so that only the arithmetic differs
        ours = _outputs(function, [_on(x, device, torch.bfloat16) for x in inputs])
        theirs = _outputs(function, [_on(x, torch.device("cpu"), torch.float64) for x in inputs])
        found[name] = max(map(_error, ours, theirs))
    return found


def _cases(S: int) -> Iterator[tuple[str, Function, list[Tensor]]]:
    """Yield names, functions of tensors, and their inputs; those of floats are rounded to bfloat16."""
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw).bfloat16()

    x, width, heads = normal(S, 1, 512), normal(512), normal(S, 1, 12, 64)
    labels = torch.randint(VOCAB, (S, 1), generator=draw)
    # uneven on purpose: experts rarely get equally many rows
    counts = torch.tensor([S // 2, S // 4, S // 4])
    # eager and compiled kernels of the same functions
    for is_fused in (False, True):
        end = " compiled" if is_fused else ""
        yield f"rms norm{end}", _norm(is_fused=is_fused), [x, width]
        yield f"swiglu{end}", _swiglu(is_fused=is_fused), [x]
        yield f"rotation and split{end}", _rotation(is_fused=is_fused), [heads]
        yield f"cross entropy{end}", _loss(is_fused=is_fused), [normal(S, 1, VOCAB), labels]
    yield "gelu with bias", _gelu, [x, width]
    yield (
        "attention of grouped heads",
        _attention,
        [heads[:, :, :8], heads[:, :, 8:10], heads[:, :, 10:]],
    )
    # pieces of the same input that no fused kernel of whole rows serves
    for name, lengths, rules in (
        ("attention in packed documents", (S // 2, S // 4 + 3, S // 4 - 3), PLAIN),
        ("attention with a window", (S,), ScoreRules(window=S // 8)),
        ("attention with capped scores", (S,), ScoreRules(softcap=20.0)),
    ):
        yield (
            name,
            _attention_in(lengths, rules),
            [heads[:, :, :8], heads[:, :, 8:10], heads[:, :, 10:]],
        )
    yield "fp8 product by rows compiled", _fp8(by_row=True, is_fused=True), [
        normal(S, 512), normal(256, 512)
    ]  # fmt: skip
    for by_row in (True, False):
        yield f"fp8 product {'by rows' if by_row else 'by tensors'}", _fp8(by_row=by_row), [
            normal(S, 512), normal(256, 512)
        ]  # fmt: skip
    yield "grouped product", _grouped, [normal(S, 256), normal(3, 256, 128), counts]
    yield "grouped weight gradient", _grouped_outer, [normal(S, 128), normal(S, 256), counts]
    yield "weight gradient in float32", _outer, [normal(S, 128), normal(S, 256)]
    yield "adamw", _adamw, [normal(4096), normal(4096)]


def _norm(*, is_fused: bool) -> Function:
    return lambda x, weight: rms_norm(x, weight, 1e-5, is_fused=is_fused and x.is_cuda)


def _swiglu(*, is_fused: bool) -> Function:
    return lambda x: swiglu(x, is_fused=is_fused and x.is_cuda)


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return the biased GELU, on a CPU by torch's own function: raymega's compiles anywhere."""
    return bias_gelu(x, bias) if x.is_cuda else gelu(x + bias, approximate="tanh")


def _rotation(*, is_fused: bool) -> Function:
    def turn(qkv: Tensor) -> Any:
        model = ModelSection(
            family="llama", num_layers=1, hidden_size=512, num_heads=8, ffn_hidden_size=512, vocab_size=VOCAB,
            max_positions=qkv.shape[0],
        )  # fmt: skip
        rope = Rope(model, dtype=qkv.dtype, device=qkv.device, is_fused=is_fused and qkv.is_cuda)
        return rope.split(qkv, None, sizes=(8, 2))

    return turn


def _loss(*, is_fused: bool) -> Function:
    terms = LossTerms(vocab_size=VOCAB - 3, z_loss=1e-3)

    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        # the loss overwrites its logits
        return vocab_parallel_cross_entropy(
            logits * 1.0,
            labels.clamp(max=VOCAB - 4),
            ALONE,
            terms,
            is_fused=is_fused and logits.is_cuda,
        )

    return lose


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, make_token_layout(whole_rows(q.shape[0], q.device), no_context()))


def _attention_in(lengths: tuple[int, ...], rules: ScoreRules) -> Function:
    """Return attention within documents of these lengths, under rules of its scores."""

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.cat([torch.arange(length) for length in lengths]).to(q.device)
        rows = Rows(positions[None], (lengths,))
        return attend(q, k, v, make_token_layout(rows, no_context()), rules=rules)

    return inside


def _fp8(*, by_row: bool, is_fused: bool = False) -> Function:
    """Return the product of two matrices rounded to fp8, without gradients."""

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.detach(), weight.detach()
        if is_fused:
            a, b = (quantise_rows(t, FORWARD, is_fused=True) for t in (x, weight))
            return product(a, b, x.dtype, is_fast=True)
        a, b = (
            quantise(t, scale_for(largest(t, by_row=by_row), FORWARD), FORWARD) for t in (x, weight)
        )
        return product(a, b, x.dtype)

    return multiply


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_product(rows, weight, group_sizes(rows, counts, inner=weight.shape[2]))


def _grouped_outer(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped_outer(grad, rows, group_sizes(rows, counts, inner=grad.shape[1]))


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """Return twice the outer product, added up in float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.empty(grad.shape[1], x.shape[1], dtype=wide, device=x.device)
    with torch.no_grad():
        add_outer(total, grad, x, is_first=True)
        add_outer(total, grad, x, is_first=False)
    return total


def _adamw(master: Tensor, gradient: Tensor) -> Tensor:
    """Return the masters after an update, in float32 or better."""
    wide = torch.promote_types(master.dtype, torch.float32)
    masters = master.detach().to(wide, copy=True)
    zeros = [[torch.zeros_like(masters)] for _ in range(2)]
    group = UpdateGroup(
        masters=[masters], gradients=[gradient.detach().to(wide, copy=True)], states=zeros,
        step=torch.ones((), device=master.device), lr=1e-2, weight_decay=0.1, divisor=None,
    )  # fmt: skip
    apply_adamw(group, OptimizerSection(lr=1e-2))
    return masters


def _outputs(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of the inputs under a fixed weighting, in float64."""
    for x in inputs:
        if x.is_floating_point():
            x.requires_grad_()
    made = function(*inputs)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    # weights that differ by element show gradients that are exchanged
    whole = sum((y.double() * _weights(y)).sum() for y in outputs if y.requires_grad)
    if isinstance(whole, Tensor):
        whole.backward()
    gradients = [x.grad for x in inputs if x.grad is not None]
    return [y.detach().double().cpu() for y in (*outputs, *gradients)]


def _weights(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)


def _on(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over the largest magnitude."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
