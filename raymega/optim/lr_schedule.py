"""Learning-rate schedules as pure functions of the update's number: linear warm-up, then decay.

They keep no state, so a resumed or replanned run restores none.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, isfinite, pi, sqrt

from raymega.config.schema import OptimizerSection, PluginsSection
from raymega.errors import ConfigError
from raymega.plugins import call_plugin, find

Shape = Callable[[OptimizerSection, int, int], float]
"""Function of (optimizer, number of the update, last update) to a share of the peak, after warm-up."""


def learning_rate(
    optimizer: OptimizerSection,
    *,
    total_steps: int,
    step: int,
    plugins: PluginsSection | None = None,
) -> float:
    """Return the learning rate of the update that follows ``step`` completed updates.

    ``plugins`` has the options of a schedule that is a plug-in. Steps without an update (a float16 overflow) do not
    count. The last update of the warm-up has the peak. Decaying schedules have the minimum from update ``lr_decay_steps`` on.
    """
    number, warmup = step + 1, optimizer.lr_warmup_steps
    end = total_steps if optimizer.lr_decay_steps == "steps" else optimizer.lr_decay_steps
    if number <= warmup:
        return optimizer.lr * number / warmup
    return optimizer.lr * _share(plugins, optimizer, number, end)


def _share(
    plugins: PluginsSection | None, optimizer: OptimizerSection, number: int, end: int
) -> float:
    row = find("lr_schedule", optimizer.lr_schedule)
    shape = row.with_options(plugins.options.get(row.name, {}) if plugins else {})
    share = call_plugin(row, lambda: float(shape(optimizer, number, end)))
    if isfinite(share) and share >= 0:
        return share
    raise ConfigError(
        fact=f"lr_schedule {row.name} returned {share} for update {number}",
        rule="it is a share of optimizer.lr, finite and not negative",
        remedy=f"correct {row.target}",
    )


def cosine(optimizer: OptimizerSection, number: int, end: int) -> float:
    """Return half a cosine from the peak to the minimum."""
    progress = _progress(number, optimizer.lr_warmup_steps, end)
    return _between(optimizer.min_lr_ratio, (1 + cos(pi * progress)) / 2)


def linear(optimizer: OptimizerSection, number: int, end: int) -> float:
    """Return a straight line from the peak to the minimum."""
    progress = _progress(number, optimizer.lr_warmup_steps, end)
    return _between(optimizer.min_lr_ratio, 1 - progress)


def wsd(optimizer: OptimizerSection, number: int, end: int) -> float:
    """Return warm-up, stable, decay (WSD): constant, then linear over the last lr_cooldown_steps."""
    # Where the run is too short for a stable phase, the cool-down follows the warm-up.
    begin = max(end - optimizer.lr_cooldown_steps, optimizer.lr_warmup_steps)
    return _between(optimizer.min_lr_ratio, 1 - _progress(number, begin, end))


def inverse_sqrt(optimizer: OptimizerSection, number: int, _end: int) -> float:
    """Return the inverse square root of the update's number; no end, but never below the minimum."""
    return max(optimizer.min_lr_ratio, sqrt(optimizer.lr_warmup_steps / number))


def constant(_optimizer: OptimizerSection, _number: int, _end: int) -> float:
    """Return the peak."""
    return 1.0


def _progress(number: int, begin: int, end: int) -> float:
    """Return the share of the way from update ``begin`` to ``end`` that is covered, 0 to 1."""
    return 1.0 if number >= end else max(0.0, (number - begin) / (end - begin))


def _between(low: float, share: float) -> float:
    """Return the point at ``share`` of the way from ``low`` to 1, exact at both ends."""
    return 1 - (1 - low) * (1 - share) if share else low
