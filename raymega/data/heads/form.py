"""Form of the documents that a job reads, by its loss and its head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from raymega.config.heads.section import HeadSection
from raymega.config.schema import Job
from raymega.data.rows import ANSWERS, PAIRS, TEXTS, RowForm
from raymega.plan.layers.family_parts import family_parts

Labelled = Literal["classes", "tokens", "values"]


def form_of(pair_loss: str, head: HeadSection, family: str) -> RowForm:
    """Return the form of the documents of a job with a loss of pairs, or with a head that reads labels."""
    if head.kind in ("language_model", "reward"):
        return {"none": TEXTS, "kto": ANSWERS}.get(pair_loss, PAIRS)
    is_causal = family_parts(family).is_causal
    if head.kind == "multiple_choice":
        return RowForm("choices", head.num_choices, is_causal=is_causal)
    if head.kind == "embedding":
        return RowForm("matches", 2, is_causal=is_causal)
    kinds: dict[str, tuple[Labelled, int]] = {
        "sequence_classification": ("classes", head.num_labels),
        "token_classification": ("tokens", head.num_labels),
        "regression": ("values", 0),
    }
    kind, num_classes = kinds[head.kind]
    return RowForm(kind, 1, num_classes, is_causal)


def job_form(job: Job) -> RowForm:
    """Return the form of the documents of a job."""
    return form_of(job.preference.loss_type, job.model.head, job.model.family)


def form_of_values(values: Mapping[str, Any]) -> RowForm:
    """Return the form of the documents by a job's valid fields (dotted path to value); texts where they do not say."""
    head = values.get("model.head", HeadSection())
    return form_of(
        values.get("preference.loss_type", "none"), head, values.get("model.family", "llama")
    )
