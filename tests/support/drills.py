"""Drills of the verify job on a sandbox that they share: what a fault does to a run of two ranks."""

from itertools import islice
from pathlib import Path

from raymega import api
from raymega.chaos.experiment import ChaosExperiment, DrillOptions, run_baseline, run_drill
from tests.support.command import VERIFY

STEPS = 10
COMMON = (
    f"run.steps={STEPS}", "run.eval_samples=0", "checkpoint.every=2", "tracking.mlflow_uri=off",
    "cluster.cpus_per_worker=1.0", "elastic.snapshot_every=1", "elastic.max_failures=20",
    "elastic.collective_timeout_s=10",
)  # fmt: skip
PATIENT = ("elastic.replan_after_s=60",)
IMPATIENT = ("elastic.replan_after_s=0.5", "elastic.min_workers=1")
LAYOUTS = {
    "pp2": ("parallel.pp=2", "parallel.dp=1"),
    "dp2": ("parallel.pp=1", "parallel.dp=2"),
}


class Drills:
    """Runs drills one after the other; the undisturbed run of each job is made once."""

    def __init__(self, box, folder: Path) -> None:
        self.box, self.folder = box, folder
        self._calm = {}
        self._num = 0

    def __call__(self, faults, *more, layout="pp2", num_nodes=3, scheduled_faults=(), **options):
        self._num += 1
        # a name of LAYOUTS, or settings of the test's own
        layout_settings = LAYOUTS[layout] if isinstance(layout, str) else layout
        overrides = (*COMMON, *layout_settings, *more)
        job = api.load_job(VERIFY, overrides)
        drill = ChaosExperiment(
            job_file=VERIFY, overrides=overrides, job=job, faults=faults,
            out=self.folder / f"{self._num:03d}", scheduled_faults=iter(scheduled_faults) if scheduled_faults else islice((), 0),
            options=DrillOptions(**{"nodes": num_nodes, "timeout_s": 240.0, **options}),
        )  # fmt: skip
        return run_drill(drill, self.box, lambda last: self._undisturbed(drill, layout, last))

    def _undisturbed(self, drill, layout, last):
        """Return the undisturbed run's events, cached by what changes its losses: layout, steps and data."""
        key = (layout, drill.job.run.steps, drill.job.data)
        if key not in self._calm:
            self._calm[key] = run_baseline(drill, self.box, last=last)
        return self._calm[key]
