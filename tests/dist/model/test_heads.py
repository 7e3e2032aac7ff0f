"""Heads without a vocabulary against transformers' classes: scores, training steps, and the way back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raymega.checkpoint.load.init_from import start_faults
from raymega.config.heads.section import HeadSection
from raymega.config.schema import CheckpointSection
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.names import hf_tensors
from raymega.data.samples import open_samples
from raymega.messages import Requests
from raymega.model.heads import objective
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references import hf_heads, hf_models, plain_models
from tests.support.references.imported import imported
from tests.support.references.plain_training import whole_weights

pytestmark = pytest.mark.dist

SCORES_LIMIT, TRAINING_LIMIT, STEPS = 1e-10, 1e-9, 3
ROWS = (
    "data.packing=best_fit", "data.packing_window=64", "data.document_multiple=4", "data.seq_len=40",
    "data.global_batch_size=5", "run.eval_samples=0",
)  # fmt: skip
OPTIMIZER = (
    "optimizer.lr_warmup_steps=1", "optimizer.lr=1e-2", "optimizer.weight_decay=0.3", "optimizer.eps=1e-6",
    "optimizer.max_grad_norm=0.5",
)  # fmt: skip


def _plan(done, layout, *options):
    fields = done.model.model_dump(mode="json")
    pairs = ("preference.loss_type=bradley_terry",) if done.model.head.kind == "reward" else ()
    return make_test_plan(
        *[f"model.{name}={json.dumps(value)}" for name, value in fields.items()],
        *layout_overrides(layout), f"checkpoint.init_from={done.uri}", *ROWS, *OPTIMIZER, *pairs, *options,
    )  # fmt: skip


def _train(env, plan_json):
    """Losses and norms, this rank's blocks of the trained weights, and the scores of the first step's documents."""
    plan, seen = read_plan(plan_json), []
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    init_from(parts, plan.job.checkpoint)
    kind = plan.job.model.head.kind
    own = objective.LOSSES.get(kind)

    def recording(scores, labels, section):
        seen.append(scores.detach().clone())
        return own(scores, labels, section)

    state, curve, accuracies = TrainState(), [], []
    if own:
        objective.LOSSES[kind] = recording
    try:
        for _ in range(STEPS):
            outcome = train_step(parts, state, Requests(), is_recording=False)
            state = outcome.state
            curve.append((outcome.loss, outcome.grad_norm))
            accuracies.append(outcome.pair_means.get("accuracy", 0.0))
    finally:
        if own:
            objective.LOSSES[kind] = own
    blocks = [
        (block.tensor, block.box, block.values.numpy().copy())
        for block in parts.optimizer.blocks()
        if block.kind == "model"
    ]
    first = seen[: len(seen) // STEPS]
    return (
        curve,
        accuracies,
        torch.cat([each.flatten() for each in first]) if first else None,
    ), blocks


CENTRED = ("preference.margin=0.3", "preference.center_rewards_coefficient=0.02")
CASES = [
    ("llama-sequence", "tp2-pp2-sp", ()),
    ("llama-sequence", "cp2", ("memory.recompute=full",)),
    ("llama-sequence", "dp3", ("parallel.sharding=parameters",)),
    ("llama-tokens", "tp2-sp-cp2", ()),
    ("llama-tokens", "tp2-pp2", ("schedule.name=zb_h1",)),
    ("llama-number", "cp2-dp2", ("parallel.cp_method=all_to_all",)),
    ("llama-reward", "tp2-pp2", CENTRED),
    ("llama-reward", "cp2", CENTRED),
    ("llama-reward", "dp3", (*CENTRED, "parallel.sharding=parameters")),
    ("qwen2_moe-sequence", "dp2-ep2", ()),
    ("gpt2-tokens", "tp1", ()),
    ("bert-sequence", "tp2-sp-pp2", ()),
    ("bert-sequence", "cp2", ("parallel.cp_method=all_gather",)),
    ("bert-tokens", "dp3", ()),
    ("bert-choices", "tp2-sp-cp2", ()),
    ("bert-choices", "dp3", ("parallel.sharding=parameters",)),
    ("megatron-choices", "tp2-pp2", ()),
    ("roberta-sequence", "cp2", ()),
    ("roberta-choices", "tp1", ()),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "layout", "options"), CASES)
def test_steps_are_those_of_transformers(tmp_path, kind, layout, options):
    theirs = hf_heads.make_model(kind)
    done = imported(tmp_path, theirs)
    plan = _plan(done, layout, *options)
    results = run_grid(_train, plan.grid, plan.to_json())
    plain = _plan(done, "tp1", *[o for o in options if o.startswith("preference.")])
    row = open_samples(plain.job).row(0)
    with torch.no_grad():
        wanted = hf_heads.losses(theirs, row, plain.job)[1]
    curve = hf_heads.train_plainly(theirs, plain, STEPS)
    assert curve[0][1] > plan.job.optimizer.max_grad_norm, "the gradient is clipped"
    for (ours, _, seen), _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
        # the first data-parallel rank reads the first row first
        if seen is not None and plan.grid.dp == 1:
            first = torch.cat([each.flatten() for each in wanted])
            assert plain_models.difference(seen[: len(first)], first) < SCORES_LIMIT
    whole = whole_weights(results)
    theirs.save_pretrained(tmp_path / "trained")
    weights = load_file(tmp_path / "trained" / "model.safetensors")
    for at in hf_tensors(done.model):
        parts = [whole[part.name] for part in at.parts]
        if at.expert >= 0:
            parts = [part[at.expert] for part in parts]
        rows = np.concatenate(parts)[: at.num_rows]
        ours = torch.from_numpy(rows.T if at.is_transposed else rows)
        # softmax does not see a bias of all keys: its gradient is rounding noise, which Adam scales
        is_noise = at.name.endswith(("self.key.bias", "c_attn.bias"))
        limit = 1e-3 if is_noise else TRAINING_LIMIT
        assert plain_models.difference(ours, weights[at.name]) < limit, at.name


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", hf_heads.KINDS)
def test_way_back_is_bit_exact_and_transformers_loads_it(tmp_path, kind):
    theirs = hf_heads.make_model(kind)
    done = imported(tmp_path, theirs)
    assert done.model.head.is_on
    hf_export(done.uri, tmp_path / "back")
    again, wanted = hf_heads.load_model(kind, tmp_path / "back"), theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, values in again.state_dict().items():
        assert torch.equal(values, wanted[name]), name
    tokens = torch.arange(3, 20)
    with torch.no_grad():
        ours, original = (hf_heads.scores(model, tokens) for model in (again, theirs))
    # weights that lie elsewhere in memory may be multiplied by another kernel
    assert plain_models.difference(ours, original) < 1e-14


@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_a_job_says_which_tensors_of_a_new_head_begin_anew(tmp_path, kind):
    done = imported(tmp_path, hf_models.make_model(kind))
    head = HeadSection(kind="sequence_classification", num_labels=3)
    model = done.model.model_copy(update={"head": head})
    (fault,) = start_faults(CheckpointSection(init_from=done.uri), model)
    lines = {"llama2": " checkpoint.init_ignore=[head.weight]", "llama3": ""}  # whose head is tied
    assert fault.remedy == f"set checkpoint.reinit=[head.score.weight]{lines[kind]}"
    ignored = () if kind == "llama3" else ("head.weight",)
    fields = {"init_from": done.uri, "reinit": ("head.score.*",), "init_ignore": ignored}
    assert start_faults(CheckpointSection(**fields), model) == []
