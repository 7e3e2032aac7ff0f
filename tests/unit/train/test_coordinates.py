"""muP's own test: what blocks give out, and logits, are as large at any width after some steps."""

import numpy as np
import pytest
import torch

from raymega.messages import Requests
from raymega.model.layers.transformer_block import TransformerBlock
from raymega.train.build import build_parts
from raymega.train.module_hooks import hook_modules
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE

WIDTHS = (32, 256)
STEPS = 4
SEEDS = range(8)
"""Seeds over which sizes are averaged: of a narrow model one seed's sizes are as much as 1.6 times another's."""
RATES = {"adamw": 3e-3, "lion": 3e-3, "muon": 2e-2}


def _sizes(width, name, base, is_tied, seed):
    """Root mean squares of each block's output and of the last norm times the head, after STEPS."""
    plan = make_test_plan(
        *layout_overrides("tp1"), f"model.hidden_size={width}", f"model.num_heads={width // 16}",
        f"model.num_kv_heads={width // 16}", f"model.ffn_hidden_size={2 * width}", "model.num_layers=2",
        f"model.mup_base_width={base}", f"model.tie_word_embeddings={str(is_tied).lower()}",
        f"optimizer.name={name}", f"optimizer.lr={RATES[name]}", "optimizer.lr_schedule=constant",
        "optimizer.lr_warmup_steps=0", "data.global_batch_size=4", "schedule.micro_batch_size=4",
        "precision.dtype=float32", "optimizer.max_grad_norm=0", "run.eval_samples=0",
        f"run.seed={seed}",
    )  # fmt: skip
    parts = build_parts(plan, rank=0, groups=ALONE, device=torch.device("cpu"))
    state = TrainState()
    for _ in range(STEPS):
        state = train_step(parts, state, Requests(), is_recording=False).state
    outputs = []

    def see(seen):
        if seen.kind == "output":
            outputs.append(seen.tensor.detach())

    with hook_modules(parts.modules, see, only=TransformerBlock):
        train_step(parts, state, Requests(), is_recording=False)
    with torch.no_grad():
        outputs.append(parts.modules[0].head(outputs[-1]))
    return [float(x.square().mean().sqrt()) for x in outputs]


def _spread(name, *, base, is_tied):
    """Of each place, the largest size over the smallest, each the geometric mean over seeds."""
    means = [
        np.exp(np.mean([np.log(_sizes(w, name, base, is_tied, seed)) for seed in SEEDS], axis=0))
        for w in WIDTHS
    ]
    return [max(sizes) / min(sizes) for sizes in zip(*means, strict=True)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "is_tied"), [("adamw", True), ("adamw", False), ("lion", False), ("muon", True)]
)
def test_sizes_do_not_grow_with_the_width(name, is_tied):
    with_mup, without = (_spread(name, base=base, is_tied=is_tied) for base in (32, 0))
    assert max(with_mup) < 1.25
    assert max(without) > 2  # 8 times as wide: up to 8 for adamw and lion, sqrt(8) for muon
