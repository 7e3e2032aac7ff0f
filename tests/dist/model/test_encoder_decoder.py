"""Transformers' T5 as the outside witness of encoder-decoder models: logits, training steps, and the way back."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.parallel import ParallelSection
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.huggingface.names import hf_tensors
from raymega.data.samples import open_samples
from raymega.errors import ConfigError
from raymega.generate.prompts import Prompts
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import (
    MicroBatch,
    Rows,
    held_positions,
    make_context,
)
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.sampling import Sampling
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.dist.model.test_hugging_face import _blocks
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references import hf_t5, plain_models
from tests.support.references.imported import imported
from tests.support.references.plain_training import (
    LOGITS_LIMIT,
    STEPS,
    TRAINING_LIMIT,
    adamw_of,
    clip_and_step,
    train_rank,
    whole_weights,
)
from tests.unit.model.parts import make_stage_modules

pytestmark = pytest.mark.dist

NOW = "2025-01-01T00:00:00+00:00"
SOURCE, TARGET = 40, 16


@pytest.fixture(params=hf_t5.KINDS)
def kind(request):
    return request.param


def _with_target(model, length):
    sides = model.encoder_decoder.model_copy(update={"decoder_seq_len": length})
    return model.model_copy(update={"encoder_decoder": sides})


def _inputs():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, 259, (3, SOURCE + TARGET), generator=generator)


def _outputs(env, model, uri, num_stages, is_cut):
    """This rank's logits [B, T/cp, V/tp] and their places in the target; the process holds all stages."""
    groups = env.groups
    sp = SequenceParallel(tp=groups.tp, is_sequence_parallel=is_cut)
    experts = ExpertGroups(ep=groups.ep, etp=groups.etp, micro=groups.micro, sp=sp)
    parallel = ParallelSection(cp=groups.cp.size, cp_method="all_gather")
    context = make_context(groups, parallel, CommLog())
    model = _with_target(model, TARGET)
    modules = make_stage_modules(
        model, num_stages=num_stages, sp=sp, experts=experts, context=context
    )
    store, manifest = open_checkpoint(uri)
    load(store, manifest, [block for module in modules for block in _blocks(module)])
    documents = ((SOURCE, TARGET),)
    at, hidden = held_positions(documents, context), None
    own = _inputs()[:, at[0]]
    batch = MicroBatch(
        tokens=own, labels=own, mask=torch.ones(own.shape), num_counted=own.numel(),
        samples=torch.zeros(len(own)), rows=Rows(at, documents),
    )  # fmt: skip
    with torch.no_grad():
        for module in modules:
            hidden = module.evaluated(batch, hidden)
        columns = modules[-1].head(hidden).transpose(0, 1).contiguous()
    return groups.tp.index, at[0][at[0] >= SOURCE] - SOURCE, columns


