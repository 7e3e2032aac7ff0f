"""Preference losses against TRL's published formulas around transformers, PEFT and torch.optim.AdamW."""

import json
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from raymega.convert.huggingface.names import hf_tensors
from raymega.convert.tuned.peft_names import linear_modules
from raymega.data.loader import Loader
from raymega.data.preference.pairs import PairDocuments, PairedSource
from raymega.data.samples import open_samples
from raymega.data.synthetic import SyntheticDocuments
from raymega.messages import Requests
from raymega.model.preference import PairObjective
from raymega.optim.lr_schedule import learning_rate
from raymega.plan.adapters import adapter_names
from raymega.plan.batch import make_batch
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references import hf_models, plain_models
from tests.support.references.imported import imported
from tests.support.references.peft_models import adapted
from tests.unit.model.parts import make_stage_modules

pytestmark = pytest.mark.dist

LIMIT, STEPS, SEQ_LEN = 1e-9, 3, 64
PAIRS = (
    "data.packing=best_fit", "data.packing_window=64", "data.document_multiple=8", f"data.seq_len={SEQ_LEN}",
)  # fmt: skip
OPTIMIZER = (
    "run.eval_samples=0", "optimizer.lr_warmup_steps=1", "optimizer.lr=1e-2", "optimizer.weight_decay=0.3",
    "optimizer.eps=1e-6", "optimizer.max_grad_norm=0.5",
)  # fmt: skip


def _plan(model, layout, *options):
    fields = model.model_dump(mode="json")
    return make_test_plan(
        *[f"model.{name}={json.dumps(value)}" for name, value in fields.items()],
        *layout_overrides(layout), *PAIRS, *OPTIMIZER, *options,
    )  # fmt: skip


def _train(env, plan_json, base, adapter):
    """Losses and norms, and this rank's blocks of the trained weights."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    # Adapters that are not zero, so that the reference is another model from the first step on.
    start = {"init_from": base, "init_adapter": adapter or "none"}
    init_from(parts, plan.job.checkpoint.model_copy(update=start))
    state, curve, means = TrainState(), [], []
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
        means.append([outcome.pair_means[name] for name in ("chosen_reward", "rejected_reward")])
    return (curve, means), [
        (block.tensor, block.box, block.values.numpy().copy())
        for block in parts.optimizer.blocks()
        if block.kind == "model"
    ]


def _log_probs(model, batches):
    """Log-probability and labels of every answer, alone in a forward pass: [P, 2] each."""
    sums, counts = [], []
    for batch in batches:
        documents = [*batch.rows.documents]
        for row, tokens in enumerate(batch.tokens):
            lengths = documents[row % len(documents)]
            for start, stop in pairwise(accumulate(lengths, initial=0)):
                mask = batch.mask[row, start:stop].bool()
                if int(batch.pairs.answers[row, start]) == len(batch.pairs.counts):
                    continue  # padding at the end of a row
                logits = hf_models.logits(model, tokens[None, start:stop])[0]
                labels = batch.labels[row, start:stop]
                each = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
                sums.append((each * mask).sum())
                counts.append(int(mask.sum()))
    return torch.stack(sums).view(-1, 2), torch.tensor(counts).view(-1, 2)


def _published_loss(section, policy, reference, counts, labels):
    """The formulas of TRL's DPOTrainer.dpo_loss and of the ORPO paper, for each pair."""
    beta, smoothing = section.beta, section.label_smoothing
    if section.loss_type == "orpo":
        chosen, rejected = (policy / counts).unbind(1)
        log_odds = (chosen - rejected) - (
            torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
        )
        return -chosen - beta * logsigmoid(log_odds)
    if section.loss_type == "kto":
        # KTOTrainer.kto_loss: the second answer of each pair is to another prompt
        good, (policy, kl) = labels > 0, (policy[:, 0], policy[:, 1])
        divergence = (kl.detach() - reference[:, 1]).mean().clamp(min=0)
        ratios = policy - reference[:, 0]
        return torch.where(
            good,
            section.desirable_weight * (1 - torch.sigmoid(beta * (ratios - divergence))),
            section.undesirable_weight * (1 - torch.sigmoid(beta * (divergence - ratios))),
        )
    if section.length_normalized:
        policy, reference = policy / counts, reference / counts
    logits = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    return {
        "sigmoid": -logsigmoid(beta * logits) * (1 - smoothing)
        - logsigmoid(-beta * logits) * smoothing,
        "hinge": torch.relu(1 - beta * logits),
        "ipo": (logits - 1 / (2 * beta)) ** 2,
    }[section.loss_type]


