"""BERT's norms after sums and before parts: masked-language loss against depth, the finding of Megatron-LM's first paper.

Shoeybi et al. 2019 moved BERT's norms before attention and feed-forward layer, because larger models got worse with norms after
the sums. Here the same sizes, samples, masks and steps are trained at each depth with both placements, on one core.

    python benchmarks/norm_placement.py --data corpus [--depths 2 6 12 24] [--steps N] [--lr LR] [--draw docs/img/norm-placement.svg]

``corpus`` is a folder of ``raymega data prepare --tokenizer bpe:1024``. A line of JSON for each run, with the mean loss of
its last steps; each step reads new text.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.one_rank import OneRank
from raymega.config.load import parse_mapping
from raymega.drawing.chart import Chart, Curve, draw_chart
from raymega.plan.run_plan import make_plan

PLACES = {"bert": "after sums (BERT)", "megatron_bert": "before parts (Megatron-LM)"}
VOCABULARY, WIDTH, SEQ_LEN, ROWS = 1024, 64, 64, 16
LAST_STEPS = 50


def plan_of(family, depth, options):
    """Return the plan of a run on one rank, as a user would write it."""
    # ids behind the tokenizer's stand for the mask and the ends of a row
    masking = {"mask_token_id": VOCABULARY, "cls_token_id": VOCABULARY + 1, "sep_token_id": VOCABULARY + 2}  # fmt: skip
    model = {
        "family": family, "num_layers": depth, "hidden_size": WIDTH, "num_heads": 4, "ffn_hidden_size": 4 * WIDTH,
        "vocab_size": VOCABULARY + 3, "max_positions": SEQ_LEN, "norm_eps": 1e-12,
    }  # fmt: skip
    raw = {
        "run": {"name": "norms", "steps": options.steps, "eval_samples": 0, "seed": 1},
        "model": model,
        "data": {"path": str(options.data), "seq_len": SEQ_LEN, "global_batch_size": ROWS, "masking": masking},
        "schedule": {"micro_batch_size": ROWS},
        "optimizer": {"lr": options.lr, "lr_warmup_steps": options.steps // 10},
        "precision": {"dtype": "float32"},
    }  # fmt: skip
    return make_plan(parse_mapping(raw).job())


def run_of(family, depth, options):
    """Train one model; return its facts, with the mean loss of the last steps."""
    step, start = OneRank(plan_of(family, depth, options)), time.process_time()
    losses = [step() for _ in range(options.steps)]
    return {
        "norms": PLACES[family], "depth": depth, "steps": options.steps, "lr": options.lr,
        "loss": round(fmean(losses[-LAST_STEPS:]), 4), "first_loss": round(losses[0], 3),
        "cpu_s": round(time.process_time() - start, 1),
    }  # fmt: skip


def drawn(runs):
    """Return the picture of losses by depth."""
    curves = []
    for place in PLACES.values():
        own = sorted((run for run in runs if run["norms"] == place), key=lambda run: run["depth"])
        xs, ys = ([run[key] for run in own] for key in ("depth", "loss"))
        curves.append(Curve(label=f"norms {place}", xs=xs, ys=ys))
    return draw_chart(Chart(title="loss of masked tokens by number of layers", curves=curves), alone=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 6, 12, 24])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--draw", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for depth in options.depths:
        for family in PLACES:
            runs.append(run_of(family, depth, options))
            print(json.dumps(runs[-1]), flush=True)
    if options.draw:
        options.draw.write_text(drawn(runs) + "\n")


if __name__ == "__main__":
    main()
