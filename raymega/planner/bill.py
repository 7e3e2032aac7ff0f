"""Compute what a whole run costs: time, device-hours and dollars, on demand and on spot nodes.

The step time is predicted or measured by others; the module multiplies, and adds evaluations, samples of text and
what interruptions of spot nodes cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raymega.config.schema import Job, RunSection
from raymega.errors import counted, duration
from raymega.plan.batch import phases
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan

RESTART_S = 180.0
"""Seconds from the loss of a node to the first step after it, an assumption: processes start, read the
checkpoint and connect."""
DAY_S = 86_400.0
FORWARD_SHARE = 1 / 3
"""Share of a step's time that its forward pass takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotBill:
    """Cost of the run on nodes that may be taken away.

    Attributes:
        price_per_hour: Dollars for an hour of a device.
        interruptions_per_day: Expected interruptions of a node in a day.
        interruptions: Expected interruptions of the run.
        lost_s: Seconds that one of them costs: the steps to repeat, and the restart.
        seconds: Seconds of the run with them; infinite where they come faster than work is saved.
        dollars: Dollars of the run with them.
    """

    price_per_hour: float
    interruptions_per_day: float
    interruptions: float
    lost_s: float
    seconds: float
    dollars: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """Cost of the steps of a run that are still to be done.

    Attributes:
        num_steps: Number of these steps.
        num_devices: Number of devices.
        tokens: Tokens that they read.
        step_s: Seconds of a step with the whole batch.
        evaluation_s: Seconds of the evaluations between them.
        samples_s: Seconds of the samples of text between them.
        seconds: Seconds of all together, without interruptions.
        device_hours: Hours of all devices together.
        dollars: Dollars at the price of the device; None without a price.
        spot: The same on spot nodes; None without a price of theirs.
    """

    num_steps: int
    num_devices: int
    tokens: int
    step_s: float
    evaluation_s: float
    samples_s: float
    seconds: float
    device_hours: float
    dollars: float | None
    spot: SpotBill | None


