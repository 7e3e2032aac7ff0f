"""Cost of evaluation tasks on workers beside a run, per step: runs with them and without, one after the other.

Ranks also wait for each micro-batch as they would for an accelerator (benchmarks/waiting_entry.py), so that the cores
are free for the workers beside. A pair is one run with an evaluation every few steps, and one without; both save.

    python benchmarks/tasks_beside.py [--pairs 3] [--steps 24] [--every 4]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from raymega import api
from raymega.config.schema import Job

VERIFY = Path(__file__).parents[1] / "jobs" / "verify.yaml"
ENTRY = "benchmarks.waiting_entry"
FIRST_STEPS = 3
"""Steps that are not counted: they allocate, and load what is loaded lazily."""
NUM_PASSAGES = 200


def data_in(folder: Path) -> None:
    """Tokens to train on, and passages to evaluate."""
    words = [
        "the",
        "a",
        "cat",
        "dog",
        "hat",
        "mat",
        "sat",
        "ran",
        "on",
        "under",
        "with",
        "and",
        "then",
        "said",
        "red",
        "blue",
        "old",
        "new",
    ]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(words, k=12)) for _ in range(NUM_PASSAGES)]
    passages = folder / "passages.jsonl"
    passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, "-m", "raymega", "data", "prepare", str(passages), "--out"]
    more = [
        str(folder / "tokens"),
        "--tokenizer",
        "bytes",
        "--valid-fraction",
        "0.1",
        "--address",
        "local",
    ]
    subprocess.run([*command, *more], check=True, capture_output=True)


def job_of(folder: Path, name: str, options: argparse.Namespace, *, has_tasks: bool) -> Job:
    """Two pipeline ranks; with tasks beside every ``--every`` steps, or none."""
    settings = [
        f"run.name={name}", f"run.steps={options.steps}", "run.eval_samples=0", "model.vocab_size=257",
        f"data.path={folder}/tokens", f"checkpoint.uri={folder}/runs", "tracking.mlflow_uri=off",
        f"checkpoint.every={options.every}",
    ]  # fmt: skip
    if has_tasks:
        settings += [
            f"run.eval_tasks=[{{task: lambada, path: {folder}/passages.jsonl}}]",
            f"run.eval_tasks_every={options.every}", "run.eval_tasks_on=beside",
        ]  # fmt: skip
    return api.load_job(VERIFY, settings, is_for_training=True)


def run(job: Job) -> tuple[float, int]:
    """The median step in seconds, and the number of evaluations."""
    api.train(job, address="local", entry=ENTRY)
    lines = (api.local_folder(job) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record["step_time_s"] for record in records if record["event"] == "step"]
    return statistics.median(steps[FIRST_STEPS:]), sum(r["event"] == "tasks" for r in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data_in(folder)
        for number in range(options.pairs):
            plain_s, _ = run(job_of(folder, f"plain-{number}", options, has_tasks=False))
            beside_s, count = run(job_of(folder, f"beside-{number}", options, has_tasks=True))
            ratios.append(beside_s / plain_s)
            pair = {"plain_step_s": plain_s, "beside_step_s": beside_s, "evaluations": count}
            print(json.dumps(pair), flush=True)
    print(json.dumps({"overhead_percent": 100 * (statistics.median(ratios) - 1)}))


if __name__ == "__main__":
    main()
