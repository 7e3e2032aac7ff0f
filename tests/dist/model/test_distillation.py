"""Distillation against its plain formula around two transformers models and torch.optim.AdamW."""

import json
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from raymega.convert.huggingface.importer import hf_import
from raymega.convert.huggingface.names import hf_tensors
from raymega.data.loader import Loader
from raymega.data.samples import open_samples
from raymega.messages import Requests
from raymega.optim.lr_schedule import learning_rate
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.distillation.teacher import load_teacher
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references import hf_models, plain_models
from tests.support.references.plain_training import whole_weights
from tests.unit.convert.folders import NOW

pytestmark = pytest.mark.dist

LIMIT, STEPS, SEQ_LEN, MULTIPLE = 1e-9, 3, 40, 8
ROWS = (
    "data.packing=best_fit", "data.packing_window=64", f"data.document_multiple={MULTIPLE}", f"data.seq_len={SEQ_LEN}",
    "data.loss_on=completion", "data.global_batch_size=7", "schedule.micro_batch_size=2", "run.eval_samples=0",
)  # fmt: skip
OPTIMIZER = (
    "optimizer.lr_warmup_steps=1", "optimizer.lr=1e-2", "optimizer.weight_decay=0.3", "optimizer.eps=1e-6",
    "optimizer.max_grad_norm=0.5",
)  # fmt: skip
TEACHER = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96}


def _models(folder, role, kind, *, sharpness=1.0, **changes):
    """A model of transformers, whose matrices are larger by ``sharpness``, and its import."""
    model = hf_models.make_model(kind, seed=len(role), positions=SEQ_LEN, **changes)
    with torch.no_grad():
        for param in (param for param in model.parameters() if param.ndim > 1):
            param.mul_(sharpness)
    model.save_pretrained(folder / role)
    uri = str(folder / f"{role}-ours")
    return model, hf_import(folder / role, uri, created=NOW, make_vocab_size_divisible_by=MULTIPLE)


def _plan(student, teacher, layout, *options):
    fields = student.model.model_dump(mode="json")
    of_teacher = json.dumps(teacher.model.model_dump(mode="json"))
    return make_test_plan(
        *[f"model.{name}={json.dumps(value)}" for name, value in fields.items()],
        *layout_overrides(layout), f"checkpoint.init_from={student.uri}",
        f"distillation.teacher_model={of_teacher}", f"distillation.teacher_checkpoint={teacher.uri}",
        *ROWS, *OPTIMIZER, *options,
    )  # fmt: skip


def _train(env, plan_json):
    """Loss, norm and means of each step; this rank's blocks of the weights, and whether the teacher stayed."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    init_from(parts, plan.job.checkpoint)
    load_teacher(parts.teacher, plan.job.distillation.teacher_checkpoint)
    before = [block.values.clone() for block in parts.teacher.blocks()]
    state, curve = TrainState(), []
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        means = outcome.pair_means
        curve.append((outcome.loss, outcome.grad_norm, means["divergence"], means["cross_entropy"]))
    after = [block.values for block in parts.teacher.blocks()]
    is_still = all(map(torch.equal, before, after))
    blocks = [
        (block.tensor, block.box, block.values.numpy().copy())
        for block in parts.optimizer.blocks()
        if block.kind == "model"
    ]
    return curve, is_still, blocks


def _sums(section, student, teacher, batches):
    """Sums over labels that count of divergence and cross entropy, document by document, and their number."""
    found, count = torch.zeros(2, dtype=torch.float64), 0
    for batch in batches:
        documents = [*batch.rows.documents]
        for row, tokens in enumerate(batch.tokens):
            for start, stop in pairwise(accumulate(documents[row % len(documents)], initial=0)):
                counted = batch.mask[row, start:stop].bool()
                if not counted.any():
                    continue
                own = hf_models.logits(student, tokens[None, start:stop])[0][counted]
                with torch.no_grad():
                    wanted = hf_models.logits(teacher, tokens[None, start:stop])[0][counted]
                labels = batch.labels[row, start:stop][counted]
                q = (own / section.temperature).log_softmax(-1)
                p = (wanted / section.temperature).log_softmax(-1)
                if section.loss_type == "reverse_kl":
                    p, q = q, p
                divergence = (p.exp() * (p - q)).sum()
                found = found + torch.stack(
                    (divergence, cross_entropy(own, labels, reduction="sum"))
                )
                count += int(counted.sum())
    return found, count


def _train_plainly(student, teacher, plan):
    """The loop that anyone would write: one batch, one document at a time, the mean over labels."""
    section, distillation = plan.job.optimizer, plan.job.distillation
    params = [*student.parameters()]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)
    loader, curve, samples = Loader(open_samples(plan.job), dp_rank=0, device="cpu"), [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = loader.micro_batches(plan.batch, samples)
        sums, count = _sums(distillation, student, teacher, batches)
        divergence, entropy = sums / count
        share = distillation.weight
        loss = share * distillation.temperature**2 * divergence + (1 - share) * entropy
        loss.backward()
        norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params])))
        for param in params:
            param.grad *= min(1.0, section.max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(section, total_steps=plan.job.run.steps, step=step)
        optimizer.step()
        curve.append(
            (float(loss.detach()), norm, float(divergence.detach()), float(entropy.detach()))
        )
        samples += plan.batch.global_batch_size
    return curve


FORWARD = (
    "distillation.loss_type=forward_kl",
    "distillation.weight=0.7",
    "distillation.temperature=2.5",
)
REVERSE = (
    "distillation.loss_type=reverse_kl",
    "distillation.weight=0.4",
    "distillation.temperature=0.8",
)
CASES = [
    ("llama3", "qwen3", "tp2-pp2-sp", FORWARD),
    ("llama3", "qwen3", "cp2", REVERSE),
    ("qwen3", "llama3", "dp3", (*FORWARD, "parallel.sharding=parameters")),
    ("llama3", "qwen2_moe", "tp2-dp2", REVERSE),
    ("qwen2_moe", "qwen3", "dp2-ep2", (*FORWARD, "parallel.sharding=optimizer")),
    ("gpt2", "llama3", "tp2-cp2", ("distillation.loss_type=forward_kl", "distillation.weight=1")),
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "of_teacher", "layout", "options"), CASES)
def test_steps_are_those_of_the_formula_around_transformers(
    tmp_path, kind, of_teacher, layout, options
):
    theirs, student = _models(tmp_path, "student", kind)
    teacher_model, teacher = _models(tmp_path, "teacher", of_teacher, sharpness=1.5, **TEACHER)
    plan = _plan(student, teacher, layout, *options)
    results = run_grid(_train, plan.grid, plan.to_json())
    curve = _train_plainly(theirs, teacher_model, _plan(student, teacher, "tp1", *options))
    for ours, is_still, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=LIMIT)
        assert is_still, "the teacher is not trained"
    whole = whole_weights([(curve, blocks) for curve, _, blocks in results])
    theirs.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    for at in hf_tensors(student.model):
        parts = [whole[part.name] for part in at.parts]
        if at.expert >= 0:
            parts = [part[at.expert] for part in parts]
        rows = at.by_head(np.concatenate(parts))[: at.num_rows]
        ours = torch.from_numpy(rows.T if at.is_transposed else rows)
        assert plain_models.difference(ours, wanted[at.name]) < LIMIT, at.name
