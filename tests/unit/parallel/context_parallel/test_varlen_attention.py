"""One kernel for packed documents: what it is handed, by a mock of torch's GPU kernel, and what falls back.

The mock checks the call and computes what the real kernel is documented to; no GPU is needed, and
nothing here says how the real one performs.
"""

import pytest
import torch

from raymega.parallel.context_parallel import attention, varlen_attention
from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.context import Rows, make_token_layout, no_context
from raymega.parallel.context_parallel.varlen_attention import has_one_kernel
from tests.support.references import plain_models
from tests.support.tolerances import FLOAT64_LAYER

B, H, K = 2, 4, 8
CASES = {"alike": ((5, 3, 4),), "of-their-own": ((5, 7), (2, 9, 1))}


class MockVarlen:
    """Stands in for torch.nn.attention.varlen.varlen_attn."""

    def __init__(self):
        self.calls = 0

    def __call__(self, q, k, v, ends, ends_k, longest, longest_k, *, window_size, enable_gqa):
        self.calls += 1
        assert ends is ends_k and ends.dtype == torch.int32 and longest == longest_k
        lengths = ends.diff().tolist()
        assert ends[0] == 0 and ends[-1] == q.shape[0] and max(lengths) == longest
        assert q.shape[0] == k.shape[0] == v.shape[0] and q.ndim == 3
        assert enable_gqa == (q.shape[1] > k.shape[1]) and window_size == (-1, 0)
        parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        return torch.cat([_dense(*part) for part in parts])


def _dense(q, k, v):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("shk,thk->hst", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
    return torch.einsum("hst,thk->shk", scores.softmax(-1), v)


def _attended(documents, groups):
    tokens = sum(documents[0])
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, B, heads, K) for heads in (H, groups, groups, H)]
    *leaves, grad = (torch.randn(s, generator=generator).double() for s in shapes)
    for leaf in leaves:
        leaf.requires_grad_()
    positions = torch.arange(tokens)[None]
    places = make_token_layout(Rows(positions, documents), no_context())
    out = attend(*leaves, places)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("groups", [H, 2])
@pytest.mark.parametrize("documents", CASES.values(), ids=CASES)
def test_mocked_kernel_is_called_once_and_equals_the_fallback(documents, groups, monkeypatch):
    wanted = _attended(documents, groups)
    mock = MockVarlen()
    monkeypatch.setattr(varlen_attention, "torch_kernel", lambda: mock)
    monkeypatch.setattr(attention, "has_one_kernel", lambda _q: True)
    found = _attended(documents, groups)
    assert mock.calls == 1
    for mine, theirs in zip(found, wanted, strict=True):
        assert plain_models.difference(mine, theirs) < FLOAT64_LAYER


def test_kernel_of_torch_2_11_is_handed_no_option_that_it_lacks(monkeypatch):
    mock, calls = MockVarlen(), []

    def older(q, k, v, ends, ends_k, longest, longest_k, *, window_size=(-1, -1)):
        calls.append(q.shape[1] > k.shape[1])
        sharing = {"enable_gqa": q.shape[1] > k.shape[1]}
        return mock(q, k, v, ends, ends_k, longest, longest_k, window_size=window_size, **sharing)

    wanted = _attended(CASES["alike"], 2)
    monkeypatch.setattr(varlen_attention, "torch_kernel", lambda: older)
    monkeypatch.setattr(attention, "has_one_kernel", lambda _q: True)
    found = _attended(CASES["alike"], 2)
    assert calls == [True]
    for mine, theirs in zip(found, wanted, strict=True):
        assert plain_models.difference(mine, theirs) < FLOAT64_LAYER


def test_cpu_wide_formats_and_odd_heads_fall_back():
    assert not has_one_kernel(torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16))
    assert varlen_attention.torch_kernel() is not None
    on_a_gpu = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="meta")
    assert has_one_kernel(on_a_gpu)
    assert not has_one_kernel(on_a_gpu.float())
    assert not has_one_kernel(torch.zeros(1, 1, 1, 12, dtype=torch.bfloat16, device="meta"))


def test_row_of_one_document_and_rows_over_ranks_have_no_ends():
    whole = make_token_layout(Rows(torch.arange(8)[None], ((8,),)), no_context())
    assert whole.ends is None and whole.is_whole
    packed = make_token_layout(Rows(torch.arange(8)[None], ((3, 5),)), no_context())
    assert packed.ends.tolist() == [0, 3, 8] and not packed.is_whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torchs_own_kernel_on_a_gpu_equals_dense_attention():
    documents = CASES["of-their-own"]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(12, B, h, 64, generator=generator).bfloat16() for h in (H, 2, 2))
    places = make_token_layout(Rows(torch.arange(12).cuda()[None], documents), no_context())
    found = attend(q.cuda(), k.cuda(), v.cuda(), places).cpu().double()
    wanted = attend(
        q.double(),
        k.double(),
        v.double(),
        make_token_layout(Rows(torch.arange(12)[None], documents), no_context()),
    )
    assert plain_models.difference(found, wanted) < 2e-2