def _train_plainly(model, plan, reference):
    """The loop that anyone would write: one batch, answers one by one, the mean over pairs."""
    section = plan.job.optimizer
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)
    loader = Loader(open_samples(plan.job), dp_rank=0, device="cpu")
    curve, samples = [], 0
    for step in range(STEPS):
        batches = loader.micro_batches(plan.batch, samples)
        optimizer.zero_grad()
        policy, counts = _log_probs(model, batches)
        counted = (counts > 0).all(1)
        with torch.no_grad():
            base = reference(batches)
        labels = [batch.pairs.is_desirable for batch in batches]
        labels = torch.zeros(len(counts)) if labels[0] is None else torch.cat(labels)
        losses = _published_loss(
            plan.job.preference, policy[counted], base[counted], counts[counted], labels[counted]
        )
        losses.mean().backward()
        norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params])))
        for param in params:
            param.grad *= min(1.0, section.max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(section, total_steps=plan.job.run.steps, step=step)
        optimizer.step()
        curve.append((float(losses.mean().detach()), norm))
        samples += plan.batch.global_batch_size
    return curve


def _whole(results):
    whole = {}
    for _, blocks in results:
        for tensor, box, values in blocks:
            target = whole.setdefault(tensor.name, np.full(tensor.shape, np.nan))
            target[plain_models.slices(box)] = values
    return whole


SMOOTH = ("preference.label_smoothing=0.2", "preference.beta=0.4")
MEAN = ("preference.length_normalized=true", "preference.beta=0.7")
KTO = (
    "preference.desirable_weight=0.8", "preference.undesirable_weight=1.3", "preference.beta=0.5", "data.loss_on=all",
)  # fmt: skip
LORA_CASES = [
    ("llama3", "tp2-pp2-sp", "sigmoid", SMOOTH),
    ("llama3", "cp2", "sigmoid", ("memory.recompute=full",)),
    ("llama3", "cp2-dp2", "ipo", ("parallel.cp_method=all_to_all",)),
    ("llama3", "dp3", "hinge", ("parallel.sharding=parameters",)),
    ("qwen3", "tp2-pp2", "ipo", (*MEAN, "schedule.name=zb_h1")),
    ("qwen2_moe", "dp2-ep2", "sigmoid", ("parallel.sharding=optimizer",)),
    ("llama3", "tp2-pp2-sp", "kto", KTO),
    ("llama3", "cp2", "kto", KTO),
    ("qwen3", "dp3", "kto", (*KTO, "parallel.sharding=parameters")),
    ("deepseek_v3", "tp2-pp2", "sigmoid", MEAN),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "layout", "loss", "options"), LORA_CASES)
