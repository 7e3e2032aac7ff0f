"""Stored reference log-probabilities: the workers' scores of answers, summed over the labels that count."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raymega.data.arrow import ShardWriter
from raymega.data.checks import training_faults
from raymega.data.format import (
    LAST_ANSWER,
    META_FILE,
    DatasetMeta,
    SourceMeta,
    SplitMeta,
    encode_meta,
)
from raymega.data.heads.form import job_form
from raymega.data.open_split import open_split, shape_of
from raymega.data.preference.stored_reference import reference_path, write_reference
from raymega.data.rows import UNDESIRABLE
from raymega.errors import ConfigError
from raymega.evaluate import reference
from raymega.evaluate import stored as stored_model
from raymega.evaluate.requests import Scores
from raymega.evaluate.worker import score_requests
from raymega.messages import Requests
from raymega.orchestrate.run_store.run_identity import identity_faults, identity_of
from raymega.train.build import build_parts
from raymega.train.build_scorer import scorer_of
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE

CPU = torch.device("cpu")


@pytest.fixture
def pairs(tmp_path):
    return _write_pairs(tmp_path)


def _write_pairs(folder, seed=3, row_format="preference"):
    """A dataset of conversations' pairs: answers of 5 to 40 tokens, whose last four count.

    Of answers with labels every second one is undesirable.
    """
    generator = np.random.default_rng(seed)
    splits = {}
    for name, num_documents in (("train", 40), ("valid", 12)):
        with ShardWriter(folder, f"{name}/0.arrow", dtype="uint16", has_targets=True) as writer:
            for number in range(num_documents):
                length = int(generator.integers(5, 40))
                tokens = generator.integers(0, 60, length).astype(np.uint16)
                targets = (np.arange(length) >= length - 4) * np.uint8(LAST_ANSWER)
                targets += np.uint8(UNDESIRABLE * (number // 2 % 2) * (row_format == "kto"))
                writer.append(tokens, targets.astype(np.uint8))
            shards = (writer.close(),)
        splits[name] = SplitMeta(shards=shards, num_text_bytes=1)
    source = SourceMeta(
        inputs=("x",), num_files=1, num_bytes=1, num_replaced=0, num_tokenizer_bytes=0
    )
    meta = DatasetMeta(
        recipe={"tokenizer": "bytes"}, vocab_size=64, eod_id=63, dtype="uint16", splits=splits,
        valid_entropy=1.5, source=source, version=3, row_format=row_format,
    )  # fmt: skip
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return folder, meta


def _plan(pairs, *options):
    folder, meta = pairs
    return make_test_plan(
        *layout_overrides("tp1"),
        f"data.path={folder}", "data.packing=best_fit", "data.seq_len=64", "model.max_positions=64",
        f"model.vocab_size={meta.vocab_size}", "preference.loss_type=sigmoid",
        "preference.reference=stored", "model.moe={}", *options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row_format", "loss", "first_loss"),
    [("preference", "sigmoid", np.log(2)), ("kto", "kto", 0.5)],
)
def test_a_run_starts_at_its_own_reference(tmp_path, monkeypatch, row_format, loss, first_loss):
    """The stored reference of a model is that of training on it: the first loss is log 2 or 1/2, on packed rows."""
    pairs, used = _write_pairs(tmp_path, row_format=row_format), f"preference.loss_type={loss}"
    plan = _plan(pairs, used)
    shape = shape_of(plan.job.data, plan.job.preference, job_form(plan.job))
    with pytest.raises(ConfigError, match="has no reference-train"):
        open_split(str(pairs[0]), "train", shape, seed=0)
    first = _plan(pairs, used, "preference.reference=base", "model.lora.r=2", "run.eval_samples=0")
    scorer = scorer_of(build_parts(first, rank=0, groups=ALONE, device=CPU), lambda: None)

    def score(_checkpoint, scored_plan, requests, *, on_rows):
        values = score_requests(scored_plan, scorer, ALONE, requests, device=CPU)
        return [Scores(log_probs=p, is_greedy=g) for p, g in zip(*values, strict=True)]

    class _Opened:
        class store:  # noqa: N801
            uri = "runs/sft"

        class manifest:  # noqa: N801
            key = "step-3"

    monkeypatch.setattr(reference, "session_at", lambda _address: nullcontext())
    monkeypatch.setattr(stored_model, "open_checkpoint", lambda _uri: _Opened)
    monkeypatch.setattr(reference, "plan_of", lambda _manifest, _options: first)
    monkeypatch.setattr(reference, "score", score)
    stored = reference.store_reference(plan.job, checkpoint="runs/sft")
    assert [each.checkpoint for each in stored] == ["runs/sft/step-3"] * 2
    parts = build_parts(plan, rank=0, groups=ALONE, device=CPU)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=False)
    assert outcome.loss == pytest.approx(first_loss, rel=1e-12)
    assert outcome.pair_means["chosen_reward"] == pytest.approx(0, abs=1e-12)
    assert outcome.grad_norm > 0
    # answers that are cut or counted otherwise are refused before anything starts
    with np.load(reference_path(str(pairs[0]), "train")) as found:
        assert found["log_probs"].shape[1] == 2
    values = {
        "data.path": str(pairs[0]), "data.packing": "best_fit", "data.seq_len": 32, "data.global_batch_size": 4,
        "preference.loss_type": loss, "preference.reference": "stored", "run.eval_samples": 4,
    }  # fmt: skip
    faults = training_faults(values)
    assert {fault.fact for fault in faults} == {
        "preference.reference=stored with data.seq_len=32",
    }
    # and those of another dataset of as many pairs, or of one that is not known
    values["data.seq_len"] = 64
    assert training_faults(values) == []
    for known in (False, True):
        if known:
            _write_pairs(tmp_path, seed=4, row_format=row_format)
        else:
            _forget_content(reference_path(str(pairs[0]), "train"))
        (fault,) = [each for each in training_faults(values) if "the train split" in each.fact]
        assert "raymega data reference" in fault.remedy
        with pytest.raises(ConfigError, match="has the answers of content"):
            open_split(str(pairs[0]), "train", shape, seed=0)
        reference.store_reference(plan.job, checkpoint="runs/sft")


def _forget_content(file):
    with np.load(file) as found:
        values = dict(found)
    how = json.loads(str(values["how"]))
    del how["content"]
    np.savez(file, **values | {"how": np.array(json.dumps(how))})


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("model.max_positions=16", "model.max_positions=16; .* answers of up to"),
        ("model.vocab_size=40", "model.vocab_size=40; .* tokens up to"),
    ],
)
def test_a_reference_that_cannot_read_the_answers_is_refused(pairs, monkeypatch, option, told):
    other = make_test_plan(*layout_overrides("tp1"), "model.moe={}", "data.seq_len=16", option)
    monkeypatch.setattr(reference, "session_at", lambda _address: nullcontext())
    monkeypatch.setattr(
        stored_model, "open_checkpoint", lambda _uri: SimpleNamespace(manifest=None)
    )
    monkeypatch.setattr(reference, "plan_of", lambda _manifest, _options: other)
    with pytest.raises(ConfigError, match=told):
        reference.store_reference(_plan(pairs).job, checkpoint="runs/sft")
    assert not list(pairs[0].glob("reference-*"))


def test_a_run_does_not_go_on_with_another_reference(pairs):
    job = _plan(pairs).job
    file = reference_path(str(pairs[0]), "train")
    write_reference(file, np.full((20, 2), -3.0), {"checkpoint": "a"}, content="x")
    identity = identity_of(job)
    write_reference(file, np.full((20, 2), -3.0), {"checkpoint": "b"}, content="x")
    assert identity_faults("dpo", identity, job) == []
    write_reference(file, np.full((20, 2), -4.0), {"checkpoint": "b"}, content="x")
    (fault,) = identity_faults("dpo", identity, job)
    assert "raymega data reference" in fault.remedy
    # a record of before has none
    del identity["preference"]["stored_log_probs"]
    assert identity_faults("dpo", identity, job) == []


def test_every_dataset_of_a_job_keeps_its_reference(tmp_path):
    """Of all blends, and of the validation sets those splits that they read."""
    parts = [(tmp_path / name, split) for name, split in (
        ("first", "train"), ("second", "train"), ("later", "train"), ("held-out", "valid"),
    )]  # fmt: skip
    for number, (folder, split) in enumerate(parts):
        folder.mkdir()
        first = _write_pairs(folder, seed=number)
        write_reference(
            reference_path(str(folder), split), np.zeros((20, 2)), {"checkpoint": "a"}, content="x"
        )
    paths = [str(folder) for folder, _ in parts]
    job = _plan(
        (paths[0], first[1]), "data.path=none", "run.eval_samples=4",
        f"data.sources=[{{path: {paths[0]}, weight: 1}}, {{path: {paths[1]}, weight: 1}}]",
        f"data.stages=[{{from_tokens: 640, sources: [{{path: {paths[2]}, weight: 1}}]}}]",
        f"data.validation=[{{name: held-out, path: {paths[3]}}}]",
    ).job  # fmt: skip
    identity = identity_of(job)
    for folder, split in parts:
        file = reference_path(str(folder), split)
        before = file.read_bytes()
        write_reference(file, np.ones((20, 2)), {"checkpoint": "b"}, content="x")
        (fault,) = identity_faults("dpo", identity, job)
        assert split in fault.fact and "raymega data reference" in fault.remedy
        file.write_bytes(before)
    # a validation set that is left out, or one more, is no other run
    without = job.model_copy(update={"data": job.data.model_copy(update={"validation": ()})})
    assert identity_faults("dpo", identity, without) == []
    assert identity_faults("dpo", identity_of(without), job) == []
