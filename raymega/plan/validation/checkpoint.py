"""Check the rules of checkpoints: what is saved, how, and which ones are kept."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.errors import Fault
from raymega.plan.init_from_rules import CHANGED, IGNORE, REINIT, RENAME, UPCYCLE
from raymega.plan.rename_rules import rename_faults
from raymega.plan.validation.rule import reads

MAX_ELEMENT_BYTES = 8


@reads("checkpoint.keep_best every, run.eval_every eval_samples")
def keep_best_faults(best: int, every: int, eval_every: int, eval_samples: int) -> Iterator[Fault]:
    """Check that every saved step is evaluated, where the best checkpoints are kept."""
    if not best or (every and eval_every and every % eval_every == 0 and eval_samples):
        return
    if not every:
        rule = "checkpoint.every=0 leaves one checkpoint to choose from"
        remedy = "set checkpoint.every"
    elif not eval_samples:
        rule, remedy = "run.eval_samples=0 evaluates nothing", "set run.eval_samples above 0"
    else:
        rule = (
            f"every step that is saved must be evaluated, and run.eval_every={eval_every} does not "
            f"divide checkpoint.every={every}"
        )
        remedy = f"set run.eval_every={every} or a divisor of it, or checkpoint.keep_best=0"
    yield Fault(fact=f"checkpoint.keep_best={best}", rule=rule, remedy=remedy)


@reads("checkpoint.buffer_bytes, model.hidden_size ffn_hidden_size")
def buffer_faults(buffer_bytes: int, width: int, ffn_hidden_size: int) -> Iterator[Fault]:
    """Check that the buffer holds a row of the widest tensor, in float64."""
    # A save cuts tensors only between rows.
    row_bytes = MAX_ELEMENT_BYTES * max(width, ffn_hidden_size)
    if 0 < buffer_bytes < row_bytes:
        yield Fault(
            fact=f"checkpoint.buffer_bytes={buffer_bytes}",
            rule=f"it must hold a row of the widest tensor, {row_bytes} bytes for "
            f"model.hidden_size={width} and model.ffn_hidden_size={ffn_hidden_size}",
            remedy=f"use at least {row_bytes}, better {2**26} and more, or 0 for the whole share",
        )


@reads("checkpoint.init_from init_upcycle init_rename reinit init_ignore allow_changed")
def init_from_faults(init_from: str, is_upcycled: bool, *rules: tuple[str, ...]) -> Iterator[Fault]:
    """Check the syntax of rules on names, and that there is a checkpoint to apply them to."""
    given = dict(zip((RENAME, REINIT, IGNORE, CHANGED), rules, strict=True))
    yield from rename_faults(RENAME, given[RENAME])
    if is_upcycled:
        given[UPCYCLE] = ("true",)
    for field, texts in given.items():
        if texts and init_from == "none":
            yield Fault(
                fact=f"{field} has {', '.join(texts)}, and checkpoint.init_from is none",
                rule="it says what of another checkpoint the run starts with",
                remedy=f"set checkpoint.init_from, or leave {field} out",
            )