def make_bill(
    plan: RunPlan,
    device: Accelerator,
    step_s: float,
    *,
    first_step: int = 0,
    tasks_s: float = 0.0,
    sample_s: float = 0.0,
) -> Bill:
    """Return the bill of the steps after ``first_step``.

    Args:
        plan: Plan of the run.
        device: Device with its prices; those of 0 are unknown.
        step_s: Seconds of a step with the whole batch.
        first_step: Number of steps that are done.
        tasks_s: Seconds of one evaluation of run.eval_tasks, for which the ranks that train wait.
        sample_s: Seconds in which the ranks that train draw run.samples_every's texts once.
    """
    job, world = plan.job, plan.grid.world_size
    steps = max(0, job.run.steps - first_step)
    weighted = list(_step_weights(plan, first_step))
    training_s = step_s * sum(number * weight for number, weight, _ in weighted)
    evaluation_s = _evaluation_s(job, step_s, first_step)
    evaluation_s += tasks_s * _num_evaluations(job.run, job.run.eval_tasks_every, first_step)
    every = job.run.samples_every
    # samples are drawn after a step that is due, and not at the end
    num_samples = max(0, job.run.steps // every - first_step // every) if every else 0
    seconds = training_s + evaluation_s + num_samples * sample_s
    hours = seconds / 3600 * world
    return Bill(
        num_steps=steps,
        num_devices=world,
        tokens=job.data.seq_len * sum(number * size for number, _, size in weighted),
        step_s=step_s,
        evaluation_s=evaluation_s,
        samples_s=num_samples * sample_s,
        seconds=seconds,
        device_hours=hours,
        dollars=hours * device.price_per_hour if device.price_per_hour else None,
        spot=_spot(plan, device, step_s, seconds) if device.spot_price_per_hour else None,
    )


def _step_weights(plan: RunPlan, first_step: int) -> Iterator[tuple[int, float, int]]:
    """Yield number of steps, their time relative to a whole step, and their sequences, by phase."""
    end, ramp = plan.job.run.steps, list(phases(plan.ramp, plan.batch))
    fill = plan.grid.pp - 1  # the pipeline fills and drains whatever the batch
    whole = plan.batch.num_micro_batches + fill
    for phase in ramp:
        last = phase.first_step - 1 + phase.num_steps if phase.num_steps else end
        number = max(0, min(last, end) - max(phase.first_step - 1, first_step))
        weight = (phase.batch.num_micro_batches + fill) / whole
        yield number, weight, phase.batch.global_batch_size


def _evaluation_s(job: Job, step_s: float, first_step: int) -> float:
    """Return the seconds of the evaluations on held-out text that are left, each on every validation set."""
    run, num_sets = job.run, max(1, len(job.data.validation))
    one_s = step_s * FORWARD_SHARE * run.eval_samples / job.data.global_batch_size
    one_s *= num_sets * (1 + run.eval_ema)
    return _num_evaluations(run, run.eval_every, first_step) * one_s


def _num_evaluations(run: RunSection, every: int, first_step: int) -> int:
    """Return the number of evaluations that are left: every ``every`` steps unless it is 0, and at the end."""
    if first_step >= run.steps:
        return 0
    return -(-run.steps // every) - first_step // every if every else 1


def _spot(plan: RunPlan, device: Accelerator, step_s: float, seconds: float) -> SpotBill:
    job, nodes = plan.job, -(-plan.grid.world_size // device.devices_per_node)
    # On average half of the steps since the newest snapshot or checkpoint are repeated.
    kept = job.elastic.snapshot_every or job.checkpoint.every or job.run.steps
    lost_s = RESTART_S + step_s * kept / 2
    rate = nodes * device.interruptions_per_day / DAY_S
    pace = 1 - rate * lost_s
    whole_s = seconds / pace if pace > 0 else float("inf")
    price = device.spot_price_per_hour
    return SpotBill(
        price_per_hour=price,
        interruptions_per_day=device.interruptions_per_day,
        interruptions=rate * whole_s,
        lost_s=lost_s,
        seconds=whole_s,
        dollars=whole_s / 3600 * plan.grid.world_size * price,
    )


def bill_lines(bill: Bill, device: Accelerator) -> Iterator[str]:
    """Yield the bill as lines for people; ``device`` has the prices."""
    unit = "worker-hours" if device.shared_cores else "GPU-hours"
    cost = (
        f"${dollars(bill.dollars)} at ${device.price_per_hour:g} an hour"
        if bill.dollars is not None
        else "--price DOLLARS an hour gives the cost"
    )
    parts = {"evaluation": bill.evaluation_s, "samples of text": bill.samples_s}
    tests = "".join(
        f", {duration(part_s)} of it {name}" for name, part_s in parts.items() if part_s >= 1
    )
    yield (
        f"{counted(bill.num_steps, 'step')}, {_count(bill.tokens)} tokens: {duration(bill.seconds)}{tests}; "
        f"{_digits(bill.device_hours)} {unit}; {cost}"
    )
    spot = bill.spot
    if spot is None:
        return
    if spot.seconds == float("inf"):
        yield (
            f"on spot nodes: no progress: an interruption costs {duration(spot.lost_s)}, and they come as fast; "
            "try --set elastic.snapshot_every=1"
        )
        return
    yield (
        f"on spot nodes: ${dollars(spot.dollars)} at ${spot.price_per_hour:g} an hour, {duration(spot.seconds)} with "
        f"{_digits(spot.interruptions)} interruptions of {duration(spot.lost_s)} "
        f"({spot.interruptions_per_day:g} expected of a node in a day)"
    )


def dollars(amount: float) -> str:
    """Return an amount of money: cents below 100, else three digits."""
    return f"{amount:,.2f}" if amount < 100 else _digits(amount)


def _digits(amount: float) -> str:
    """Return a number with three digits, and no exponent."""
    if amount < 100:
        return f"{amount:.3g}"
    return f"{round(amount, 3 - len(str(int(amount)))):,.0f}"


def _count(number: int) -> str:
    """Return a large number with a letter: 2.1T."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,}"
