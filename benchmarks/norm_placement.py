"""BERT's norms after sums and before parts: masked-language loss against depth, the finding of Megatron-LM's first paper.

Shoeybi et al. 2019 moved BERT's norms before attention and feed-forward layer, because larger models got worse with norms after
the sums. Here the same sizes, samples, masks and steps are trained at each depth with both placements, on one core.

    python -m benchmarks.norm_placement --data corpus [--depths 4 12 24] [--steps N] [--lr LR] [--runs FILE] [--draw docs/img/norm-placement.svg]

``corpus`` is a folder of ``raymega data prepare --tokenizer bpe:1024``. A line of JSON for each run, with the mean loss of
its last steps, also appended to FILE; each step reads new text. The picture has all runs of FILE with these steps and this rate.
Initial weights have the gain of BERT-Large's: 0.02 there, times sqrt(1024 / 64) here. With 0.02 at this width each block
would add next to nothing at first, and the placement would not matter.
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
LAST_STEPS, EVERY = 50, 25
GAIN = 0.02 * 1024**0.5
"""Standard deviation of BERT-Large's initial weights times the square root of its width."""


def plan_of(family, depth, options):
    """Return the plan of a run on one rank, as a user would write it."""
    # ids behind the tokenizer's stand for the mask and the ends of a row
    masking = {"mask_token_id": VOCABULARY, "cls_token_id": VOCABULARY + 1, "sep_token_id": VOCABULARY + 2}  # fmt: skip
    model = {
        "family": family, "num_layers": depth, "hidden_size": WIDTH, "num_heads": 4, "ffn_hidden_size": 4 * WIDTH,
        "vocab_size": VOCABULARY + 3, "max_positions": SEQ_LEN, "norm_eps": 1e-12,
        "initializer_range": GAIN / WIDTH**0.5,
    }  # fmt: skip
    raw = {
        "run": {"name": "norms", "steps": options.steps, "eval_samples": 0, "seed": 1},
        "model": model,
        "data": {"path": str(options.data), "seq_len": SEQ_LEN, "global_batch_size": ROWS, "masking": masking},
        "schedule": {"micro_batch_size": ROWS},
        "optimizer": {"lr": options.lr, "lr_warmup_steps": options.warmup_steps},
        "precision": {"dtype": "float32"},
    }  # fmt: skip
    return make_plan(parse_mapping(raw).job())


def run_of(family, depth, options):
    """Train one model; return its facts, with the mean loss of the last steps."""
    step, start = OneRank(plan_of(family, depth, options)), time.process_time()
    losses = [step() for _ in range(options.steps)]
    return {
        "norms": PLACES[family], "depth": depth, "steps": options.steps, "lr": options.lr,
        "warmup_steps": options.warmup_steps, "loss": round(fmean(losses[-LAST_STEPS:]), 4), "first_loss": round(losses[0], 3),
        "losses": [round(fmean(losses[at : at + EVERY]), 3) for at in range(0, len(losses), EVERY)],
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
    parser.add_argument("--depths", type=int, nargs="+", default=[24, 12, 4])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--draw", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.runs.read_text().splitlines() if options.runs and options.runs.exists() else []
    alike = {"steps": options.steps, "lr": options.lr, "warmup_steps": options.warmup_steps}
    runs = [run for run in map(json.loads, lines) if alike.items() <= run.items()]
    for depth in options.depths:
        for family in PLACES:
            if any((run["depth"], run["norms"]) == (depth, PLACES[family]) for run in runs):
                continue
            runs.append(run_of(family, depth, options))
            print(line := json.dumps(runs[-1]), flush=True)
            if options.runs:
                with options.runs.open("a") as file:
                    file.write(line + "\n")
    if options.draw:
        options.draw.write_text(drawn(runs) + "\n")


if __name__ == "__main__":
    main()
