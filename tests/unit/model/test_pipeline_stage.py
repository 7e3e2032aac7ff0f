"""Stages: their parameters are the table's, any cut starts alike, chained they are the model."""

from collections import defaultdict

import pytest
import torch

from raymega.plan.tensor_table import model_tensors, stage_tensors
from tests.support.references import plain_models
from tests.support.stages import even_stages
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import make_group, make_stage_modules, make_stream, run_stages

MODELS = {
    "gpt2-tied": plain_models.make_model("gpt2"),
    "gpt2-untied": plain_models.make_model("gpt2", tie_word_embeddings=False),
    "llama-tied": plain_models.make_model("llama"),
    "llama-untied": plain_models.make_model("llama", tie_word_embeddings=False),
    "qwen3-kv2": plain_models.make_model("qwen3", num_kv_heads=2),
}
LAYOUTS = {f"tp{tp}-pp{pp}": (tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 3, 5)}
LAYOUTS = {name: at for name, at in LAYOUTS.items() if at not in ((8, 3), (4, 3), (4, 5), (2, 5))}
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
layouts = pytest.mark.parametrize(("tp", "pp"), LAYOUTS.values(), ids=LAYOUTS)


def _modules(model, tp, pp):
    """One list of stages per tensor-parallel rank."""
    streams = [make_stream(make_group(tp, i)) for i in range(tp)]
    return [make_stage_modules(model, num_stages=pp, sp=sp) for sp in streams]


@pytest.mark.sample(15)
@models
@layouts
def test_primary_pieces_tile_every_tensor_once(model, tp, pp):
    counts = {t.name: torch.zeros(t.shape, dtype=torch.int64) for t in model_tensors(model)}
    for modules in _modules(model, tp, pp):
        params = [param for module in modules for param in module.parameters()]
        for piece in (q for param in params for q in param.spec.pieces if q.is_primary):
            counts[piece.tensor.name][plain_models.slices(piece.box)] += 1
    assert [name for name, count in counts.items() if not (count == 1).all()] == []


def test_table_starts_alike_whatever_it_is_padded_to_and_padding_is_zero():
    model, tables = MODELS["llama-untied"], {}
    for multiple in (1, 8, 128):
        (module,) = make_stage_modules(
            model.model_copy(update={"make_vocab_size_divisible_by": multiple})
        )
        tables[multiple] = module.embedding.tokens.weight, module.head.weight
    for both in tables.values():
        for table, first in zip(both, tables[1], strict=True):
            assert torch.equal(table[: model.vocab_size], first) and first.all()
            assert not table[model.vocab_size :].any()


@pytest.mark.sample(15)
@models
@layouts
def test_parameters_of_a_stage_are_its_tensors(model, tp, pp):
    stages = even_stages(num_layers=model.num_layers, num_stages=pp)
    for modules in _modules(model, tp, pp):
        for module, stage in zip(modules, stages, strict=True):
            held = sorted(q.tensor.name for p in module.parameters() for q in p.spec.pieces)
            assert held == sorted(tensor.name for tensor in stage_tensors(model, stage))


@pytest.mark.sample(15)
@models
@layouts
def test_every_layout_starts_from_the_same_weights(model, tp, pp):
    whole = defaultdict(dict)
    for param in make_stage_modules(model)[0].parameters():
        for piece in param.spec.pieces:
            whole[piece.tensor.name] = param[plain_models.slices(piece.local)]
    for param in (p for ms in _modules(model, tp, pp) for m in ms for p in m.parameters()):
        for piece in param.spec.pieces:
            block = whole[piece.tensor.name][plain_models.slices(piece.box)]
            assert torch.equal(param[plain_models.slices(piece.local)], block), piece.tensor.name


@pytest.mark.parametrize("pp", [2, 3])
def test_tied_embedding_is_marked_on_both_ends_and_counts_on_the_first(pp):
    modules = make_stage_modules(MODELS["llama-tied"], num_stages=pp)
    tied = [[p.spec for p in module.parameters() if p.spec.is_tied] for module in modules]
    assert [len(specs) for specs in tied] == [1] + [0] * (pp - 2) + [1]
    assert tied[0][0].pieces[0].is_primary and not tied[-1][0].pieces[0].is_primary
    assert {specs[0].name for specs in (tied[0], tied[-1])} == {"embedding.tokens.weight"}


def test_tied_embedding_of_one_stage_is_one_parameter():
    (module,) = make_stage_modules(MODELS["llama-tied"])
    assert module.head.weight is module.embedding.tokens.weight
    assert not any(p.spec.is_tied for p in module.parameters())


@models
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_chained_stages_are_the_reference_model(model, pp):
    modules = make_stage_modules(model, num_stages=pp)
    params = [p for module in modules for p in module.parameters()]
    weights = plain_models.draw_weights(model_tensors(model))
    plain_models.fill(params, weights)
    batch = plain_models.draw_batch(model)
    loss = run_stages(modules, batch)
    loss.backward()
    wanted = plain_models.gradients(model, weights, batch)
    assert plain_models.difference(loss, wanted.pop("loss")) < FLOAT64_LAYER
    whole = plain_models.assemble(weights, plain_models.gradient_blocks(params))
    gaps = {name: plain_models.difference(whole[name], wanted[name]) for name in wanted}
    assert max(gaps.values()) < FLOAT64_LAYER, gaps


def test_logits_are_those_of_the_loss():
    model = MODELS["gpt2-tied"]
    (module,) = make_stage_modules(model)
    weights = plain_models.draw_weights(model_tensors(model))
    plain_models.fill(module.parameters(), weights)
    tokens, _, _ = plain_models.draw_batch(model)
    logits = module.logits(tokens, None).transpose(0, 1)
    assert (
        plain_models.difference(logits, plain_models.logits(model, weights, tokens)) < FLOAT64_LAYER
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@models
def test_narrow_dtypes_train_without_surprise(model, dtype):
    modules = make_stage_modules(model, num_stages=2, dtype=dtype)
    batch = plain_models.draw_batch(model)
    hidden = modules[0](*batch, None)
    loss = modules[1](*batch, hidden)
    loss.backward()
    assert hidden.dtype == dtype and loss.dtype == torch.float32
    for param in (p for module in modules for p in module.parameters()):
        assert param.dtype == param.grad.dtype == dtype
        assert param.grad.isfinite().all(), param.spec.name


def test_padding_changes_nothing():
    model = MODELS["llama-tied"]
    (module,) = make_stage_modules(model)
    tokens, labels, mask = plain_models.draw_batch(model)
    whole, real = (
        module(tokens, labels, mask, None),
        module(tokens[:-1], labels[:-1], mask[:-1], None),
    )
    assert plain_models.difference(whole, real) < FLOAT64_LAYER
