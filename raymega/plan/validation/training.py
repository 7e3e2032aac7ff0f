"""Rules between the values that say how a run trains: learning rate, batch ramp, recompute, loss scale.

Each function is the check of a row in plan.rules, which names the fields that it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

from raymega.config.schema import BatchStage
from raymega.errors import Fault
from raymega.plan.memory.state_bytes import DTYPE_BYTES

MAX_ATTENTION_BYTES = 2 << 30
"""Of one layer's weights under attention dropout: a few such layers fill a GPU."""


def lr_step_faults(warmup: int, decay: int | str) -> list[Fault]:
    """The warm-up ends before the decay does."""
    # With decay at run.steps a run that is shorter than its warm-up is legal: it only warms up.
    if decay == "steps" or warmup < int(decay):
        return []
    return [
        Fault(
            fact=f"optimizer.lr_warmup_steps={warmup}",
            rule=f"the decay must end after it, and optimizer.lr_decay_steps={decay}",
            remedy=f"use at most {int(decay) - 1} warm-up steps, or a later end",
        )
    ]


def lr_schedule_faults(
    name: str, warmup: int, cooldown: int, decay: int | str, steps: int
) -> list[Fault]:
    """Each schedule has the steps that it is made of, and no others."""
    if name == "inverse_sqrt" and warmup == 0:
        return [
            Fault(
                fact="optimizer.lr_warmup_steps=0",
                rule="lr_schedule=inverse_sqrt is lr * sqrt(lr_warmup_steps / step)",
                remedy="use at least 1 warm-up step",
            )
        ]
    if name != "wsd":
        return _cooldown_without_wsd(name, cooldown)
    is_open = decay == "steps"
    field, end = ("run.steps", steps) if is_open else ("optimizer.lr_decay_steps", int(decay))
    # As with the warm-up alone, an open end may come before the warm-up does.
    room = end if is_open else end - warmup
    if 1 <= cooldown <= room:
        return []
    before = "" if is_open else f" less optimizer.lr_warmup_steps={warmup}"
    return [
        Fault(
            fact=f"optimizer.lr_cooldown_steps={cooldown}",
            rule=f"lr_schedule=wsd cools down within {field}={end}{before}",
            remedy=f"use 1 to {room} steps" if room > 0 else "use a later end",
        )
    ]


def _cooldown_without_wsd(name: str, cooldown: int) -> list[Fault]:
    if cooldown == 0:
        return []
    return [
        Fault(
            fact=f"optimizer.lr_cooldown_steps={cooldown}",
            rule=f"only lr_schedule=wsd has a cool-down, and it is {name}",
            remedy="set lr_cooldown_steps=0 or lr_schedule=wsd",
        )
    ]


def batch_ramp_faults(ramp: Sequence[BatchStage], global_batch_size: int) -> list[Fault]:
    """Stages end later and later, and batches grow up to data.global_batch_size."""
    faults = []
    for index, (one, other) in enumerate(pairwise(ramp), start=1):
        if one.until_samples >= other.until_samples:
            faults.append(
                Fault(
                    fact=f"data.batch_ramp[{index}].until_samples={other.until_samples}",
                    rule=f"it must be more than the stage before has ({one.until_samples})",
                    remedy="order the stages by until_samples",
                )
            )
    sizes = [*(stage.global_batch_size for stage in ramp), global_batch_size]
    for index, (size, following) in enumerate(pairwise(sizes)):
        if size >= following:
            is_last = index == len(ramp) - 1
            after = "data.global_batch_size" if is_last else "the next stage's"
            faults.append(
                Fault(
                    fact=f"data.batch_ramp[{index}].global_batch_size={size}",
                    rule=f"it must be less than {after} ({following})",
                    remedy="let the sizes grow, or remove the stage",
                )
            )
    return faults


def packing_faults(packing: str, seq_len: int, multiple: int) -> list[Fault]:
    """Documents of a row are multiples, so the row must be one too."""
    if packing == "none" and multiple > 1:
        return [
            Fault(
                fact=f"data.document_multiple={multiple}",
                rule="only data.packing=best_fit has documents to pad, and it is none",
                remedy="set data.packing=best_fit, or data.document_multiple=1",
            )
        ]
    if seq_len % multiple == 0:
        return []
    lower = seq_len - seq_len % multiple
    return [
        Fault(
            fact=f"data.document_multiple={multiple}",
            rule=f"it must divide data.seq_len={seq_len} (remainder {seq_len % multiple})",
            remedy=f"set data.seq_len={lower or multiple}, or another multiple",
        )
    ]


def packed_dropout_faults(packing: str, rate: float) -> list[Fault]:
    """Weights are dropped in whole rows, without regard to documents."""
    if packing == "none" or not rate:
        return []
    return [
        Fault(
            fact=f"model.attention_dropout={rate:g} with data.packing={packing}",
            rule="weights are dropped in whole S x S squares, and packed tokens see their own "
            "document only",
            remedy="set model.attention_dropout=0, or data.packing=none",
        )
    ]


def attention_weight_faults(  # noqa: PLR0913  # one a field
    rate: float, seq_len: int, heads: int, tp: int, cp: int, micro_batch_size: int, dtype: str
) -> list[Fault]:
    """Without the fused kernel a layer keeps S x S weights a head: before, and after, and a mask."""
    held = heads // (tp * cp)
    num_bytes = micro_batch_size * held * seq_len**2 * (2 * DTYPE_BYTES[dtype] + 1)
    if not rate or num_bytes <= MAX_ATTENTION_BYTES:
        return []
    shorter = isqrt(MAX_ATTENTION_BYTES * seq_len**2 // num_bytes)
    return [
        Fault(
            fact=f"model.attention_dropout={rate:g}",
            rule=f"it needs every attention weight in memory, {num_bytes / 2**30:.1f} GiB in each "
            f"layer for {micro_batch_size} x {held} heads of {seq_len} x {seq_len} on a "
            f"rank; at most {MAX_ATTENTION_BYTES / 2**30:g} GiB is allowed",
            remedy="set model.attention_dropout=0, which needs none, or take more parallel.tp, a "
            f"smaller schedule.micro_batch_size or data.seq_len of at most {shorter}",
        )
    ]


def recompute_faults(recompute: str, parts: Sequence[str]) -> list[Fault]:
    """Selective recompute has something to make again."""
    if recompute != "selective" or parts:
        return []
    return [
        Fault(
            fact="memory.recompute_parts=[]",
            rule="memory.recompute=selective makes these parts again, so it needs at least one",
            remedy="name attention, activation or norm, or set memory.recompute=none",
        )
    ]


def loss_scale_faults(first: float, smallest: float) -> list[Fault]:
    """The loss scale begins at its minimum or above."""
    if smallest <= first:
        return []
    return [
        Fault(
            fact=f"precision.min_loss_scale={smallest:g}",
            rule=f"it must not exceed precision.loss_scale={first:g}",
            remedy=f"use at most {first:g}",
        )
    ]
