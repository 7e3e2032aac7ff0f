"""Check the rules of training: learning rate, batch ramp, packing, recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from raymega.config.schema import BatchStage, DataSection
from raymega.errors import Fault
from raymega.plan.batch import steps_for
from raymega.plan.validation.rule import reads


@reads("run.steps tokens epochs, data.seq_len global_batch_size batch_ramp")
def budget_faults(  # the fields that decide
    steps: int,
    tokens: int,
    epochs: float,
    seq_len: int,
    global_batch_size: int,
    ramp: Sequence[BatchStage],
) -> Iterator[Fault]:
    """Check that the run has one length: steps, tokens or epochs."""
    if not (steps or tokens or epochs):
        yield Fault(
            fact="run.steps=0, run.tokens=0 and run.epochs=0",
            rule="one of them is the length of the run",
            remedy="set run.steps, run.tokens or run.epochs",
        )
    if tokens and epochs:
        yield Fault(
            fact=f"run.tokens={tokens} with run.epochs={epochs:g}",
            rule="one of them is the length of the run",
            remedy="set run.epochs=0 or run.tokens=0",
        )
    # The steps that follow from the tokens may be set too.
    if not (steps and tokens):
        return
    section = DataSection.model_construct(
        seq_len=seq_len, global_batch_size=global_batch_size, batch_ramp=tuple(ramp)
    )
    wanted = steps_for(-(-tokens // seq_len), section)
    if wanted != steps:
        yield Fault(
            fact=f"run.steps={steps} with run.tokens={tokens}",
            rule=f"the run's length is given once, and these tokens are {wanted} steps",
            remedy="remove run.steps, or set run.tokens=0",
        )


@reads("run.samples_every sample_prompts sample_tokens, data.seq_len")
def sample_faults(every: int, prompts: Sequence[str], tokens: int, seq_len: int) -> Iterator[Fault]:
    """Check that samples have prompts, and room for their tokens."""
    if not every:
        return
    if not prompts or "" in prompts:
        yield Fault(
            fact=f"run.sample_prompts has {'an empty text' if prompts else 'no text'}",
            rule=f"run.samples_every={every} continues texts of at least one character",
            remedy="set run.sample_prompts='[Once upon a time]', or run.samples_every=0",
        )
    if tokens >= seq_len:
        yield Fault(
            fact=f"run.sample_tokens={tokens}",
            rule=f"prompt and sample fit data.seq_len={seq_len}",
            remedy=f"use at most {seq_len - 1}, less the prompt's tokens",
        )


@reads("optimizer.lr_warmup_steps lr_decay_steps")
def lr_step_faults(warmup: int, decay: int | str) -> Iterator[Fault]:
    """Check that the warm-up ends before the decay does."""
    # With decay at run.steps, a run shorter than its warm-up is legal: it only warms up.
    if decay != "steps" and warmup >= int(decay):
        yield Fault(
            fact=f"optimizer.lr_warmup_steps={warmup}",
            rule=f"the decay must end after it, and optimizer.lr_decay_steps={decay}",
            remedy=f"use at most {int(decay) - 1} warm-up steps, or a later end",
        )


@reads("optimizer.lr_schedule lr_warmup_steps lr_cooldown_steps lr_decay_steps, run.steps")
def lr_schedule_faults(
    name: str, warmup: int, cooldown: int, decay: int | str, steps: int
) -> Iterator[Fault]:
    """Check that the learning-rate schedule has the phases that it needs, and no others."""
    # inverse_sqrt: its formula needs a warm-up
    if name == "inverse_sqrt" and warmup == 0:
        yield Fault(
            fact="optimizer.lr_warmup_steps=0",
            rule="lr_schedule=inverse_sqrt is lr * sqrt(lr_warmup_steps / step)",
            remedy="use at least 1 warm-up step",
        )
        return
    # others: no cool-down
    if name != "wsd":
        if cooldown:
            yield Fault(
                fact=f"optimizer.lr_cooldown_steps={cooldown}",
                rule=f"only lr_schedule=wsd has a cool-down, and it is {name}",
                remedy="set lr_cooldown_steps=0 or lr_schedule=wsd",
            )
        return
    # wsd: the cool-down fits
    is_open = decay == "steps"
    field, end = ("run.steps", steps) if is_open else ("optimizer.lr_decay_steps", int(decay))
    # As with the warm-up alone, an open end may come before the warm-up does.
    room = end if is_open else end - warmup
    if 1 <= cooldown <= room:
        return
    before = "" if is_open else f" less optimizer.lr_warmup_steps={warmup}"
    yield Fault(
        fact=f"optimizer.lr_cooldown_steps={cooldown}",
        rule=f"lr_schedule=wsd cools down within {field}={end}{before}",
        remedy=f"use 1 to {room} steps" if room > 0 else "use a later end",
    )


@reads("data.batch_ramp global_batch_size")
def batch_ramp_faults(ramp: Sequence[BatchStage], global_batch_size: int) -> Iterator[Fault]:
    """Check that the ramp's stages are in order, and that their batches grow to the global batch."""
    # ends of the stages
    for index, (one, other) in enumerate(pairwise(ramp), start=1):
        if one.until_samples >= other.until_samples:
            yield Fault(
                fact=f"data.batch_ramp[{index}].until_samples={other.until_samples}",
                rule=f"it must be more than the stage before has ({one.until_samples})",
                remedy="order the stages by until_samples",
            )
    # batch sizes, the global batch last
    sizes = [*(stage.global_batch_size for stage in ramp), global_batch_size]
    for index, (size, following) in enumerate(pairwise(sizes)):
        if size >= following:
            is_last = index == len(ramp) - 1
            after = "data.global_batch_size" if is_last else "the next stage's"
            yield Fault(
                fact=f"data.batch_ramp[{index}].global_batch_size={size}",
                rule=f"it must be less than {after} ({following})",
                remedy="let the sizes grow, or remove the stage",
            )


@reads("data.packing seq_len document_multiple")
def packing_faults(packing: str, seq_len: int, multiple: int) -> Iterator[Fault]:
    """Check that a row is a multiple of what its documents are padded to."""
    if packing == "none" and multiple > 1:
        yield Fault(
            fact=f"data.document_multiple={multiple}",
            rule="only data.packing=best_fit has documents to pad, and it is none",
            remedy="set data.packing=best_fit, or data.document_multiple=1",
        )
    elif seq_len % multiple:
        lower = seq_len - seq_len % multiple
        yield Fault(
            fact=f"data.document_multiple={multiple}",
            rule=f"it must divide data.seq_len={seq_len} (remainder {seq_len % multiple})",
            remedy=f"set data.seq_len={lower or multiple}, or another multiple",
        )


@reads("memory.recompute recompute_parts")
def recompute_faults(recompute: str, parts: Sequence[str]) -> Iterator[Fault]:
    """Check that selective recompute names a part."""
    if recompute == "selective" and not parts:
        yield Fault(
            fact="memory.recompute_parts=[]",
            rule="memory.recompute=selective makes these parts again, so it needs at least one",
            remedy="name attention, activation or norm, or set memory.recompute=none",
        )
