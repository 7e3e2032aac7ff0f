"""`raymega verify` of shipped jobs on a GPU, beside one rank on the CPU: a part of `gpu_day.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import Setting

ROOT = Path(__file__).parents[1]
JOBS = (
    "verify", "deepseek-v3-2048gpu", "qwen3-next-80b-a3b-64gpu", "t5", "bert", "classify", "lora", "dpo",
)  # fmt: skip
"""Jobs that have every kind of layer, of head and of loss between them."""
RUNS = (
    *((job, "float64") for job in JOBS),
    ("verify", "bfloat16"),
    ("qwen3-next-80b-a3b-64gpu", "bfloat16"),
)
AT_ONCE = 10
"""Number of jobs that share the GPU: each is small, and the CPU's run takes most of the time."""


def measure_verify(setting: Setting) -> dict[str, Any]:
    """Return each job's largest deviation from the CPU's run in float64, or what failed.

    In bfloat16 deviations are multiples of the spread of roundings on the CPU.
    """
    runs = RUNS[:1] if setting.is_small else RUNS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(pool.map(_verified, runs))
    # the stand-in computes nothing, so that a run there ends without a token
    bad = [name for name, verdict in found.items() if not verdict.get("passed")]
    return {"jobs": found, "not_the_same": [] if setting.is_stand_in else bad}


def _verified(run: tuple[str, str]) -> tuple[str, dict[str, Any]]:
    job, precision = run
    words = [
        *(sys.executable, "-m", "raymega", "verify", f"jobs/{job}.yaml", "--json"),
        *("--device", "cuda", "--precision", precision, "--timeout-s", "300"),
        # nothing is written there
        *("--set", "checkpoint.uri=/tmp/raymega-gpu-day"),
    ]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    verdict = next((line for line in lines if line.get("event") == "verdict"), None)
    if verdict is None:
        return f"{job}, {precision}", {"failure": ended.stderr[-1500:]}
    keys = ("passed", "layouts", "largest", "seconds")
    told = {key: verdict[key] for key in keys}
    # each layout that failed, and where first
    told["failed"] = [
        {key: line.get(key) for key in ("layout", "failure", "first_above_limit")}
        for line in lines
        if line.get("event") == "layout" and not line["passed"]
    ]
    return f"{job}, {precision}", told
