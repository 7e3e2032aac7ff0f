"""Embeddings against transformers and sentence-transformers' MultipleNegativesRankingLoss, written in plain torch."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from raymega.checkpoint.load.init_from import start_faults
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.heads.section import HeadSection
from raymega.config.schema import CheckpointSection
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.native import write_weights
from raymega.data.samples import open_samples
from raymega.plan.layers.family_parts import score_pooling
from raymega.plan.tensor_table import model_tensors
from raymega.storage.registry import open_store
from tests.dist.model.test_heads import ROWS
from tests.support.ranks import run_grid
from tests.support.references import hf_heads, hf_models, plain_models
from tests.support.references.plain_training import (
    STEPS,
    TRAINING_LIMIT,
    adamw_of,
    clip_and_step,
    train_rank,
    training_plan,
    whole_weights,
)
from tests.unit.convert.folders import NOW

pytestmark = pytest.mark.dist

LLAMA, BERT = "llama", "bert"
LAST, FIRST = HeadSection(kind="embedding"), HeadSection(kind="embedding", pooling="first")
INNER = HeadSection(kind="embedding", pooling="mean", normalize=False, temperature=20.0)
CASES = [
    (LLAMA, LAST, "tp1", ()),
    (LLAMA, LAST, "tp2-pp2-sp", ()),
    (LLAMA, LAST, "dp3", ("parallel.sharding=parameters",)),
    (LLAMA, INNER, "cp2", ("memory.recompute=full",)),
    (LLAMA, LAST, "tp2-pp2", ("schedule.name=zb_h1",)),
    (BERT, LAST, "cp2", ("parallel.cp_method=all_gather",)),
    (BERT, FIRST, "tp2-sp-dp2", ()),
    (BERT, LAST, "dp3", ()),
]


def _imported(folder, kind, head):
    """Their network without a head, and the import of its model with ours."""
    if kind == LLAMA:
        model = hf_models.make_model("llama3")
        network = model.model
    else:
        model = network = hf_heads.make_headless()
    model.save_pretrained(folder / "theirs")
    (folder / "theirs" / "tokenizer.json").write_text("{}")
    done = hf_import(
        folder / "theirs", str(folder / "ours"), created=NOW, make_vocab_size_divisible_by=8
    )
    return network, done.uri, done.model.model_copy(update={"head": head})


def _states(network, row, model):
    """Pooled states of each document of a row, [D] each."""
    pooling, is_causal = score_pooling(model), model.family == LLAMA
    for (tokens, _, _), length in zip(
        hf_heads.documents(row, is_causal=is_causal), row.lengths, strict=False
    ):
        with hf_models.in_float64(network):
            states = network(input_ids=tokens[None]).last_hidden_state[0, :length]
        yield {"last": states[-1], "first": states[0], "mean": states.mean(0)}[pooling]


def _ranking_loss(states, head):
    """MultipleNegativesRankingLoss of anchors and positives: scale 1 / temperature, cos_sim or dot_score."""
    each = torch.stack(states)
    each = normalize(each, dim=1) if head.normalize else each
    scores = each[0::2] @ each[1::2].T * (1 / head.temperature)
    return cross_entropy(scores, torch.arange(len(scores)))


def _train_plainly(network, plan, model):
    named = [(name, param) for name, param in network.named_parameters() if param.requires_grad]
    optimizer, samples, curve = adamw_of(named, plan.job.optimizer), open_samples(plan.job), []
    size = plan.batch.global_batch_size
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = [samples.row(step * size + number) for number in range(size)]
        states = [each for row in rows for each in _states(network, row, model)]
        loss = _ranking_loss(states, model.head)
        loss.backward()
        curve.append((float(loss.detach()), clip_and_step(optimizer, plan, step)))
    return curve


def _plan(uri, model, layout, *options):
    return training_plan(model, layout, f"checkpoint.init_from={uri}", *ROWS, *options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "head", "layout", "options"), CASES)
def test_steps_are_those_of_the_published_loss(tmp_path, kind, head, layout, options):
    network, uri, model = _imported(tmp_path, kind, head)
    assert start_faults(CheckpointSection(init_from=uri), model) == []
    plan = _plan(uri, model, layout, *options)
    results = run_grid(train_rank, plan.grid, plan.to_json())
    curve = _train_plainly(network, _plan(uri, model, "tp1"), model)
    assert curve[0][1] > plan.job.optimizer.max_grad_norm, "the gradient is clipped"
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole, theirs = whole_weights(results), dict(network.named_parameters())
    name = {
        LLAMA: ("layers.1.mlp.down.weight", "layers.1.mlp.down_proj.weight"),
        BERT: ("layers.1.mlp.down.weight", "encoder.layer.1.output.dense.weight"),
    }[kind]
    ours = torch.from_numpy(whole[name[0]])
    assert plain_models.difference(ours, theirs[name[1]].detach()) < TRAINING_LIMIT


@pytest.mark.parametrize("kind", [LLAMA, BERT])
def test_export_is_a_model_without_a_head_and_says_how_it_is_pooled(tmp_path, kind):
    network, uri, model = _imported(tmp_path, kind, LAST)
    source = open_checkpoint(uri)
    write_weights(
        open_store(str(tmp_path / "trained")), model_tensors(model),
        lambda tensor: source.read(f"model/{tensor.name}"), dtype="float64",
        job={"model": model.model_dump(mode="json"), "checkpoint": {"init_from": uri}}, created=NOW,
    )  # fmt: skip
    hf_export(str(tmp_path / "trained"), tmp_path / "back")
    again = type(network).from_pretrained(
        tmp_path / "back", dtype="auto", attn_implementation="eager"
    )
    assert not [name for name in again.state_dict() if "pooler" in name and kind == LLAMA]
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad(), hf_models.in_float64(network), hf_models.in_float64(again):
        ours = again.eval()(input_ids=tokens).last_hidden_state
        wanted = network(input_ids=tokens).last_hidden_state
    assert plain_models.difference(ours, wanted) < 1e-13
    pooling = json.loads((tmp_path / "back" / "1_Pooling" / "config.json").read_text())
    mode = {LLAMA: "pooling_mode_lasttoken", BERT: "pooling_mode_mean_tokens"}[kind]
    assert [name for name, value in pooling.items() if value is True] == [mode]
    assert pooling["word_embedding_dimension"] == 48
    modules = json.loads((tmp_path / "back" / "modules.json").read_text())
    assert [each["path"] for each in modules] == ["", "1_Pooling", "2_Normalize"]