LAYOUTS = {
    "one": (Grid(), 1, False),
    "tp2-pp2": (Grid(tp=2), 2, False),
    "tp2-sp-cp2-pp3": (Grid(tp=2, cp=2), 3, True),
    "cp2": (Grid(cp=2), 1, False),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(tmp_path, kind, layout):
    theirs, (grid, pp, is_cut) = hf_t5.make_model(kind), LAYOUTS[layout]
    done = imported(tmp_path, theirs)
    assert done.model.family == kind
    parts = run_grid(_outputs, grid, done.model, done.uri, pp, is_cut)
    tokens = _inputs()
    with torch.no_grad():
        wanted = hf_t5.logits(theirs, tokens[:, :SOURCE], tokens[:, SOURCE:])
    width = parts[0][2].shape[2]
    ours = torch.full((3, TARGET, width * grid.tp), torch.nan, dtype=torch.float64)
    for tp, at, columns in parts:
        ours[:, at, width * tp : width * tp + columns.shape[2]] = columns
    assert plain_models.difference(ours[..., : done.model.vocab_size], wanted) < LOGITS_LIMIT


def test_way_back_is_bit_exact_and_transformers_loads_it(tmp_path, kind):
    theirs = hf_t5.make_model(kind)
    done = imported(tmp_path, theirs)
    hf_export(done.uri, tmp_path / "back")
    again, wanted = hf_t5.load_model(tmp_path / "back"), theirs.state_dict()
    assert again.config.scale_decoder_outputs == theirs.config.scale_decoder_outputs
    assert again.state_dict().keys() == wanted.keys()
    for name, values in again.state_dict().items():
        assert torch.equal(values, wanted[name]), name
    tokens = _inputs()
    with torch.no_grad():
        ours, original = (
            hf_t5.logits(model, tokens[:, :SOURCE], tokens[:, SOURCE:]) for model in (again, theirs)
        )
    assert torch.equal(ours, original)


SPANS = "{text_seq_len: 34, first_sentinel_id: 258, num_sentinels: 50, eos_token_id: 1, decoder_start_token_id: 0}"


def _plan(done, layout, *options):
    fields = _with_target(done.model, 16).model_dump(mode="json")
    return make_test_plan(
        *[f"model.{name}={json.dumps(value)}" for name, value in fields.items()],
        *layout_overrides(layout),
        *(["parallel.cp_method=all_gather"] if "cp2" in layout else []),
        f"checkpoint.init_from={done.uri}",
        f"data.span_corruption={SPANS}",
        "data.seq_len=56",
        "data.global_batch_size=7",
        "run.eval_samples=0",
        "optimizer.lr_warmup_steps=1",
        "optimizer.lr=1e-2",
        "optimizer.weight_decay=0.3",
        "optimizer.eps=1e-6",
        "optimizer.max_grad_norm=0.5",
        *options,
    )


def _document_losses(model, row):
    """Losses of a row's documents, each read alone and without padding."""
    size = row.documents[0]
    for number in set(row.stream_documents[row.stream_documents >= 0].tolist()):
        here = row.stream_documents == number
        source, target = (
            torch.from_numpy(row.tokens[part][here[part]])[None]
            for part in (slice(0, size), slice(size, None))
        )
        labels = torch.from_numpy(row.labels[size:][here[size:]])
        yield cross_entropy(hf_t5.logits(model, source, target)[0], labels, reduction="sum")


def _train_plainly(model, plan):
    """The loop that anyone would write around transformers and torch.optim.AdamW."""
    optimizer = adamw_of([*model.named_parameters()], plan.job.optimizer)
    samples, curve, size = open_samples(plan.job), [], plan.batch.global_batch_size
    for step in range(STEPS):
        rows = [samples.row(number) for number in range(step * size, (step + 1) * size)]
        count = sum(int(row.mask.sum()) for row in rows)
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            for loss in _document_losses(model, row):
                (loss / count).backward()
                total += float(loss.detach()) / count
        curve.append((total, clip_and_step(optimizer, plan, step)))
    return curve


PACKED = ("data.packing=best_fit",)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [(), PACKED], ids=["windows", "packed"])
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2", "cp2", "dp3", "tp2-sp-cp2"])
def test_steps_are_those_of_a_plain_loop(tmp_path, kind, layout, rows):
    theirs = hf_t5.make_model(kind)
    done = imported(tmp_path, theirs)
    plan = _plan(done, layout, *rows)
    results = run_grid(train_rank, plan.grid, plan.to_json())
    curve = _train_plainly(theirs, plan)
    assert curve[0][1] > plan.job.optimizer.max_grad_norm, "the gradient is clipped"
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole = whole_weights(results)
    theirs.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    for at in hf_tensors(done.model):
        rows_of = np.concatenate([whole[part.name] for part in at.parts])[: at.num_rows]
        assert (
            plain_models.difference(torch.from_numpy(rows_of), wanted[at.name]) < TRAINING_LIMIT
        ), at.name


def test_generation_is_that_of_transformers(tmp_path, kind):
    """The same greedy text from a prompt and its end; a grid reads one stream, and is refused."""
    # Here, or each rank of this file would import Ray.
    from raymega.generate.run import GenerateOptions, prepare_generation

    theirs = hf_t5.make_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(byte_tokenizer())
    done = hf_import(tmp_path / "theirs", str(tmp_path / "ours"), created=NOW)
    texts, options = ("the cat", "a"), GenerateOptions(sampling=Sampling(max_tokens=6))
    found = prepare_generation(done.uri, Prompts(texts=texts), options).run("", lambda *_: None)
    for text, answer in zip(texts, found, strict=True):
        source = torch.tensor([[*text.encode(), theirs.config.eos_token_id]])
        wanted = theirs.generate(source, max_new_tokens=6, do_sample=False, use_cache=False)[
            0, 1:
        ].tolist()
        assert list(answer.tokens) == wanted
    with pytest.raises(ConfigError, match="is an encoder-decoder"):
        prepare_generation(done.uri, Prompts(texts=texts), replace(options, grid="tp=2"))
