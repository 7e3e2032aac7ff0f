"""A teacher's stored logits: those of the live teacher on the rows that a run reads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raymega.data.arrow import ShardWriter
from raymega.data.checks import training_faults
from raymega.data.distillation.stored_logits import (
    LogitWriter,
    create_logits,
    finish_logits,
    logit_files,
    open_logits,
)
from raymega.data.format import (
    LAST_ANSWER,
    META_FILE,
    DatasetMeta,
    ImageMeta,
    SourceMeta,
    SplitMeta,
    encode_meta,
)
from raymega.data.samples import open_samples
from raymega.errors import ConfigError, NumericsError
from raymega.evaluate.teacher import logits_how, store_teacher, teacher_plan_on
from raymega.evaluate.teacher_worker import write_logits
from raymega.messages import Requests
from raymega.train.build import build_parts
from raymega.train.build_scorer import build_scorer
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE

CPU, VOCAB = torch.device("cpu"), 61


@pytest.fixture
def corpus(tmp_path):
    """A dataset of 60 documents of 4 to 40 tokens."""
    return _write(tmp_path, None)


def _write(tmp_path, images):
    """A dataset of 60 documents, which begin with an image if there are ``images``."""
    generator = np.random.default_rng(3)
    kinds = {"has_targets": images is not None, "has_images": images is not None}
    with ShardWriter(tmp_path, "train/0.arrow", dtype="uint16", **kinds) as writer:
        for length in generator.integers(4, 40, 60).tolist():
            document = generator.integers(0, VOCAB - 1, length).astype(np.uint16)
            if images is None:
                writer.append(document)
                continue
            document[:4] = images.token_id
            pixels = generator.integers(0, 256, 3 * images.size**2, dtype=np.uint8).tobytes()
            labels = np.full(length, LAST_ANSWER, dtype=np.uint8)
            writer.append(document, labels, [(0, pixels)])
        shards = (writer.close(),)
    source = SourceMeta(
        inputs=("x",), num_files=1, num_bytes=1, num_replaced=0, num_tokenizer_bytes=0
    )
    meta = DatasetMeta(
        recipe={"tokenizer": "bytes"}, vocab_size=VOCAB, eod_id=VOCAB - 1, dtype="uint16",
        splits={"train": SplitMeta(shards=shards, num_text_bytes=1)}, valid_entropy=1.5, source=source, version=2 if images is None else 3,
        images=images,
    )  # fmt: skip
    (tmp_path / META_FILE).write_bytes(encode_meta(meta))
    return tmp_path


def _plan(folder, *options):
    return make_test_plan(
        *layout_overrides("tp1"), f"data.path={folder}", "data.seq_len=32", "run.eval_samples=0", "model.moe={}",
        f"model.vocab_size={VOCAB}", "model.make_vocab_size_divisible_by=8", "distillation.loss_type=forward_kl",
        "distillation.temperature=1.7", "distillation.weight=0.6", *options,
    )  # fmt: skip


def _store(job, folder, *options):
    """Write the logits of the initial weights of the job's teacher, as a worker does."""
    plan = teacher_plan_on(job, "")
    scorer = build_scorer(plan, rank=0, groups=ALONE, device=CPU)
    drawn = build_parts(
        _plan(folder, *options), rank=0, groups=ALONE, device=CPU
    ).teacher.weights.modules
    for ours, theirs in zip(scorer.modules, drawn, strict=True):
        for param, value in zip(ours.parameters(), theirs.parameters(), strict=True):
            param.data.copy_(value)
    k = job.distillation.top_k
    num_rows = open_samples(job.with_values(distillation={"teacher": "live"})).num_samples
    create_logits(str(folder), (num_rows, job.data.seq_len, k))
    write_logits(plan, scorer, ALONE, str(folder), device=CPU)
    finish_logits(str(folder), logits_how(job, str(folder)) | {"checkpoint": "drawn"})


def _outcome(plan):
    parts = build_parts(plan, rank=0, groups=ALONE, device=CPU)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=False)
    return outcome.loss, outcome.grad_norm, outcome.pair_means["divergence"]


@pytest.mark.parametrize("packing", ["data.packing=none", "data.packing=best_fit"])
def test_all_logits_of_a_teacher_train_as_the_live_teacher_does(corpus, packing):
    stored = "distillation.teacher=stored"
    plan = _plan(corpus, packing, stored, f"distillation.top_k={VOCAB}")
    _store(plan.job, corpus)
    # stored logits are float32
    np.testing.assert_allclose(_outcome(plan), _outcome(_plan(corpus, packing)), rtol=3e-6)
    # fewer of them: the first ones of a token, with the same order
    few = open_logits(str(corpus), plan.job.data, top_k=5, vocab_size=VOCAB).row(1)
    ids, logits = open_logits(str(corpus), plan.job.data, top_k=VOCAB, vocab_size=VOCAB).row(1)
    np.testing.assert_array_equal(few[0], ids[:, :5])
    assert (np.diff(logits, axis=1) <= 0).all()
    assert (np.sort(ids, axis=1) == np.arange(VOCAB)).all(), "every token once, and no padding"


