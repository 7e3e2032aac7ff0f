"""Weight gradients that are put off, or added where sums lie, are the ones that come by autograd."""

import pytest
import torch

from raymega.model.pipeline_stage import StageModule
from raymega.parallel.core.weight_grads import (
    ComputedTerm,
    DeferredGrad,
    WeightGradQueue,
    _RowSums,
    accumulate_bias_grad,
    run_deferred,
)
from tests.support.params import make_buffer
from tests.support.references.plain_models import draw_batch, make_model
from tests.support.stages import even_stages
from tests.unit.model.parts import make_stream


@pytest.fixture(params=["gpt2", "llama"])
def stage(request):
    model = make_model(request.param, vocab_size=128)
    return model, StageModule(
        model,
        even_stages(num_layers=model.num_layers, num_stages=1)[0],
        sp=make_stream(),
        dtype=torch.float64,
        device=torch.device("cpu"),
        seed=1,
    )


def _gradients(stage):
    found = {name: param.grad for name, param in stage.named_parameters()}
    stage.zero_grad()
    return found


def test_put_off_gradients_equal_those_that_come_at_once(stage):
    model, stage = stage
    batch = draw_batch(model)
    stage(*batch, None).backward()
    wanted = _gradients(stage)
    with stage.grad_queue.collecting() as owed:
        stage(*batch, None).backward()
    before = {name for name, param in stage.named_parameters() if param.grad is None}
    matrices = [name for name in wanted if wanted[name].dim() == 2 and "embedding" not in name]
    assert before == set(matrices), "linear layers put off, and nobody else"
    # The tied table has its gradient as an embedding at once, and as the head's weight later.
    assert len(owed) == len(matrices) + 1
    run_deferred(owed)
    for name, grad in _gradients(stage).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-13, atol=1e-13, msg=name)
    assert owed == []


def test_hooks_of_parameters_see_owed_gradients(stage):
    model, stage = stage
    seen = []
    for name, param in stage.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: seen.append(name) if param.grad is not None else None
        )
    with stage.grad_queue.collecting() as owed:
        stage(*draw_batch(model), None).backward()
    early = len(seen)
    run_deferred(owed)
    assert len(seen) > early
    assert set(seen) == {name for name, _ in stage.named_parameters()}


def test_closed_deferral_puts_nothing_off(stage):
    model, stage = stage
    with stage.grad_queue.collecting() as owed:
        pass
    stage(*draw_batch(model), None).backward()
    assert owed == [] and all(param.grad is not None for param in stage.parameters())


def test_a_held_gradient_comes_before_the_next_is_held_and_at_the_end():
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    queue = WeightGradQueue()
    for weight, value in zip(weights, (1.0, 2.0), strict=True):
        queue.hold(weight, ComputedTerm(lambda value=value: torch.full((1,), value)))
    assert weights[0].grad.tolist() == [1.0] and weights[1].grad is None
    for _ in range(2):
        queue.run_held()
        assert weights[1].grad.tolist() == [2.0]
    # an open queue defers
    with queue.collecting() as owed:
        queue.hold(weights[0], ComputedTerm(lambda: torch.ones(1)))
    assert [held.param for held in owed] == weights[:1]
    queue.run_held()
    assert weights[0].grad.tolist() == [1.0]
    # a hook reads the gradient in the backward itself
    weights[0].register_hook(lambda gradient: gradient)
    assert queue.hold(weights[0], ComputedTerm(lambda: torch.ones(1))).tolist() == [1.0]


def test_a_weight_that_is_used_twice_gets_one_gradient():
    weight = torch.zeros(2, requires_grad=True)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.tolist()))
    owed = [
        DeferredGrad(weight, ComputedTerm(lambda by=by: torch.full((2,), by))) for by in (1.0, 2.0)
    ]
    run_deferred(owed)
    assert seen == [[3.0, 3.0]] and owed == []


def _work(stage, batches, *, is_put_off):
    for batch in batches:
        if not is_put_off:
            stage(*batch, None).backward()
            continue
        with stage.grad_queue.collecting() as owed:
            stage(*batch, None).backward()
        run_deferred(owed)


@pytest.mark.parametrize("is_put_off", [False, True], ids=["at once", "put off"])
def test_sums_get_terms_where_they_lie_and_those_of_autograd(stage, is_put_off):
    model, stage = stage
    batches = [draw_batch(model, seed=seed) for seed in (1, 2)]
    _work(stage, batches, is_put_off=False)
    wanted = _gradients(stage)
    by_autograd = set()
    for name, param in stage.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: by_autograd.add(name) if param.grad is not None else None
        )
    buffer = make_buffer(list(stage.parameters()))
    for _ in range(2):
        buffer.zero()
        _work(stage, batches, is_put_off=is_put_off)
        buffer.finish()
        for name, param in stage.named_parameters():
            torch.testing.assert_close(
                buffer.view(param), wanted[name], rtol=1e-13, atol=1e-13, msg=name
            )
    matrices = {name for name in wanted if wanted[name].dim() == 2 and "positions" not in name}
    biases = {name.removesuffix("weight") + "bias" for name in matrices}
    assert by_autograd == wanted.keys() - matrices - biases


def test_a_hook_on_the_gradient_sees_it_and_sums_stay_as_they_are(stage):
    model, stage = stage
    params = dict(stage.named_parameters())
    buffer, batch, seen = make_buffer(list(params.values())), draw_batch(model), {}
    _work(stage, [batch], is_put_off=False)
    wanted = {name: buffer.view(param).clone() for name, param in params.items()}
    for name, param in params.items():
        param.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.clone()))
    buffer.zero()
    _work(stage, [batch], is_put_off=False)
    for name, param in params.items():
        for found in (seen[name], buffer.view(param)):
            torch.testing.assert_close(found, wanted[name], rtol=1e-13, atol=1e-13, msg=name)


def test_a_weight_of_two_uses_lets_its_bucket_leave_once(stage, monkeypatch):
    """The tied table adds as a head first and as an embedding last."""
    model, stage = stage
    buffer, left = make_buffer(list(stage.parameters()), bucket_bytes=1), []
    monkeypatch.setattr(buffer, "_leave", lambda bucket, _flat: left.append(bucket.index))
    buffer.launch_when_full()
    stage(*draw_batch(model), None).backward()
    assert len(left) == len(set(left)) == len(list(stage.parameters()))


@pytest.mark.parametrize("shape", [(4, 3), (5, 4, 3), (2, 5, 4, 3)], ids=str)
def test_sum_of_a_bias_runs_over_every_dim_but_the_last(shape):
    """One parameter has a sink and another none: both sums are those of einsum."""
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.einsum("...d->d", grad)
    torch.testing.assert_close(accumulate_bias_grad(bias, grad), wanted, rtol=1e-14, atol=1e-14)
    total = torch.full((3,), 7.0, dtype=torch.float64)
    for is_first, before in ((True, 0.0), (False, 1.0)):
        _RowSums(grad).add_to(total, is_first=is_first)
        torch.testing.assert_close(total, wanted * (1 + before), rtol=1e-14, atol=1e-14)
