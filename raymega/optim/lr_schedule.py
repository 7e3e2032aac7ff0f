"""The learning rate as a pure function of the update's number: linear warm-up, then a schedule.

It keeps no state, so a run that is resumed or replanned needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt

from raymega.config.schema import OptimizerSection

Shape = Callable[[OptimizerSection, int, int], float]
"""From (optimizer, number of the update, end) to a share of the peak, after the warm-up."""


def learning_rate(optimizer: OptimizerSection, *, total_steps: int, step: int) -> float:
    """Learning rate of the update that is made when ``step`` updates are complete.

    Steps without an update (a float16 overflow) do not count. The last update of the warm-up has
    the peak; from the update number ``lr_decay_steps`` on, schedules that end have the minimum.
    """
    number, warmup = step + 1, optimizer.lr_warmup_steps
    end = total_steps if optimizer.lr_decay_steps == "steps" else optimizer.lr_decay_steps
    if number <= warmup:
        return optimizer.lr * number / warmup
    return optimizer.lr * SHAPES[optimizer.lr_schedule](optimizer, number, end)


def _cosine(optimizer: OptimizerSection, number: int, end: int) -> float:
    progress = _progress(number, optimizer.lr_warmup_steps, end)
    return _between(optimizer.min_lr_ratio, (1 + cos(pi * progress)) / 2)


def _linear(optimizer: OptimizerSection, number: int, end: int) -> float:
    progress = _progress(number, optimizer.lr_warmup_steps, end)
    return _between(optimizer.min_lr_ratio, 1 - progress)


def _wsd(optimizer: OptimizerSection, number: int, end: int) -> float:
    """Stable, then linear. A run that is cut short cools down as soon as it is warm."""
    begin = max(end - optimizer.lr_cooldown_steps, optimizer.lr_warmup_steps)
    return _between(optimizer.min_lr_ratio, 1 - _progress(number, begin, end))


def _inverse_sqrt(optimizer: OptimizerSection, number: int, _end: int) -> float:
    """It has no end, but never falls below the minimum."""
    return max(optimizer.min_lr_ratio, sqrt(optimizer.lr_warmup_steps / number))


def _constant(_optimizer: OptimizerSection, _number: int, _end: int) -> float:
    return 1.0


def _progress(number: int, begin: int, end: int) -> float:
    """The share of the way from update ``begin`` to update ``end`` that is covered: 0 to 1."""
    return 1.0 if number >= end else max(0.0, (number - begin) / (end - begin))


def _between(low: float, share: float) -> float:
    """``share`` of the way from ``low`` to exactly 1."""
    return 1 - (1 - low) * (1 - share) if share else low


SHAPES: dict[str, Shape] = {
    "cosine": _cosine,
    "linear": _linear,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
    "constant": _constant,
}
