"""Fused kernels compute what the layers do without them: losses, gradients, what is kept, what waits."""

from contextlib import nullcontext

import pytest
import torch

from raymega.config.schema import MemorySection
from raymega.model.layers import fused_ops
from raymega.model.layers.fused_ops import bias_gelu, rms_norm
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.core import compile
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.core.weight_grads import run_deferred
from tests.support.references.plain_models import draw_batch, make_model
from tests.support.saved_tensor_bytes import SavedBytes
from tests.support.stages import even_stages
from tests.unit.model.parts import CPU, make_stream

ROUNDING = 1e-12
# a text: looked at when such a test begins, not when tests are collected
needs_compiler = pytest.mark.skipif(
    "not compile.can_fuse(CPU)", reason="torch.compile finds no C++ compiler on this machine"
)


def _stage(model, *, is_fused):
    return StageModule(
        model,
        even_stages(num_layers=model.num_layers, num_stages=1)[0],
        sp=make_stream(),
        dtype=torch.float64,
        device=CPU,
        seed=1,
        is_fused=is_fused,
    )


def _work(stage, batch, *, is_put_off=False):
    """Loss and gradients by name, of one micro-batch."""
    loss = stage(*batch, None)
    with stage.grad_queue.collecting() if is_put_off else nullcontext([]) as owed:
        loss.backward()
    assert bool(owed) == is_put_off
    run_deferred(owed)
    found = {name: param.grad for name, param in stage.named_parameters()}
    stage.zero_grad()
    return {"loss": loss.detach(), **found}


def _assert_equal(found, wanted):
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=ROUNDING, atol=ROUNDING, msg=name)


MEMORY = (
    MemorySection(),
    MemorySection(recompute="selective", recompute_parts=("attention", "activation", "norm")),
    MemorySection(recompute="full"),
)


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_fused_layers_equal_those_that_are_not(family):
    torch._dynamo.reset()
    model = make_model(family)
    fused, plain = (_stage(model, is_fused=is_fused) for is_fused in (True, False))
    batch = draw_batch(model)
    wanted = _work(plain, batch)
    for memory in MEMORY:
        fused.recompute(memory)
        _assert_equal(_work(fused, batch), wanted)
    _assert_equal(_work(fused, batch, is_put_off=True), wanted)
    longer = draw_batch(model, batch=2, seq=11)
    _assert_equal(_work(fused, longer), _work(plain, longer))
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fused_layers_keep_no_more_for_backward(family):
    model = make_model(family)
    kept = []
    for is_fused in (True, False):
        stage, batch = _stage(model, is_fused=is_fused), draw_batch(model)
        with SavedBytes(known=(*stage.parameters(), *stage.buffers(), *batch)) as saved:
            stage(*batch, None)
        kept.append(saved.total)
    assert kept[0] <= kept[1]


def test_without_a_compiler_layers_are_not_fused_and_the_log_says_so_once(monkeypatch, caplog):
    def refuse(_function):
        raise RuntimeError("no working C++ compiler\nmore")

    monkeypatch.setattr(compile, "_compiled", refuse)
    compile._obstacle.cache_clear()
    try:
        assert not compile.can_fuse(CPU) and not compile.can_fuse(CPU)
    finally:
        compile._obstacle.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are not compiled but run one by one: no working C++ compiler"
    ]


@needs_compiler
def test_failure_empties_the_folder_of_compiled_kernels_which_may_be_torn(tmp_path, monkeypatch):
    folder = tmp_path / "raymega"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "torn.so").write_bytes(b"half a file")
    (tmp_path / "anothers.so").touch()
    monkeypatch.setattr(compile, "_own_folder", lambda: folder)

    def fails(x):
        return x.exp() @ x

    with pytest.raises(Exception, match="same reduction dim"):
        compile.fused(fails, is_on=True)(torch.zeros(3, 8))
    assert [path.name for path in tmp_path.iterdir()] == ["anothers.so"]


def test_compiled_kernels_are_kept_in_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(2):  # the second time as a child of the process finds it
        assert compile._own_folder.__wrapped__() == tmp_path / "raymega"


class _Sum:
    """What a run sums gradients in, of one parameter."""

    def __init__(self, param):
        self.total = torch.empty(param.shape, dtype=torch.float32)
        param.grad_sink = self

    def place(self, _param):
        return self.total, True


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_fused", [False, pytest.param(True, marks=needs_compiler)])
def test_norm_whose_gradient_float16_cannot_hold_adds_it_whole(is_fused):
    weight = ShardedParameter(torch.ones(8, dtype=torch.float16), None)
    added = _Sum(weight)
    x = torch.ones(4096, 8, dtype=torch.float16, requires_grad=True)
    rms_norm(x, weight, 1e-6, is_fused=is_fused).backward(torch.full_like(x, 64))
    assert added.total.allclose(torch.tensor(64.0 * 4096), rtol=1e-3)
    assert weight.grad is None and x.grad.isfinite().all()


@pytest.mark.parametrize("heads", [(), (3,)], ids=["flat", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_norm_of_gpus_has_the_values_and_the_wide_weight_gradient_of_cpus(heads, dtype):
    x, grad = torch.randn(2, 5, 7, *heads, 8, dtype=torch.float64).to(dtype)
    weight = torch.randn(*heads, 8, dtype=torch.float64).to(dtype)
    y, inverse = fused_ops._rms_norm_of_torch(x, weight, 1e-6)
    wanted, wanted_inverse = fused_ops._rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(inverse, wanted_inverse)
    # small whole numbers, so that their sums are exact in any order: a sum in 8 bits of fraction is not
    x, grad = ((8 * values).round() for values in (x, grad))
    scales = torch.full_like(inverse, 0.5)
    _, wide = fused_ops._rms_norm_gradients(grad, x, weight, scales)
    found = fused_ops.weight_gradient(grad, x, weight, scales)
    assert found.dtype == torch.promote_types(dtype, torch.float32) and torch.equal(found, wide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", [(), (3,)], ids=["flat", "heads"])
def test_norm_on_a_gpu_has_the_gradients_of_a_cpu(heads):
    x, grad = torch.randn(2, 5, 7, *heads, 8, dtype=torch.float64)
    weight = torch.randn(*heads, 8, dtype=torch.float64)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device, copy=True).requires_grad_() for t in (x, weight)]
        rms_norm(*leaves, 1e-6).backward(grad.to(device))
        found.append([t.grad.cpu() for t in leaves])
    torch.testing.assert_close(*found)


@pytest.mark.wide
@needs_compiler
def test_bias_whose_gradient_float16_cannot_hold_adds_it_whole():
    bias = ShardedParameter(torch.zeros(8, dtype=torch.float16), None)
    added = _Sum(bias)
    x = torch.zeros(4096, 8, dtype=torch.float16, requires_grad=True)
    bias_gelu(x, bias).backward(torch.full_like(x, 64))
    assert added.total.allclose(torch.tensor(32.0 * 4096), rtol=1e-3)
    assert bias.grad is None
