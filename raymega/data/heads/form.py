"""Form of the documents that a job reads, by its loss and its head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymega.config.heads.section import HeadSection
from raymega.config.schema import Job
from raymega.data.rows import ANSWERS, PAIRS, TEXTS, RowForm
from raymega.plan.layers.family_parts import family_parts


def form_of(pair_loss: str, head: HeadSection, family: str) -> RowForm:
    """Return the form of the documents of a job with a loss of pairs, or with a head that reads labels."""
    is_causal = family_parts(family).is_causal
    forms = {
        "sequence_classification": RowForm("classes", 1, head.num_labels, is_causal),
        "token_classification": RowForm("tokens", 1, head.num_labels, is_causal),
        "multiple_choice": RowForm("choices", head.num_choices, 0, is_causal),
        "regression": RowForm("values", 1, 0, is_causal),
    }
    others = {"none": TEXTS, "kto": ANSWERS}
    return forms.get(head.kind, others.get(pair_loss, PAIRS))


def job_form(job: Job) -> RowForm:
    """Return the form of the documents of a job."""
    return form_of(job.preference.loss_type, job.model.head, job.model.family)


def form_of_values(values: Mapping[str, Any]) -> RowForm:
    """Return the form of the documents by a job's valid fields (dotted path to value); texts where they do not say."""
    head = values.get("model.head", HeadSection())
    return form_of(
        values.get("preference.loss_type", "none"), head, values.get("model.family", "llama")
    )