def test_steps_on_adapters_are_those_of_peft_and_the_published_loss(
    tmp_path, kind, layout, loss, options
):
    model, done = adapted(kind, tmp_path, positions=SEQ_LEN)
    options = (f"preference.loss_type={loss}", *options)
    plan = _plan(done.model, layout, *options)
    results = run_grid(_train, plan.grid, plan.to_json(), done.base, done.uri)

    def reference(batches):
        with model.disable_adapter():
            return _log_probs(model.base_model.model, batches)[0]

    inner = model.base_model.model
    loss_options = [o for o in options if o.startswith(("preference.", "data."))]
    inner.requires_grad_(False)
    for name, param in inner.named_parameters():
        param.requires_grad_("lora_" in name)
    curve = _train_plainly(inner, _plan(done.model, "tp1", *loss_options), reference)
    for (ours, means), _ in results:
        np.testing.assert_allclose(ours, curve, rtol=LIMIT)
        assert abs(means[0][0] - means[0][1]) > 1e-3, "the reference is another model"
    whole, params = _whole(results), dict(model.named_parameters())
    for theirs, linear in linear_modules(done.model).items():
        for end, name in zip("AB", adapter_names(linear), strict=True):
            param = params.get(f"base_model.model.{theirs}.lora_{end}.default.weight")
            if param is not None:
                ours = torch.from_numpy(whole[name])
                assert plain_models.difference(ours, param.detach()) < LIMIT, name


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama3", "tp2-pp2"), ("qwen3", "cp2"), ("qwen2_moe", "dp2-ep2"), ("deepseek_v3", "tp2-dp3")],
)
def test_steps_of_the_odds_ratio_are_those_of_the_paper(tmp_path, kind, layout):
    theirs = hf_models.make_model(kind, positions=SEQ_LEN)
    done = imported(tmp_path, theirs)
    options = ("preference.loss_type=orpo", "preference.beta=0.3")
    plan = _plan(done.model, layout, *options)
    results = run_grid(_train, plan.grid, plan.to_json(), done.uri, "")
    curve = _train_plainly(
        theirs,
        _plan(done.model, "tp1", *options),
        lambda batches: torch.zeros(sum(len(b.pairs.counts) for b in batches) // 2, 2),
    )
    for (ours, _), _ in results:
        np.testing.assert_allclose(ours, curve, rtol=LIMIT)
    whole = _whole(results)
    theirs.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    for at in hf_tensors(done.model):
        parts = [whole[part.name] for part in at.parts]
        if at.expert >= 0:
            parts = [part[at.expert] for part in parts]
        rows = at.by_head(np.concatenate(parts))[: at.num_rows]
        ours = torch.from_numpy(rows.T if at.is_transposed else rows)
        assert plain_models.difference(ours, wanted[at.name]) < LIMIT, at.name


def test_packed_pairs_have_the_loss_and_gradient_of_pairs_one_a_row():
    """The same pairs, in rows of several and in rows of one."""
    options = (*PAIRS[:1], *PAIRS[2:], "preference.loss_type=orpo")
    assert_same_rows(_sums(options, window=64), _sums(options, window=1))


def assert_same_rows(packed, alone):
    assert packed[2] < alone[2], "rows with several pairs"
    assert packed[3] == alone[3] >= 8, "the same pairs"
    np.testing.assert_allclose(packed[0], alone[0], rtol=1e-12)
    assert plain_models.difference(packed[1], alone[1]) < 1e-12


def _sums(options, *, window):
    """Loss and gradient of the pairs of a small window, the number of rows, and of pairs."""
    plan = make_test_plan(
        *options, f"data.packing_window={window}", "run.eval_samples=0", "model.moe={}"
    )
    (module,) = make_stage_modules(plan.job.model)
    module.objective = PairObjective(plan.job.preference, torch.device("cpu"))
    documents = SyntheticDocuments(split="valid", seq_len=32, seed="0", loss_on="completion")
    documents.lengths, documents.shards = documents.lengths[:96], ((96, 0),)
    pairs = PairDocuments(documents, seq_len=64, multiple=8)
    source = PairedSource(pairs, window=window)
    loader = Loader(source, dp_rank=0, device="cpu")
    batch = make_batch(global_batch_size=source.num_windows, micro_batch_size=2, dp=1)
    batches, loss = loader.micro_batches(batch, 0), 0.0
    for each in batches:
        found = module.run(each, None)
        found.backward()
        loss += float(found.detach())
    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
    return loss, gradient, source.num_windows, sum(each.divisor for each in batches)
