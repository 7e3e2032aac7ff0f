"""A run's callbacks and metrics of plug-ins, as a worker calls them.

The calls are in the training thread, on every rank: what a plug-in waits for, the step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from raymega.config.schema import Job
from raymega.errors import ConfigError
from raymega.parallel.comm.process_groups import Group
from raymega.plan.run_plan import RunPlan
from raymega.plugins import Plugin, call_plugin, registry_of

METRIC = "plugin/metric"
METHODS = ("step_begins", "step_ends", "evaluation_ends", "checkpoint_begins")
"""Methods of a callback: one that lacks some would end a run at its first evaluation or checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallbackSetup:
    """Arguments of a callback's code: the job, the rank that calls it, and the group of all ranks.

    A collective of ``raymega.parallel.comm.collectives`` over ``world`` that not all ranks call ends by its
    time-out, with the callback's name. Above 1,024 ranks these are all_reduce, all_gather, broadcast and barrier.
    """

    job: Job
    rank: int
    world_size: int
    world: Group


class Callback(Protocol):
    """Code that every rank calls during training; it may use the ranks' collectives if all ranks do."""

    def step_begins(self, step: int) -> None:
        """Process the begin of step ``step``, from 1."""

    def step_ends(self, step: int, metrics: Mapping[str, float]) -> None:
        """Process the metrics of a step that has updated the weights."""

    def evaluation_ends(self, step: int, metrics: Mapping[str, float]) -> None:
        """Process the metrics of an evaluation on held-out text after ``step``."""

    def checkpoint_begins(self, step: int) -> None:
        """Process that the state after ``step`` was handed to a save."""


class PluginHooks:
    """Callbacks and metrics of one rank; without plug-ins each call is an empty loop."""

    def __init__(self, plan: RunPlan, world: Group) -> None:
        """Import the code of the job's plug-ins, and make its callbacks; ``world`` is the group of all ranks."""
        job, rank, world_size = plan.job, world.index, plan.grid.world_size
        registry = registry_of(job.plugins.modules)
        setup = CallbackSetup(job=job, rank=rank, world_size=world_size, world=world)
        rows = [registry.find("callback", name) for name in job.plugins.callbacks]
        self._callbacks: list[tuple[Plugin, Callback]] = [(row, _made(row, setup)) for row in rows]
        metrics = [registry.find("metric", name) for name in job.plugins.metrics]
        self._metrics: list[tuple[Plugin, Any]] = [
            (row, job.plugins.code("metric", row.name)) for row in metrics
        ]

    def metrics(self, step: int, known: Mapping[str, float]) -> dict[str, float]:
        """Return the value of each metric, a function of the step and of the step's ``known`` metrics."""
        return {
            f"{METRIC}/{row.name}": _value(row, code, step, known) for row, code in self._metrics
        }

    def step_begins(self, step: int) -> None:
        """Tell the callbacks."""
        self._tell(lambda callback: callback.step_begins(step))

    def step_ends(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell the callbacks."""
        self._tell(lambda callback: callback.step_ends(step, metrics))

    def evaluation_ends(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell the callbacks."""
        self._tell(lambda callback: callback.evaluation_ends(step, metrics))

    def checkpoint_begins(self, step: int, *, is_due: bool) -> None:
        """Tell the callbacks if a checkpoint was begun."""
        if is_due:
            self._tell(lambda callback: callback.checkpoint_begins(step))

    def _tell(self, call: Callable[[Callback], None]) -> None:
        for row, callback in self._callbacks:
            _call(row, call, callback)


def _made(row: Plugin, setup: CallbackSetup) -> Callback:
    code = setup.job.plugins.code("callback", row.name)
    made: Callback = call_plugin(row, lambda: code(setup))
    missing = [name for name in METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            fact=f"callback {row.name} has no {', '.join(missing)}",
            rule=f"a callback has the methods {', '.join(METHODS)}",
            remedy=f"write them in {row.target}; one that has nothing to do may do nothing",
        )
    return made


def _call(row: Plugin, call: Callable[[Callback], None], callback: Callback) -> None:
    call_plugin(row, lambda: call(callback))


def _value(row: Plugin, code: Any, step: int, known: Mapping[str, float]) -> float:
    value = call_plugin(row, lambda: float(code(step, known)))
    if isfinite(value):
        return value
    raise ConfigError(
        fact=f"metric {row.name} returned {value} after step {step}",
        rule="a metric is a finite number",
        remedy=f"correct {row.target}",
    )
