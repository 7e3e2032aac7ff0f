"""The head on one rank: sums of masked losses, wide arithmetic, padding that counts nowhere."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from raymega.model.layers.lm_head import Head
from raymega.parallel.context_parallel.context import MicroBatch, whole_rows
from tests.support.references import plain_models
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import make_model_factory

MODEL = plain_models.make_model("llama", tie_word_embeddings=False)


def _head(dtype=torch.float64, model=MODEL):
    factory = make_model_factory(model, dtype=dtype)
    return Head(nn.Identity(), factory.make("head.weight"), model, factory)


def test_loss_is_the_sum_over_unmasked_tokens():
    head, (_, labels, mask) = _head(), plain_models.draw_batch(MODEL)
    x = torch.randn(7, 3, MODEL.hidden_size).double()
    kept = mask.bool()
    logits = (x @ head.weight[: MODEL.vocab_size].T).transpose(0, 1)
    wanted = cross_entropy(logits[kept], labels[kept], reduction="sum")
    assert plain_models.difference(head.loss_sum(x, labels, mask), wanted) < FLOAT64_LAYER


def test_smoothing_and_z_loss_are_of_training_only():
    model = MODEL.model_copy(update={"label_smoothing": 0.1, "z_loss": 1e-3})
    head, plain, (_, labels, mask) = _head(model=model), _head(), plain_models.draw_batch(MODEL)
    x = torch.randn(7, 3, MODEL.hidden_size).double()
    kept = mask.bool()
    logits = head(x).transpose(0, 1)[kept]
    wanted = cross_entropy(logits, labels[kept], reduction="sum", label_smoothing=0.1)
    wanted = wanted + 1e-3 * logits.logsumexp(-1).square().sum()
    assert plain_models.difference(head.loss_sum(x, labels, mask), wanted) < FLOAT64_LAYER
    head.eval()
    assert torch.equal(head.loss_sum(x, labels, mask), plain.loss_sum(x, labels, mask))


def _micro_batch(tokens, labels, mask):
    return MicroBatch(
        tokens=tokens, labels=labels, mask=mask.float(), num_counted=int(mask.sum()),
        samples=torch.arange(len(tokens)), rows=whole_rows(tokens.shape[1], tokens.device),
    )  # fmt: skip


@torch.no_grad()
def test_scores_are_those_of_the_whole_logits_where_a_label_counts_and_nothing_elsewhere():
    head, batch = _head(), _micro_batch(*plain_models.draw_batch(MODEL))
    x = torch.randn(7, 3, MODEL.hidden_size).double()
    log_probs = head(x).log_softmax(-1).transpose(0, 1)  # [B, S, V]
    labels, kept = batch.labels, batch.mask.bool()
    wanted = log_probs.gather(-1, labels.where(kept, 0)[..., None])[..., 0].where(kept, 0.0)
    scores = head.scores(x, batch)
    assert 0 < batch.num_counted < labels.numel() and scores.log_probs.shape == (7, 3)
    assert plain_models.difference(scores.log_probs.t(), wanted) < FLOAT64_LAYER
    assert torch.equal(scores.is_greedy.t(), (log_probs.argmax(-1) == labels) & kept)


@torch.no_grad()
def test_rows_without_a_label_have_no_scores_and_no_top_tokens():
    tokens, labels, mask = plain_models.draw_batch(MODEL)
    head, x = _head(), torch.randn(7, 3, MODEL.hidden_size).double()
    scores = head.scores(x, _micro_batch(tokens, labels, torch.zeros_like(mask)))
    assert not scores.log_probs.any() and not scores.is_greedy.any()
    assert [len(each) for each in head.top_tokens(x, mask > 1, 4)] == [0, 0]


@torch.no_grad()
def test_top_tokens_are_those_of_the_whole_logits_row_by_row():
    head, (_, _, mask) = _head(), plain_models.draw_batch(MODEL)
    x, asked = torch.randn(7, 3, MODEL.hidden_size).double(), mask.bool()
    wanted = head(x).transpose(0, 1)[asked].topk(4)
    values, ids = head.top_tokens(x, asked, 4)
    assert torch.equal(ids, wanted.indices)
    assert plain_models.difference(values, wanted.values) < FLOAT64_LAYER


def test_logits_of_a_wider_model_are_smaller_under_mup():
    base = MODEL.hidden_size // 4
    wide, plain = _head(model=MODEL.model_copy(update={"mup_base_width": base})), _head()
    x = torch.randn(7, 3, MODEL.hidden_size).double()
    assert torch.equal(4 * wide(x), plain(x))


def test_logits_have_no_column_of_padding():
    head = _head()
    assert head.weight.shape[0] == 56 and not head.weight[52:].any() and head.weight[51].all()
    assert head(torch.randn(7, 3, MODEL.hidden_size).double()).shape == (7, 3, 52)


@pytest.mark.parametrize("label", [-100, -1, 52, 55, 56, 2**40], ids=str)
def test_masked_slots_are_exactly_nothing(label):
    head = _head()
    x = torch.randn(7, 1, MODEL.hidden_size).double().requires_grad_()
    loss = head.loss_sum(x, torch.full((1, 7), label), torch.zeros(1, 7))
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any() and not head.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_loss_is_wide_and_gradients_are_of_the_compute_dtype(dtype):
    head, (_, labels, mask) = _head(dtype), plain_models.draw_batch(MODEL)
    x = torch.randn(7, 3, MODEL.hidden_size).to(dtype).requires_grad_()
    loss = head.loss_sum(x, labels, mask.float())
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert x.grad.dtype == dtype


def test_loss_stays_exact_with_huge_logits():
    """softmax of (1e4, 0, ...): a naive exponential would overflow even in float64."""
    head = _head()
    with torch.no_grad():
        head.weight.zero_()[3, 0] = 1e4
    x = torch.zeros(1, 1, MODEL.hidden_size).double()
    x[..., 0] = 1.0
    for label, wanted in [(3, 0.0), (4, 1e4)]:
        loss = head.loss_sum(x, torch.tensor([[label]]), torch.ones(1, 1))
        assert math.isclose(loss.item(), wanted)
