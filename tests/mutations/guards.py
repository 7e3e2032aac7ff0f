"""Planted mistakes in the guards of a run, and what each of them then lets pass or accuses.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GuardMutation:
    """A row: ``old`` in the package's ``file`` becomes ``new``; ``caught`` is what is wrong then."""

    name: str
    file: str
    old: str
    new: str
    caught: str


GUARD_MUTATIONS = (
    GuardMutation(
        name="only the loss must be finite",
        file="train/bad_steps.py",
        old="if not (isfinite(loss) and isfinite(grad_norm)):",
        new="if not isfinite(loss):",
        caught="a gradient norm that is not finite passes",
    ),
    GuardMutation(
        name="a spike is held against the largest of the steps before",
        file="train/bad_steps.py",
        old="usual = median(before[-section.spike_window :])",
        new="usual = max(before[-section.spike_window :])",
        caught="a spike passes behind another one",
    ),
    GuardMutation(
        name="batches are left out without a bound",
        file="train/bad_steps.py",
        old='case "skip" if state.bad_steps < section.max_bad_steps:',
        new='case "skip":',
        caught="batches are left out for ever",
    ),
    GuardMutation(
        name="a second pass is taken whatever it gave",
        file="train/bad_steps.py",
        old='case "rerun" if numbers.kind == "spike":',
        new='case "rerun":',
        caught="numbers that are not finite are kept",
    ),
    GuardMutation(
        name="the deadline of a hang is not learned from steps",
        file="orchestrate/driver/hang_detector.py",
        old="return min(max(MEDIANS * usual_s + MARGIN_S, self._least_s), self._most_s)",
        new="return self._most_s",
        caught="a stopped process is not found in time",
    ),
    GuardMutation(
        name="a silent process is taken for a stopped one",
        file="orchestrate/driver/hang_detector.py",
        old='if self._states.get(rank) == "T":',
        new="if self._states.get(rank):",
        caught="a busy process is accused",
    ),
    GuardMutation(
        name="looks of before the last sign count",
        file="orchestrate/driver/hang_detector.py",
        old="if len(samples) < 2 or samples[0][0] < since_s:",
        new="if len(samples) < 2:",
        caught="a rank that has moved since is accused",
    ),
    GuardMutation(
        name="a thread that computes counts as one that stands still",
        file="orchestrate/driver/hang_detector.py",
        old="return is_still and not second.is_patient and busy_s < BUSY_SHARE",
        new="return is_still and not second.is_patient or busy_s < BUSY_SHARE",
        caught="a rank that computes is accused",
    ),
    GuardMutation(
        name="a digest's factors are even",
        file="train/replica_divergence.py",
        old=".mul_(2).add_(1)",
        new=".mul_(2)",
        caught="a flipped bit is not seen",
    ),
    GuardMutation(
        name="context-parallel replicas are not compared",
        file="train/replica_divergence.py",
        old='return grid.group("tp" if what == SHARED else ("cp", "dp"), rank)',
        new='return grid.group("tp" if what == SHARED else "dp", rank)',
        caught="cp replicas that differ are not seen",
    ),
    GuardMutation(
        name="the first of two that differ is believed",
        file="train/replica_divergence.py",
        old="if 2 * count <= len(group):",
        new="if 2 * count < len(group):",
        caught="one of two replicas is accused alone",
    ),
    GuardMutation(
        name="one look makes a straggler",
        file="orchestrate/driver/rank_reports.py",
        old="if samples == NUM_SAMPLES",
        new="if samples == 1",
        caught="a passing disturbance is a straggler",
    ),
    GuardMutation(
        name="ranks are held against those of other stages",
        file="orchestrate/driver/rank_reports.py",
        old="_median_without(by_stage[stage], work_s[rank])",
        new="_median_without(sorted(work_s.values()), work_s[rank])",
        caught="a stage with more work is a straggler",
    ),
)


def outcome(_folder: Path) -> str:
    """The first thing that the guards of this package do wrong, or that they are sound."""
    for guard in (_numbers, _hangs, _divergence, _stragglers):
        for wrong in guard():
            return wrong
    return "sound"


def _numbers() -> Iterator[str]:
    from raymega.config.elastic import ElasticSection
    from raymega.train.bad_steps import BadNumbers, BadStepAction, decide, detect_bad_step
    from raymega.train.state import TrainState

    section = ElasticSection(spike_window=4, spike_loss=3.0, on_nan="skip", max_bad_steps=2)
    if detect_bad_step(section, TrainState(), loss=1.0, grad_norm=nan) is None:
        yield "a gradient norm that is not finite passes"
    before = TrainState(losses=(1.0, 9.0, 1.0, 1.0), grad_norms=(1.0,) * 4)
    if detect_bad_step(section, before, loss=5.0, grad_norm=1.0) is None:
        yield "a spike passes behind another one"
    bad = BadNumbers(kind="nan", fact="", policy="skip")
    if decide(section, TrainState(bad_steps=2), bad) is not BadStepAction.STOP:
        yield "batches are left out for ever"
    again = BadNumbers(kind="nan", fact="", policy="rerun")
    if decide(section, TrainState(), again) is not BadStepAction.STOP:
        yield "numbers that are not finite are kept"


def _hangs() -> Iterator[str]:
    from raymega.orchestrate.core.worker_group_api import ProcessStatus
    from tests.unit.orchestrate.driver import test_hang_detector as stage

    def silent(state: str) -> bool:
        watch = stage.make_watch()
        stage.answer(watch, (0, 1), 10.0)
        stage.answer(watch, (0,), 12.7)
        watch.observe(ProcessStatus(rank=1, state=state), 12.7)
        return watch.hang(12.7, last_sign_s=12.7, is_training=True) is not None

    if not silent("T"):
        yield "a stopped process is not found in time"
    if silent("R"):
        yield "a busy process is accused"

    def still(second: object, *, last_sign_s: float) -> bool:
        watch = stage.make_watch()
        stage.look(watch, 12.2, stage.WAITING, stage.STUCK)
        stage.look(watch, 12.7, stage.WAITING, second)
        return watch.hang(60.0, last_sign_s=last_sign_s, is_training=True) is not None

    if still(stage.STUCK, last_sign_s=12.3):
        yield "a rank that has moved since is accused"
    if still(stage.replace(stage.STUCK, cpu_s=3.2), last_sign_s=10.0):
        yield "a rank that computes is accused"


def _divergence() -> Iterator[str]:
    import torch

    from raymega.plan.grid import Grid
    from raymega.train.replica_divergence import digest, find_differences

    device, flipped = torch.device("cpu"), torch.ones(3)
    flipped.view(torch.int32)[0] ^= 1
    if int(digest([flipped], device)) == int(digest([torch.ones(3)], device)):
        yield "a flipped bit is not seen"
    two = [[7, 0, 1], [8, 0, 1]]
    if not find_differences(two, Grid(cp=2)):
        yield "cp replicas that differ are not seen"
    (found,) = find_differences(two, Grid(dp=2))
    if found.odd != (0, 1):
        yield "one of two replicas is accused alone"


def _stragglers() -> Iterator[str]:
    from raymega.orchestrate.driver.rank_reports import Stragglers, ratios
    from tests.unit.orchestrate.driver.test_rank_reports import EVEN, GRID

    if Stragglers(ratio=1.5).observe(dict(ratios(EVEN | {1: 9.0}, GRID))):
        yield "a passing disturbance is a straggler"
    watched, found = Stragglers(ratio=1.5), dict(ratios(EVEN, GRID))
    if watched.observe(found) or watched.observe(found):
        yield "a stage with more work is a straggler"