def test_a_teacher_whose_logits_are_no_numbers_stores_none(corpus):
    plan = _plan(corpus, "distillation.teacher=stored", "distillation.top_k=4")
    scorer = build_scorer(teacher_plan_on(plan.job, ""), rank=0, groups=ALONE, device=CPU)
    next(scorer.modules[-1].head.parameters()).data[3] = torch.nan
    create_logits(
        str(corpus),
        (open_samples(plan.job.with_values(distillation={"teacher": "live"})).num_samples, 32, 4),
    )
    with pytest.raises(NumericsError, match=r"the teacher's logits for row 0 of .* are NaN or Inf"):
        write_logits(teacher_plan_on(plan.job, ""), scorer, ALONE, str(corpus), device=CPU)


@pytest.mark.parametrize("mrope", ["[]", "[0, 1, 1]"])
def test_a_teacher_that_reads_images_is_asked_with_them(tmp_path, mrope):
    corpus = str(_write(tmp_path, ImageMeta(size=8, num_patches=4, token_id=VOCAB - 1)))
    vision = (
        "model.vision={kind: clip, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 8, num_heads: 2, "
        f"ffn_hidden_size: 8, image_token_id: {VOCAB - 1}, initializer_range: 0.5, mrope_section: {mrope}}}",
    )
    plan = _plan(corpus, *vision, "distillation.teacher=stored", f"distillation.top_k={VOCAB}")
    _store(plan.job, corpus, *vision)
    np.testing.assert_allclose(_outcome(plan), _outcome(_plan(corpus, *vision)), rtol=3e-6)


def test_logits_of_other_rows_are_refused_before_anything_starts(corpus):
    plan = _plan(corpus, "distillation.teacher=stored", "distillation.top_k=4")
    values = {
        "data.path": str(corpus), "data.seq_len": 32, "data.global_batch_size": 4, "run.eval_samples": 0,
        "distillation.loss_type": "forward_kl", "distillation.teacher": "stored", "distillation.top_k": 4,
        "model.vocab_size": VOCAB,
    }  # fmt: skip
    (fault,) = training_faults(values)
    assert "has no teacher-train.json" in fault.fact
    with pytest.raises(ConfigError, match=r"has no teacher-train\.json"):
        open_samples(plan.job)
    _store(plan.job, corpus)
    assert training_faults(values) == []
    facts = {
        fault.fact
        for changed in (
            {"data.seq_len": 16},
            {"distillation.top_k": 5},
            {"data.packing": "best_fit"},
            {"model.vocab_size": VOCAB + 3},
        )
        for fault in training_faults(values | changed)
    }
    assert facts == {
        "distillation.teacher=stored with data.seq_len=16",
        "distillation.teacher=stored with distillation.top_k=5",
        "distillation.teacher=stored with data.packing=best_fit",
        f"distillation.teacher=stored with model.vocab_size={VOCAB + 3}",
    }
    how = logit_files(str(corpus)).how
    how.write_text(how.read_text().replace('"content": "', '"content": "0'))
    (fault,) = training_faults(values)
    assert "has other tokens" in fault.fact


def test_a_job_without_a_teacher_is_told_before_a_cluster_is_asked(corpus):
    job = _plan(corpus).job
    with pytest.raises(ConfigError, match="teacher_checkpoint=none, and no --checkpoint"):
        store_teacher(job)


def test_a_rank_writes_the_bytes_of_its_own_positions_alone(tmp_path):
    """Over a network a page that holds zeros of another rank's positions would overwrite them."""
    files = create_logits(str(tmp_path), (3, 8, 2))
    values, parts = np.arange(16).reshape(8, 2), (np.array([0, 1, 6, 7]), np.array([5, 2, 3, 4]))
    writers = [LogitWriter(files.ids) for _ in parts]
    written = []
    for writer, at in zip(writers, parts, strict=True):
        file = writer._file
        writer._file = SimpleNamespace(
            seek=file.seek, write=lambda text, to=file.write: written.append(len(text)) or to(text),
            fileno=file.fileno, close=file.close,
        )  # fmt: skip
        writer.write(1, at, values[at])
    for writer in writers:
        writer.close()
    found = np.load(files.ids)
    np.testing.assert_array_equal(found[1], values)
    assert not found[[0, 2]].any() and written == [16, 16, 8, 24], "runs of two tokens of 4 bytes"
