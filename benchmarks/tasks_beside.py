"""Cost of evaluation tasks on workers beside a run: pairs of runs with them and without.

Ranks also wait for each micro-batch as they would for an accelerator (benchmarks/waiting_entry.py), so that the cores
are free for the workers beside. A pair is one run with an evaluation every few steps, and one without; both save. The
first of a pair is by turns the one and the other. A run's figure is the mean of its steps: a median would hide an
evaluation that slows few of them. The steps before the first evaluation's end, while the workers start, are apart.
CPU seconds are those of the training ranks; on a machine that others use, trust them rather than the wall time.

    python -m benchmarks.tasks_beside [--pairs 5] [--steps 32] [--every 4]

The last line has the medians over the pairs with their intervals: what evaluation adds to a step, in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import median
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
    more = [str(folder / "tokens"), "--tokenizer", "bytes", "--valid-fraction", "0.1"]
    subprocess.run([*command, *more, "--address", "local"], check=True, capture_output=True)


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
    """Sink that samples the training ranks' CPU seconds at each step, and notes when the first evaluation ended."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.walls_s: list[float] = []
        self.cpus_s: list[float] = []
        self.evaluations = 0
        # number of steps that were finished when the first evaluation ended
        self.first_done = 0

    def emit(self, event: RunEvent) -> None:
        match event:
            case WorkersStarted():
                self.pids = list(event.pids.values())
            case StepFinished():
                self.walls_s.append(event.metrics["train/step_time_s"])
                self.cpus_s.append(sum(map(cpu_s, self.pids)))
            case TasksEvaluated():
                self.evaluations += 1
                self.first_done = self.first_done or len(self.walls_s)

    def close(self, timeout_s: float) -> None:
        """Nothing is open."""


def run(job: Job) -> Watcher:
    watcher = Watcher()
    api.train(job, address="local", entry=ENTRY, sinks=(watcher,))
    return watcher


def percent_more(beside: Watcher, plain: Watcher) -> dict[str, float]:
    """Return what evaluation adds to a step, in percent: to all steps, to those while its workers run, and in CPU time."""
    # workers beside load torch until the first evaluation: steady state is counted from there
    started = beside.first_done
    assert FIRST_STEPS < started < len(beside.walls_s) - 1, "more --steps: the workers took long"

    def mean_s(watcher: Watcher, first: int) -> float:
        return statistics.mean(watcher.walls_s[first:])

    def cpu_step_s(watcher: Watcher) -> float:
        return watcher.cpus_s[-1] - watcher.cpus_s[started - 1]

    ratios = {
        "wall_with_start": mean_s(beside, FIRST_STEPS) / mean_s(plain, FIRST_STEPS),
        "wall": mean_s(beside, started) / mean_s(plain, started),
        "cpu": cpu_step_s(beside) / cpu_step_s(plain),
    }
    return {name: round(100 * (ratio - 1), 3) for name, ratio in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data_in(folder)
        for number in range(options.pairs):
            ran = {}
            # by turns, so that neither is always the one on a warmer machine
            for kind in ("plain", "beside") if number % 2 else ("beside", "plain"):
                name = f"{kind}-{number}"
                ran[kind] = run(job_of(folder, name, options, has_tasks=kind == "beside"))
            found.append(percent_more(ran["beside"], ran["plain"]))
            step_s = statistics.median(ran["plain"].walls_s)
            facts = {"step_s": round(step_s, 4), "evaluations": ran["beside"].evaluations}
            print(json.dumps({"pair": number, **facts, **found[-1]}), flush=True)
    # of pairs: a busy minute slows both runs of one
    medians = {
        f"{name}_percent": asdict(median([each[name] for each in found])) for name in found[0]
    }
    print(json.dumps(medians | {"pairs": len(found), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
