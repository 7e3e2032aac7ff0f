"""What real ranks compute in float64, and the bytes of a checkpoint that they save; run as a process.

Kernels are chosen by the CPU when torch is loaded, so the environment of :data:`ENVIRONMENT` must be
there before: :func:`computed` starts a process that has it. Ranks are forked from that process, which
has torch loaded and uses none of it, and so cost no import of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from tests.support.jobs import VERIFY, layout_overrides

ENVIRONMENT = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500
"""Of all of it, and of each of its worlds of ranks: a guard against a hang alone."""
STEPS = 2
SMALL = ("data.global_batch_size=8",)
SAVED = "tp2-pp2-dp2"
"""The layout whose ranks save."""
TINY = (
    "model.num_layers=2", "model.hidden_size=16", "model.num_heads=4", "model.num_kv_heads=2",
    "model.ffn_hidden_size=24", "model.vocab_size=64", "model.make_vocab_size_divisible_by=16", "checkpoint.uri=/golden",
    "parallel.sharding=optimizer",
)  # fmt: skip
SHRUNK = (
    "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=256", "model.max_positions=64",
    "model.moe.intermediate_size=32", "schedule.micro_batch_size=2",
)  # fmt: skip
"""What is smaller than in the demo job, of which all else that says how it is laid out is kept."""


def _demo() -> list[str]:
    job = yaml.safe_load(VERIFY.with_name("demo.yaml").read_text())
    given = [
        f"{section}.{field}={json.dumps(value)}"
        for section in ("model", "parallel", "schedule")
        for field, value in job[section].items()
    ]
    return [*given, *SHRUNK]


def runs() -> dict[str, list[str]]:
    """Overrides of the verify job, by what they are to show."""
    one = layout_overrides("one")
    return {
        "one-rank": one,
        "tp2-cp2-sp": layout_overrides("tp2-cp2-sp"),
        "pp2-dp2-zb_h1-gradients": [
            *layout_overrides("pp2-dp2"), "schedule.name=zb_h1", "parallel.sharding=gradients",
        ],
        "tp2-pp2-dp2-optimizer": [*layout_overrides("tp2-pp2-dp2"), "parallel.sharding=optimizer"],
        "dp2-parameters": [*layout_overrides("dp2"), "parallel.sharding=parameters"],
        "demo": _demo(),
        "gpt2-dropout": [
            *one, "model.family=gpt2", "model.num_kv_heads=num_heads", "model.hidden_dropout=0.1",
        ],
        "qwen3-muon": [*one, "model.family=qwen3", "optimizer.name=muon"],
        "packed": [*one, "data.packing=best_fit", "model.tie_word_embeddings=false"],
        "latent-ahead": [
            *one, "model.num_kv_heads=num_heads", "model.mla.kv_lora_rank=8", "model.mla.qk_nope_head_dim=4",
            "model.mla.qk_rope_head_dim=4", "model.mla.v_head_dim=4", "model.num_nextn_predict_layers=1",
        ],
    }  # fmt: skip


@cache
def computed() -> dict[str, Any]:
    """What a process with pinned kernels finds: ``curves``, and the saved ``checkpoint``."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=ROOT, env=inherited | ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _compute() -> dict[str, Any]:
    from tests.golden.saving import saved
    from tests.support import ranks, training

    fork = multiprocessing.get_context("fork")
    with patch.object(ranks, "_forkserver", lambda: fork), tempfile.TemporaryDirectory() as folder:
        curves = {
            name: training.train([*SMALL, *overrides], steps=STEPS, timeout=TIMEOUT_S)[0][0]
            for name, overrides in runs().items()
        }
        checkpoint = saved(
            [*SMALL, *layout_overrides(SAVED), *TINY], Path(folder), timeout_s=TIMEOUT_S
        )
    return {"curves": curves, "checkpoint": checkpoint}


if __name__ == "__main__":
    print(json.dumps(_compute()))
