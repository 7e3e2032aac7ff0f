"""Rules between the values that say what is saved, how, and what of it is kept."""

from __future__ import annotations

from raymega.errors import Fault

MAX_ELEMENT_BYTES = 8


def keep_best_faults(best: int, every: int, eval_every: int, eval_samples: int) -> list[Fault]:
    """A checkpoint has a validation loss when its very step was evaluated."""
    if not best or (every and eval_every and every % eval_every == 0 and eval_samples):
        return []
    if not every:
        rule, remedy = (
            "checkpoint.every=0 leaves one checkpoint to choose from",
            "set checkpoint.every",
        )
    elif not eval_samples:
        rule, remedy = "run.eval_samples=0 evaluates nothing", "set run.eval_samples above 0"
    else:
        rule = (
            f"every step that is saved must be evaluated, and run.eval_every={eval_every} does not "
            f"divide checkpoint.every={every}"
        )
        remedy = f"set run.eval_every={every} or a divisor of it, or checkpoint.keep_best=0"
    return [Fault(fact=f"checkpoint.keep_best={best}", rule=rule, remedy=remedy)]


def buffer_faults(buffer_bytes: int, width: int, ffn_hidden_size: int) -> list[Fault]:
    """Tensors are cut between rows; a row's state may be float64."""
    row_bytes = MAX_ELEMENT_BYTES * max(width, ffn_hidden_size)
    if not buffer_bytes or buffer_bytes >= row_bytes:
        return []
    return [
        Fault(
            fact=f"checkpoint.buffer_bytes={buffer_bytes}",
            rule=f"it must hold a row of the widest tensor, {row_bytes} bytes for "
            f"model.hidden_size={width} and model.ffn_hidden_size={ffn_hidden_size}",
            remedy=f"use at least {row_bytes}, better {2**26} and more, or 0 for the whole share",
        )
    ]
