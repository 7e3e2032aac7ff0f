"""Transformers' encoders as the outside witness: logits, pairs, training steps, and the way back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.parallel import ParallelSection
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.convert.huggingface.names import hf_tensors
from raymega.data.loader import Loader
from raymega.data.samples import open_samples
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import (
    EncoderInput,
    MicroBatch,
    Rows,
    held_positions,
    make_context,
)
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.train.state import TrainState
from tests.dist.model.test_hugging_face import _blocks
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references import hf_encoders, plain_models
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
LENGTH = 40


@pytest.fixture(params=hf_encoders.KINDS)
def kind(request):
    return request.param


def _inputs():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, 259, (3, LENGTH), generator=generator)
    return tokens, torch.randint(0, 2, (3, LENGTH), generator=generator)


def _outputs(env, model, uri, num_stages, is_cut, method):
    """This rank's logits [B, S/cp, V/tp], their places, and the summed loss of pairs in class 1.

    The process holds all stages.
    """
    groups = env.groups
    sp = SequenceParallel(tp=groups.tp, is_sequence_parallel=is_cut)
    experts = ExpertGroups(ep=groups.ep, etp=groups.etp, micro=groups.micro, sp=sp)
    context = make_context(
        groups,
        ParallelSection(cp=groups.cp.size, cp_method=method, hierarchical_cp_size=2),
        CommLog(),
    )
    modules = make_stage_modules(
        model, num_stages=num_stages, sp=sp, experts=experts, context=context
    )
    store, manifest = open_checkpoint(uri)
    load(store, manifest, [block for module in modules for block in _blocks(module)])
    (tokens, types), at = _inputs(), held_positions(((LENGTH,),), context)
    own, own_types, hidden = tokens[:, at[0]], types[:, at[0]], None
    first = (
        torch.arange(len(own)) + int((at[0] == 0).nonzero()) * len(own) if 0 in at else at[0][:0]
    )
    encoder = EncoderInput(token_types=own_types, first=first, labels=torch.ones_like(first))
    batch = MicroBatch(
        tokens=own, labels=own, mask=torch.ones(own.shape), num_counted=own.numel(),
        samples=torch.zeros(len(own)), rows=Rows(at, ((LENGTH,),)), encoder=encoder,
    )  # fmt: skip
    with torch.no_grad():
        for module in modules:
            hidden = module.evaluated(batch, hidden)
        head, pairs = modules[-1].head, torch.zeros(())
        if head.segment_pairs is not None:
            pairs = head.segment_pairs.loss_sum(head.norm(hidden), encoder)
        columns = head(hidden).transpose(0, 1).contiguous()
    return groups.tp.index, at[0], columns, float(pairs)


LAYOUTS = {
    "one": (Grid(), 1, False, "ring"),
    "tp2-pp2": (Grid(tp=2), 2, False, "ring"),
    "tp2-sp-cp2-pp2": (Grid(tp=2, cp=2), 2, True, "ring"),
    "cp2-gather": (Grid(cp=2), 1, False, "all_gather"),
    "cp2-heads": (Grid(cp=2), 1, False, "all_to_all"),
    "cp4-hybrid": (Grid(cp=4), 1, False, "hybrid"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_those_of_transformers(tmp_path, kind, layout):
    theirs, (grid, pp, is_cut, method) = hf_encoders.make_model(kind), LAYOUTS[layout]
    done = imported(tmp_path, theirs)
    assert done.model.encoder.has_pairs == (kind in hf_encoders.HAVE_PAIRS)
    inner = {"all_to_all": grid.cp, "hybrid": 2}.get(method, 1)
    args = done.model, done.uri, pp, is_cut, method
    parts = run_grid(_outputs, grid, *args, hierarchical_cp_size=inner)
    tokens, types = _inputs()
    with torch.no_grad():
        wanted, of_pairs = hf_encoders.outputs(theirs, tokens, types)
    width = parts[0][2].shape[2]
    ours = torch.full((*tokens.shape, width * grid.tp), torch.nan, dtype=torch.float64)
    for tp, at, columns, _ in parts:
        ours[:, at, width * tp : width * tp + columns.shape[2]] = columns
    assert plain_models.difference(ours[..., : done.model.vocab_size], wanted) < LOGITS_LIMIT
    if of_pairs is not None:
        loss = float(cross_entropy(of_pairs, torch.ones(3, dtype=torch.int64), reduction="sum"))
        by_rank = sum({tp: pairs for tp, at, _, pairs in parts if 0 in at}.values()) / grid.tp
        assert by_rank == pytest.approx(loss, rel=LOGITS_LIMIT)


def test_way_back_is_bit_exact_and_transformers_loads_it(tmp_path, kind):
    theirs = hf_encoders.make_model(kind)
    done = imported(tmp_path, theirs)
    hf_export(done.uri, tmp_path / "back")
    again, wanted = hf_encoders.load_model(kind, tmp_path / "back"), theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, values in again.state_dict().items():
        assert torch.equal(values, wanted[name]), name
    with torch.no_grad():
        ours, original = (hf_encoders.outputs(model, *_inputs())[0] for model in (again, theirs))
    assert torch.equal(ours, original)


def test_first_files_of_bert_have_other_names_and_copies(tmp_path):
    theirs = hf_encoders.make_model("bert")
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in load_file(file).items()
    }  # fmt: skip
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    old["bert.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    save_file(old, file, metadata={"format": "pt"})
    done = hf_import(tmp_path / "theirs", str(tmp_path / "ours"), created=NOW)
    hf_export(done.uri, tmp_path / "back")
    again = hf_encoders.load_model("bert", tmp_path / "back")
    for name, values in again.state_dict().items():
        assert torch.equal(values, theirs.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["bert-untied", "roberta-untied"])
def test_bias_of_an_untied_head_is_the_one_that_is_read(tmp_path, kind):
    """Files of transformers 5 hold another bias beside it, those of transformers 4 have it under that name alone."""
    theirs = hf_encoders.make_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    whole = load_file(file)
    (read,) = [name for name in whole if name.endswith("decoder.bias")]
    old, bias = read.replace("decoder.", ""), whole[read]
    renamed = {old if name == read else name: values for name, values in whole.items()}
    for run, values in {"5": {**whole, old: bias + 1}, "4": renamed}.items():
        save_file(values, file, metadata={"format": "pt"})
        done = hf_import(tmp_path / "theirs", str(tmp_path / run), created=NOW)
        hf_export(done.uri, tmp_path / f"back-{run}")
        back = load_file(tmp_path / f"back-{run}" / "model.safetensors")
        assert torch.equal(back[read], bias) and torch.equal(back[old], bias)


@pytest.mark.parametrize("kind", ["bert-masked", "roberta"])
def test_published_files_have_a_pooler_that_no_head_reads(tmp_path, kind):
    theirs = hf_encoders.make_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    file, prefix = tmp_path / "theirs" / "model.safetensors", kind.partition("-")[0]
    pooler = {f"{prefix}.pooler.dense.weight": torch.ones(48, 48), f"{prefix}.pooler.dense.bias": torch.ones(48)}  # fmt: skip
    save_file({**load_file(file), **pooler}, file, metadata={"format": "pt"})
    done = hf_import(tmp_path / "theirs", str(tmp_path / "ours"), created=NOW)
    assert not done.model.encoder.has_pairs
    hf_export(done.uri, tmp_path / "back")
    again = hf_encoders.load_model(kind, tmp_path / "back")
    for name, values in again.state_dict().items():
        assert torch.equal(values, theirs.state_dict()[name]), name


MASKS = '{"mask_token_id": 66, "cls_token_id": 64, "sep_token_id": 65}'


def _plan(done, layout, *options):
    fields = done.model.model_dump(mode="json")
    return make_test_plan(
        *[f"model.{name}={json.dumps(value)}" for name, value in fields.items()],
        *layout_overrides(layout),
        f"checkpoint.init_from={done.uri}",
        f"data.masking={MASKS}",
        "data.global_batch_size=7",
        "run.eval_samples=0",
        "optimizer.lr_warmup_steps=1",
        "optimizer.lr=1e-2",
        "optimizer.weight_decay=0.3",
        "optimizer.eps=1e-6",
        "optimizer.max_grad_norm=0.5",
        *options,
    )


def _losses(model, batch, num_masked, num_pairs):
    """Parts of the means of masked tokens and of pairs, by documents of each row."""
    masked, pairs = [], []
    documents = batch.rows.documents * (len(batch.tokens) if len(batch.rows.documents) == 1 else 1)
    classes = torch.full((batch.tokens.shape[1], len(batch.tokens)), -1).flatten()
    classes[batch.encoder.first] = batch.encoder.labels
    classes = classes.view(batch.tokens.shape[1], len(batch.tokens))
    for row, lengths in enumerate(documents):
        at = 0
        for length in lengths:
            here, at = slice(at, at + length), at + length
            if not batch.mask[row, here].any():
                continue
            inputs = batch.tokens[row, None, here], batch.encoder.token_types[row, None, here]
            logits, of_pair = hf_encoders.outputs(model, *inputs)
            labels = batch.labels[row, here].masked_fill(batch.mask[row, here] == 0, -100)
            masked.append(cross_entropy(logits[0], labels, reduction="sum"))
            if of_pair is not None:
                pairs.append(
                    cross_entropy(of_pair, classes[here.start, row, None], reduction="sum")
                )
    nothing = torch.zeros(())
    return sum(masked, nothing) / num_masked, sum(pairs, nothing) / max(1, num_pairs)


def _train_plainly(model, plan):
    """The loop that anyone would write around transformers and torch.optim.AdamW."""
    optimizer = adamw_of([*model.named_parameters()], plan.job.optimizer)
    loader = Loader(open_samples(plan.job), dp_rank=0, device="cpu", is_encoder=True)
    state, curve = TrainState(), []
    for step in range(STEPS):
        batches = loader.micro_batches(plan.batch, state.samples)
        counts = (
            sum(int(batch.mask.sum()) for batch in batches),
            sum(len(batch.encoder.first) for batch in batches),
        )
        optimizer.zero_grad()
        sums = [0.0, 0.0]
        for batch in batches:
            losses = _losses(model, batch, *counts)
            sum(losses).backward()
            sums = [total + float(loss.detach()) for total, loss in zip(sums, losses, strict=True)]
        curve.append((*sums, clip_and_step(optimizer, plan, step)))
        state = state.advance(samples=plan.batch.global_batch_size, tokens=1)
    return curve


NUMBERS = ("loss", "pair_loss", "grad_norm")
PACKED = ("data.packing=best_fit", "data.document_multiple=4")


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [(), PACKED], ids=["windows", "packed"])
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2", "cp2", "dp3", "tp2-sp-cp2"])
def test_steps_are_those_of_a_plain_loop(tmp_path, kind, layout, rows):
    theirs = hf_encoders.make_model(kind)
    done = imported(tmp_path, theirs)
    options = rows
    if done.model.encoder.has_pairs and kind != "bert":
        options = (*rows, "model.encoder.sentence_loss=sentence_order")
    plan = _plan(done, layout, *options)
    results = run_grid(train_rank, plan.grid, plan.to_json(), NUMBERS)
    curve = _train_plainly(theirs, _plan(done, "tp1", *options))
    assert curve[0][2] > plan.job.optimizer.max_grad_norm, "the gradient is clipped"
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole = whole_weights(results)
    theirs.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    for at in hf_tensors(done.model):
        rows_of = np.concatenate([whole[part.name] for part in at.parts])[: at.num_rows]
        # softmax does not see a bias of all keys: its gradient is rounding noise, which Adam scales
        limit = 1e-3 if at.name.endswith("self.key.bias") else TRAINING_LIMIT
        assert plain_models.difference(torch.from_numpy(rows_of), wanted[at.name]) < limit, at.name
