"""Products in narrow formats where the CPU has no instructions for them, and memory that is kept."""

import pytest
import torch

from raymega.parallel.context_parallel.attention import attend
from raymega.parallel.context_parallel.context import make_token_layout, no_context, whole_rows
from raymega.parallel.workarounds import matmul
from raymega.parallel.workarounds.matmul import add_outer, outer, product, project
from raymega.parallel.workarounds.output_cache import CpuOutputCache
from tests.support.references.plain_models import draw_batch, make_model
from tests.unit.model.parts import make_stage_modules, run_stages

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def _emulated(monkeypatch):
    monkeypatch.setattr(matmul, "_has_instructions", lambda _dtype: False)


def _draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@NARROW
@pytest.mark.usefixtures("_emulated")
def test_emulated_products_are_sums_in_float32_rounded_once(dtype):
    x, grad = _draw(6, 2, 32, dtype=dtype), _draw(6, 2, 24, dtype=dtype)
    weight, bias = _draw(24, 32, dtype=dtype), _draw(24, dtype=dtype)
    wanted = (x.float() @ weight.float().T + bias.float()).to(dtype)
    assert torch.equal(project(x, weight, bias), wanted)
    assert torch.equal(product(grad, weight), (grad.float() @ weight.float()).to(dtype))
    rows, columns = grad.flatten(0, -2), x.flatten(0, -2)
    sums = rows.float().T @ columns.float()
    assert torch.equal(outer(rows, columns), sums.to(dtype))
    total = torch.full_like(sums, torch.nan)
    add_outer(total, rows, columns, is_first=True)
    assert torch.equal(total, sums)
    add_outer(total, rows, columns, is_first=False)
    torch.testing.assert_close(total, 2 * sums)


@NARROW
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_on_a_gpu_are_added_to_float32_without_rounding(dtype):
    rows, columns = (_draw(64, n, dtype=dtype).cuda() for n in (24, 32))
    sums, total = rows.double().T @ columns.double(), torch.full((24, 32), torch.nan).cuda()
    for times in (1, 2, 3):
        add_outer(total, rows, columns, is_first=times == 1)
        torch.testing.assert_close(total.double(), times * sums, rtol=1e-5, atol=1e-5)


def test_wide_products_are_not_emulated():
    for dtype in (torch.float32, torch.float64):
        assert not matmul.is_emulated(_draw(2, dtype=dtype))
        total, rows = _draw(3, 4, dtype=dtype), _draw(5, 4, dtype=dtype)
        add_outer(total, rows[:, :3], rows, is_first=True)
        torch.testing.assert_close(total, rows[:, :3].T @ rows)


def test_large_results_lie_in_memory_that_comes_back(monkeypatch):
    monkeypatch.setattr(matmul, "LEAST_BYTES", 8 * 6 * 5)
    kept, x, weight, bias = CpuOutputCache(), _draw(3, 2, 4), _draw(5, 4), _draw(5)
    wanted = torch.nn.functional.linear(x, weight, bias)
    first = project(x, weight, bias, kept)
    second = project(x, weight, bias, kept)
    assert torch.equal(first, wanted) and torch.equal(second, wanted)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    view = first.view(-1)
    del first, second
    third = project(x, weight, None, kept)
    assert third.data_ptr() in places and third.data_ptr() != view.data_ptr()
    fourth = kept.empty((7,), torch.bfloat16)
    assert fourth.shape == (7,) and fourth.dtype == torch.bfloat16
    assert torch.equal(view.view_as(wanted), wanted)


def _attention(dtype, kv_heads):
    """Output and gradients of one rank's attention, and of torch's in float64 of the same numbers."""
    q = _draw(9, 2, 4, 8, dtype=dtype)
    k, v = (_draw(9, 2, kv_heads, 8, dtype=dtype) + shift for shift in (0, 1))
    places = make_token_layout(whole_rows(9, q.device), no_context())
    found = []
    for parts in ((q, k, v), (q.double(), k.double(), v.double())):
        leaves = [part.clone().requires_grad_() for part in parts]
        y = attend(*leaves, places)
        y.square().sum().backward()
        found.append((y.detach(), *(leaf.grad for leaf in leaves)))
    return zip(*found, strict=True)


@NARROW
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["own", "shared"])
def test_attention_in_emulated_formats_has_the_gradients_of_wide_ones(dtype, kv_heads):
    eps = torch.finfo(dtype).eps
    for narrow, wide in _attention(dtype, kv_heads):
        assert narrow.dtype == dtype
        assert (narrow.double() - wide).abs().max() <= 8 * eps * wide.abs().max()


def test_kept_logits_may_be_overwritten_by_the_loss(monkeypatch):
    monkeypatch.setattr(matmul, "LEAST_BYTES", 1)
    model = make_model("gpt2")
    (stage,) = make_stage_modules(model)
    batch, found = draw_batch(model), []
    for kept in (stage.head.kept, None):
        stage.head.kept = kept
        for _ in range(2):
            loss = run_stages([stage], batch)
            loss.backward()
            found.append((loss.detach(), stage.head.weight.grad))
            stage.zero_grad()
    assert stage.head.kept is None
    for loss, grad in found[1:]:
        assert torch.equal(loss, found[0][0]) and torch.equal(grad, found[0][1])
