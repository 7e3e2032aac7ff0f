"""Verdicts of drills on a run and a cluster that only pretend: what must not pass."""

from signal import SIGKILL
from types import SimpleNamespace

import pytest

from raymega import api
from raymega.chaos import experiment
from raymega.chaos.chaos_run import ChaosRun
from raymega.chaos.experiment import NO_FAULT, ChaosExperiment, DrillOptions, run_drill
from raymega.chaos.faults import ChaosFault
from raymega.errors import PreemptedError
from tests.support.command import VERIFY
from tests.unit.chaos.test_time_accounting import attempt, injected, step

STEPS = 4
BOX = SimpleNamespace(fill=lambda _: None, clear=lambda: None, leftovers=list)
CALM = [attempt(1, 0), *(step(n + 1, n) for n in range(1, STEPS + 1))]


def _verdict(monkeypatch, tmp_path, *, code=0, last=STEPS, faults=(), is_stopped=False):
    """Return the faults of a drill whose run made ``last`` steps and ended with ``code``."""
    output = CALM[: last + 1]
    driver = SimpleNamespace(output=output, begun_s=[0.0], pid=-1)
    done = SimpleNamespace(
        run=lambda timeout_s: code, driver=driver, injected_faults=faults, memory=[], is_stopped=is_stopped,
        injector=SimpleNamespace(folder=tmp_path / "run" / "chaos"),
    )  # fmt: skip
    monkeypatch.setattr(experiment, "_chaos_run", lambda *_, **__: done)
    monkeypatch.setattr(experiment, "is_alive", lambda _: False)
    drill = ChaosExperiment(
        job_file=VERIFY, overrides=(), job=api.load_job(VERIFY, (f"run.steps={STEPS}",)), out=tmp_path,
        options=DrillOptions(mtbf_s=9.0),
    )  # fmt: skip
    return run_drill(drill, BOX, lambda end: CALM[: end + 1]).faults


def test_a_drill_without_a_fault_does_not_pass(monkeypatch, tmp_path):
    slow = [injected(2.5, "store-slow")]
    assert _verdict(monkeypatch, tmp_path, faults=slow) == []
    assert _verdict(monkeypatch, tmp_path) == [NO_FAULT]


def test_a_run_that_ends_early_as_if_it_were_whole_does_not_pass(monkeypatch, tmp_path):
    slow = [injected(2.5, "store-slow")]
    assert _verdict(monkeypatch, tmp_path, faults=slow, last=3) == [
        "the run ended after step 3 of 4"
    ]
    stopped = {"faults": slow, "last": 3, "is_stopped": True}
    assert _verdict(monkeypatch, tmp_path, code=PreemptedError.exit_code, **stopped) == []


@pytest.mark.parametrize(
    ("code", "is_continued"),
    [(1, False), (5, False), (0, True), (PreemptedError.exit_code, True), (-SIGKILL, True)],
)
def test_a_driver_that_fails_by_itself_after_a_fault_is_not_started_again(code, is_continued):
    started = []
    driver = SimpleNamespace(
        code=code, begun_s=[1.0], read_output=list, start=lambda: started.append(1)
    )
    run = ChaosRun(
        driver=driver, injector=SimpleNamespace(undo_what_is_due=lambda: None), world_size=2,
        faults=[ChaosFault(kind="stop-driver", phase="step", at=1)],
        injected_faults=[injected(2.0, "stop-driver")], _num_closed=1,
    )  # fmt: skip
    assert run._tick() == (None if is_continued else code)
    assert bool(started) == is_continued
