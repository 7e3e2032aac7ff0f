"""Blocks of attention: fused and written-out kernels agree, merged blocks are whole attention."""

import pytest
import torch

from raymega.parallel.context_parallel import attention_blocks, attention_work
from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.attention_blocks import (
    AttentionTile,
    Cpu,
    Flash,
    MathAttention,
    merge,
)
from raymega.parallel.context_parallel.context import Rows, make_token_layout, no_context
from tests.support.references import plain_models
from tests.support.tolerances import BFLOAT16_ROUNDING, FLOAT64_LAYER

B, H, S, K = 2, 4, 6, 8


def _draw(seed, heads, tokens=S, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, heads, tokens, K, generator=generator).to(dtype)


def _inputs(groups, dtype=torch.float64, keys=S):
    return _draw(0, H, dtype=dtype), *(_draw(i, groups, keys, dtype) for i in (1, 2))


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_kernel_for_cpus_is_the_written_out_softmax(groups, is_causal):
    q, k, v = _inputs(groups)
    fused, plain = (
        kernel.forward(q, k, v, is_causal=is_causal) for kernel in (Cpu, MathAttention())
    )
    grad = _draw(3, H)
    by_fused, by_plain = (
        kernel.backward(grad, q, k, v, plain, is_causal=is_causal)
        for kernel in (Cpu, MathAttention())
    )
    for found, wanted in zip((*fused, *by_fused), (*plain, *by_plain), strict=True):
        assert plain_models.difference(found, wanted) < FLOAT64_LAYER
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    MathAttention().forward(*leaves, is_causal=is_causal).out.backward(grad)
    for found, leaf in zip(by_plain, leaves, strict=True):
        assert plain_models.difference(found, leaf.grad) < FLOAT64_LAYER


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_merged_blocks_are_attention_over_all_keys(dtype):
    q, k, v = _inputs(H, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    total = AttentionTile(
        torch.zeros(B, H, S, K, dtype=wide), torch.full((B, H, S), -torch.inf, dtype=wide)
    )
    for keys in (slice(0, 1), slice(1, 4), slice(4, 6)):
        merge(total, Cpu.forward(q, k[:, :, keys], v[:, :, keys], is_causal=False))
    wanted = MathAttention().forward(*(t.double() for t in (q, k, v)), is_causal=False)
    limit = FLOAT64_LAYER if dtype == torch.float64 else BFLOAT16_ROUNDING
    assert total.out.dtype == wide
    assert all(plain_models.difference(a, b) < limit for a, b in zip(total, wanted, strict=True))


def test_row_without_keys_adds_nothing_and_two_stay_one():
    q, k, v = _inputs(H)
    wanted = MathAttention().forward(q, k, v, is_causal=False)
    blind = AttentionTile(wanted.out.clone(), wanted.log_sum_exp.clone())
    blind.out[:, :, 2], blind.log_sum_exp[:, :, 2] = 0.0, -torch.inf
    total = AttentionTile(wanted.out.clone(), wanted.log_sum_exp.clone())
    merge(total, blind)
    assert torch.equal(total.out[:, :, 2], wanted.out[:, :, 2])
    nothing = AttentionTile(blind.out.clone(), blind.log_sum_exp.clone())
    merge(nothing, blind)
    assert not nothing.out[:, :, 2].any() and (nothing.log_sum_exp[:, :, 2] == -torch.inf).all()
    assert nothing.out.isfinite().all()


class MockAten:
    """Stands in for torch's flash kernel of GPUs, whose backward reads log-sum-exps as if they were contiguous.

    torch's `_flash_attention_backward` makes output and its gradient contiguous, and hands the kernel the address of
    the log-sum-exps without their strides.
    """

    @staticmethod
    def _scaled_dot_product_flash_attention(q, k, v, _dropout, is_causal):
        return Cpu.forward(q, k, v, is_causal=is_causal)

    @staticmethod
    def _scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, log_sum_exp, _q, _k, _longest, _longest_k, _dropout, is_causal, *_state
    ):
        _, heads, tokens = log_sum_exp.shape
        read = log_sum_exp.as_strided(log_sum_exp.shape, (heads * tokens, tokens, 1))
        return Cpu.backward(grad, q, k, v, AttentionTile(out, read), is_causal=is_causal)


@pytest.mark.parametrize(
    "documents", [((3, 2, 1),), ((3, 3), (2, 4))], ids=["alike", "of-their-own"]
)
def test_gpus_kernel_gets_contiguous_log_sum_exps(documents, monkeypatch):
    found = {}
    for kernel in (Cpu, Flash):
        monkeypatch.setattr(attention_work, "kernel_for", lambda _q, kernel=kernel: kernel)
        monkeypatch.setattr(attention_blocks, "aten", MockAten)
        leaves = [_draw(i, H).permute(2, 0, 1, 3).contiguous().requires_grad_() for i in range(3)]
        places = make_token_layout(Rows(torch.arange(S)[None], documents), no_context())
        attend(*leaves, places).backward(_draw(3, H).permute(2, 0, 1, 3))
        found[kernel] = [leaf.grad for leaf in leaves]
    for ours, wanted in zip(found[Flash], found[Cpu], strict=True):
        assert plain_models.difference(ours, wanted) < FLOAT64_LAYER
