"""Seconds to open a blend of many datasets, and to plan the job that names them.

Megatron-DeepSpeed took 2,000 s for 2,419 files. The bar is 0.1 s for 1,000 sources.

    python -m benchmarks.many_sources [--sources 1000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.measure import median, timed
from raymega.config.load import parse_job
from raymega.config.schema import Job
from raymega.data.samples import open_samples
from raymega.plan.run_plan import make_plan
from tests.unit.data.datasets import write_dataset

JOB = Path(__file__).parents[1] / "jobs" / "verify.yaml"
FAR = 10**6
"""Sample that is read first: no rank has computed anything before it."""


def job_of(folder: Path, number: int) -> Job:
    """Write ``number`` small datasets, and return the job that blends them with seven weights."""
    for index in range(number):
        (folder / f"source-{index}").mkdir()
        write_dataset(folder / f"source-{index}", train=(250,))
    entries = ", ".join(
        f"{{path: {folder}/source-{index}, weight: {1 + index % 7}}}" for index in range(number)
    )
    settings = ("data.path=none", f"data.sources=[{entries}]", "data.seq_len=8")
    return parse_job(JOB, settings).job()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    row: dict[str, object] = {"sources": options.sources, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder), options.sources)
        # the row itself is read from one dataset: what counts is to find it
        works = {
            "plan": lambda: make_plan(job),
            "open": lambda: open_samples(job),
            "open and read one row": lambda: open_samples(job).row(FAR),
        }
        for name, work in works.items():
            samples = [timed(work) for _ in range(options.rounds + 1)][1:]
            wall_s, cpu_s = (
                median([getattr(each, clock) for each in samples]).value
                for clock in ("wall_s", "cpu_s")
            )
            print(f"{name:22} {wall_s:8.4f} s, {cpu_s:8.4f} s of a CPU")
            row[name] = {"wall_s": wall_s, "cpu_s": cpu_s}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
