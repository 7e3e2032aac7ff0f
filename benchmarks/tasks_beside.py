"""Cost of evaluation tasks on workers beside a run, per step: runs with them and without, one after the other.

Ranks also wait for each micro-batch as they would for an accelerator (benchmarks/waiting_entry.py), so that the cores
are free for the workers beside. A pair is one run with an evaluation every few steps, and one without; both save.
CPU seconds are those of the training ranks; on a machine that others use, trust them rather than the wall time.

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

from benchmarks.snapshots import cpu_s
from raymega import api
from raymega.config.schema import Job
from raymega.events import RunEvent, StepFinished, TasksEvaluated, WorkersStarted

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


class Watcher:
    """Sink that samples the training ranks' CPU seconds at each step, and counts evaluations."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.walls_s: list[float] = []
        self.cpus_s: list[float] = []
        self.evaluations = 0

    def emit(self, event: RunEvent) -> None:
        match event:
            case WorkersStarted():
                self.pids = list(event.pids.values())
            case StepFinished():
                self.walls_s.append(event.metrics["train/step_time_s"])
                self.cpus_s.append(sum(map(cpu_s, self.pids)))
            case TasksEvaluated():
                self.evaluations += 1

    def close(self, timeout_s: float) -> None:
        """Nothing is open."""


def run(job: Job) -> tuple[float, float, int]:
    """The median step in seconds, CPU seconds of the ranks a step, and the number of evaluations."""
    watcher = Watcher()
    api.train(job, address="local", entry=ENTRY, sinks=(watcher,))
    counted = watcher.cpus_s[FIRST_STEPS:]
    cpu_step_s = (counted[-1] - counted[0]) / (len(counted) - 1)
    return statistics.median(watcher.walls_s[FIRST_STEPS:]), cpu_step_s, watcher.evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    walls, cpus = [], []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data_in(folder)
        for number in range(options.pairs):
            plain = run(job_of(folder, f"plain-{number}", options, has_tasks=False))
            beside = run(job_of(folder, f"beside-{number}", options, has_tasks=True))
            walls.append(beside[0] / plain[0])
            cpus.append(beside[1] / plain[1])
            print(json.dumps({"plain": plain, "beside": beside}), flush=True)
    facts = {"wall": statistics.median(walls), "cpu": statistics.median(cpus)}
    print(
        json.dumps({f"overhead_{name}_percent": 100 * (each - 1) for name, each in facts.items()})
    )


if __name__ == "__main__":
    main()
