"""The learning rate as a pure function of the step: linear warm-up, then a cosine.

It keeps no state, so a run that is resumed or replanned needs none.
"""

from __future__ import annotations

from math import cos, pi

from raymega.config.schema import OptimizerSection


def learning_rate(optimizer: OptimizerSection, *, total_steps: int, step: int) -> float:
    """Learning rate of the step that is taken when ``step`` steps are complete.

    The last step of the warm-up has the peak, the step number ``lr_decay_steps`` and all later
    ones the minimum.
    """
    number, warmup = step + 1, optimizer.lr_warmup_steps
    decay = total_steps if optimizer.lr_decay_steps == "steps" else optimizer.lr_decay_steps
    if number <= warmup:
        return optimizer.lr * number / warmup
    minimum = optimizer.lr * optimizer.min_lr_ratio
    if number >= decay:
        return minimum
    progress = (number - warmup) / (decay - warmup)
    return minimum + (optimizer.lr - minimum) * (1 + cos(pi * progress)) / 2
