"""Shrinking of a job to a size that trains in float64 on this machine, with its features kept.

``raymega.verify.shrinking.model`` shrinks its model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from raymega.config.schema import Job
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.stages import KINDS
from raymega.plan.validation.pipeline import SCHEDULING
from raymega.plan.validation.unused_fields import default_of, settled
from raymega.verify.job_draft import Change, Draft
from raymega.verify.layout import Device
from raymega.verify.layout_sampling import is_power_of_two
from raymega.verify.legal_layouts import layout_of
from raymega.verify.shrinking.model import (
    MAX_SEQ_LEN,
    cut_images,
    cut_sections,
    cut_streams,
    shrink_model,
)
from raymega.verify.shrinking.teacher import settle_teacher, shrink_teacher
from raymega.verify.small_data import (
    drawn_blend,
    drawn_blocks,
    early_stages,
    short_ramp,
    small_datasets,
)
from raymega.verify.tasks import tasks_of

MAX_BATCH = 16
MAX_WARMUP_STEPS = 2
MAX_EVAL_SAMPLES = 7
"""Held-out samples of one evaluation: odd, so that layouts have masked slots."""
MAX_COOLDOWN_STEPS = 1
MIN_EPS = 1e-8
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrunk:
    """Small job, its differences from the original, and what its verification does not cover."""

    job: Job
    changes: tuple[Change, ...]
    untested: tuple[str, ...]


def shrink_job(  # noqa: PLR0913  # what may be small depends on all of them
    job: Job,
    *,
    steps: int,
    max_params: int,
    max_ranks: int,
    is_data_there: bool,
    seed: int | None = None,
    device: Device = "cpu",
) -> Shrunk:
    """Return the job in small.

    Args:
        job: Valid job.
        steps: Number of optimizer steps that will be trained.
        max_params: Largest number of parameters of the small model.
        max_ranks: Largest number of ranks that will be drawn, for the list of what is not covered.
        is_data_there: Whether the job's datasets can be read on this machine.
        seed: Seed by which a blend of synthetic tokens is drawn; None draws none.
        device: Device of the layouts, for the list of what is not covered.

    Raises:
        ConfigError: The smallest model with this job's features has more parameters.
    """
    draft = Draft(job)
    _shorten(draft, steps)
    _free_stages(draft)
    shrink_model(draft, max_params)
    cut_sections(draft)
    shrink_teacher(draft, job, max_params)
    for field, new, why in small_datasets(job, draft.job(), is_data_there=is_data_there):
        draft.set(field, new, why)
    settle_teacher(draft)
    if seed is not None:
        for draw in (drawn_blend, drawn_blocks):
            for field, new, why in draw(draft.job(), seed):
                draft.set(field, new, why)
    untested = _untested(job, max_ranks, device)
    return Shrunk(job=draft.job(), changes=draft.changes(), untested=untested)


def _shorten(draft: Draft, steps: int) -> None:
    """Shrink all but the model: sequence, batch, dtype; reset what a verification does not use."""
    job = draft.job()
    draft.set("precision.dtype", "float64", "so that rounding is far below any mistake")
    draft.set("data.seq_len", min(job.data.seq_len, MAX_SEQ_LEN))
    if parts_of(job.model).is_encoder_decoder and job.data.seq_len > MAX_SEQ_LEN:
        cut_streams(draft)
    if job.model.vision.is_on:
        cut_images(draft)
    multiple = gcd(job.data.document_multiple, draft.values["data"]["seq_len"])
    draft.set("data.document_multiple", multiple, "it must divide the sequence")
    draft.set("data.global_batch_size", _small_batch(job.data.global_batch_size))
    draft.set("data.batch_ramp", short_ramp(draft.job()))
    draft.set("data.stages", early_stages(draft.job()), "so that the blend changes while it trains")
    micro = min(job.schedule.micro_batch_size, draft.values["data"]["global_batch_size"])
    draft.set("schedule.micro_batch_size", micro)
    optimizer = job.optimizer
    draft.set("optimizer.eps", max(optimizer.eps, MIN_EPS), "less makes values of rounding noise")
    draft.set("optimizer.lr_warmup_steps", min(optimizer.lr_warmup_steps, MAX_WARMUP_STEPS))
    draft.set("optimizer.lr_cooldown_steps", min(optimizer.lr_cooldown_steps, MAX_COOLDOWN_STEPS))
    draft.set("optimizer.lr_decay_steps", "steps")
    draft.values["run"] |= {
        "steps": max(steps, MAX_WARMUP_STEPS + 1),
        "eval_samples": min(job.run.eval_samples, MAX_EVAL_SAMPLES),
        "tokens": 0,
        "epochs": 0,
        "samples_every": 0,  # they change nothing that is compared
        "sample_prompts": (),
        "sample_images": (),
        # drawn requests take the place of files, in every job
        "eval_tasks": tasks_of(job),
        "eval_tasks_every": 0,
        "eval_tasks_on": "grid",
        "eval_tasks_grid": "tp=1",
    }
    draft.values["checkpoint"] |= {"keep_best": 0}  # nothing is saved, so nothing is best
    draft.values["cluster"] |= {"device": "cpu", "num_workers": "grid"}
    timeout_s = min(job.elastic.collective_timeout_s, TIMEOUT_S)
    # no rank is lost, and the setting would refuse layouts that share the state out
    draft.values["elastic"] |= {"collective_timeout_s": timeout_s, "on_replica_loss": "restart"}
    # left out or repeated, a step without numbers would be the same on all layouts
    draft.values["elastic"]["on_nan"] = "stop"
    draft.values["parallel"] |= dict.fromkeys(("tp", "cp", "pp", "dp", "ep", "etp"), 1)
    draft.values = settled(draft.job()).model_dump()  # on one rank, in float64


def _free_stages(draft: Draft) -> None:
    """Reset settings for the job's own stages, which fit no layout with other stages."""
    why, parallel = "layouts have other stages", draft.job().parallel
    if parallel.stages not in KINDS:
        draft.set("parallel.stages", "even", why)
    draft.set("parallel.first_stage_layers", "even", why)
    draft.set("parallel.last_stage_layers", "even", why)
    for field in SCHEDULING:  # each layout's own
        draft.values["schedule"][field] = default_of(f"schedule.{field}")


def _small_batch(size: int) -> int:
    """Return a batch of at most MAX_BATCH; a power of two, odd, or neither, as ``size`` is."""
    if size <= MAX_BATCH:
        return size
    if is_power_of_two(size):
        return MAX_BATCH
    return MAX_BATCH - 1 if size % 2 else MAX_BATCH - 4


def _untested(job: Job, max_ranks: int, device: Device) -> tuple[str, ...]:
    gaps = ["restarts after failures, and snapshots"]
    if not job.run.eval_samples:
        gaps.append("evaluation: run.eval_samples=0 turns it off")
    if job.distillation.teacher_checkpoint != "none":
        gaps.append("the teacher's checkpoint: its weights are drawn at random")
    if job.precision.dtype != "float64":
        gaps.append(f"rounding in {job.precision.dtype}")
    if device == "cuda" and max_ranks == 1:
        gaps.append("NCCL, and all that several ranks do: this machine has one GPU")
    if job.cluster.device != "cpu" and device == "cpu":
        gaps.append("GPU kernels and NCCL: ranks are CPU processes over gloo")
    own = layout_of(job)
    if own.world_size > max_ranks:
        gaps.append(f"the job's own {own.grid()} of {own.world_size} ranks: at most {max_ranks}")
    return tuple(gaps)
