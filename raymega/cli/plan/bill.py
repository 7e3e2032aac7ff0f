"""The bill of a run in the output of commands: expected time, device-hours and dollars."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import typer

from raymega.config.schema import Job
from raymega.errors import RaymegaError
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.bill import Bill, make_bill
from raymega.planner.cost.evaluation_time import sample_s
from raymega.planner.search.auto_parallel import BY_DEVICE

MOST_DOLLARS = 1e6
"""Most dollars for an hour of a device."""
Price = Annotated[
    float,
    typer.Option(
        min=0,
        max=MOST_DOLLARS,
        help="Dollars for an hour of one GPU, or of one worker on CPUs: --price 2.5",
    ),
]


def priced(
    device: Accelerator, price: float = 0.0, spot_price: float = 0.0, interruptions: float = 0.0
) -> Accelerator:
    """Return the device with the prices of the command line in place of its own, where given."""
    given: dict[str, Any] = {
        "price_per_hour": price,
        "spot_price_per_hour": spot_price,
        "interruptions_per_day": interruptions,
    }
    return replace(device, **{name: value for name, value in given.items() if value})


def device_of(job: Job) -> Accelerator | None:
    """Return the accelerator that the job names, or the catalogue's cpu; None for an unnamed GPU."""
    if job.cluster.accelerator != BY_DEVICE:
        return find_accelerator(job.cluster.accelerator, field="cluster.accelerator")
    return find_accelerator("cpu") if job.cluster.device == "cpu" else None


def dollars_per_s(plan: RunPlan, price: float) -> float:
    """Return the dollars that a second of the run costs; 0 where no price is known."""
    device = device_of(plan.job)
    hour = price or (device.price_per_hour if device else 0.0)
    return hour * plan.grid.world_size / 3600


def bill_of(plan: RunPlan, device: Accelerator, step_s: float, *, first_step: int = 0) -> Bill:
    """Return the bill of the steps after ``first_step``, with evaluations of run.eval_tasks and samples of text."""
    tasks_s = drawn_s = 0.0
    if plan.job.run.eval_tasks:  # they load pyarrow and tokenizers
        from raymega.evaluate.cost import waiting_s

        tasks_s = waiting_s(plan, device)
    if plan.job.run.samples_every:
        drawn_s = sample_s(plan, _prompt_tokens(plan.job), device)
    return make_bill(plan, device, step_s, first_step=first_step, tasks_s=tasks_s, sample_s=drawn_s)


def _prompt_tokens(job: Job) -> int:
    """Return the tokens of the longest of run.sample_prompts; where the tokenizer is not here, the most that it has."""
    from raymega.data.text_codec import codec_of_dataset, prompt_ids, sample_images

    prompts, vision = job.run.sample_prompts, job.model.vision
    with suppress(RaymegaError):
        if codec := codec_of_dataset(next(iter(job.data.datasets))):
            images = sample_images(codec, prompts, job.run.sample_images, vision)
            own = zip(prompts, images or [[]] * len(prompts), strict=True)
            return max(len(prompt_ids(codec, text, each, vision)) for text, each in own)
    # a token has a byte at least; an image has as many tokens as its pixels say
    return job.data.seq_len if vision.is_on else max(len(text.encode()) for text in prompts)
