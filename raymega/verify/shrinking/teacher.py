"""Shrinking of a job's teacher, with its features kept, to the vocabulary and the positions of the small model."""

from __future__ import annotations

from raymega.config.schema import Job, ModelSection
from raymega.verify.job_draft import Draft
from raymega.verify.shrinking.model import shrink_model

SHARED = ("vocab_size", "make_vocab_size_divisible_by", "max_positions")
"""Fields of the small model that its teacher has too."""
FIELD = "distillation.teacher_model"


def shrink_teacher(draft: Draft, job: Job, max_params: int) -> None:
    """Shrink a teacher that has a model of its own, and leave its checkpoint out: no small model has its weights.

    Args:
        draft: Job with a small model.
        job: The whole job.
        max_params: Largest number of parameters of the small teacher.
    """
    section, small = draft.job().distillation, draft.job().model
    if not section.is_on:
        return
    draft.set("distillation.teacher_checkpoint", "none", "the small teacher has other weights")
    if not section.is_live:
        draft.set("distillation.top_k", min(section.top_k, small.vocab_size // 2))
        draft.set(FIELD, "same", "stored logits are drawn")
    # a teacher of the model's own section is shrunk with it
    if not isinstance(section.teacher_model, ModelSection) or not section.is_live:
        return
    # the teacher in the place of the model, cut by the same rules
    whole = job.model_copy(update={"model": section.teacher_model})
    own = Draft(
        draft.job().model_copy(update={"model": whole.model, "distillation": type(section)()})
    )
    shrink_model(own, max_params)
    for field in SHARED:
        own.set(f"model.{field}", getattr(small, field))
    if small.vision.is_on:
        own.set("model.vision.image_token_id", small.vision.image_token_id)
    draft.set(FIELD, own.job().model.model_dump(), "shrunk as the model is")


def settle_teacher(draft: Draft) -> None:
    """Give a small teacher the vocabulary of the small model after that was changed for its data."""
    section, small = draft.job().distillation, draft.job().model
    if isinstance(section.teacher_model, ModelSection):
        shared = {field: getattr(small, field) for field in SHARED}
        draft.set(FIELD, section.teacher_model.model_dump() | shared, "shrunk as the model is")
