"""Checks that the rows of a dataset have the form that a job reads."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.config.data import is_computed
from raymega.data.format import RowFormat
from raymega.data.megatron import is_megatron
from raymega.data.rows import RowForm
from raymega.data.streaming.remote_dataset import meta_at
from raymega.errors import Fault

FORMATS: dict[str, RowFormat] = {
    "pairs": "preference", "classes": "classification", "values": "classification", "choices": "multiple_choice",
    "tokens": "token_classification", "answers": "kto",
}  # fmt: skip
"""Format of the datasets, as of `raymega data prepare --format`, that a form of rows is read from."""


def row_form_faults(path: str, field: str, loss_on: str, form: RowForm) -> Iterator[Fault]:
    """Yield the faults of a dataset, sound by itself, whose rows are of another form than the job needs."""
    if is_computed(path):
        return
    meta = None if is_megatron(path) else meta_at(path)
    found = "text" if meta is None else meta.row_format
    if form.kind == "pairs" and found != "preference":
        yield Fault(
            fact=f"{field}={path!r} holds no pairs of answers",
            rule="a job with preference.loss_type trains on pairs of a chosen and a rejected answer",
            remedy="prepare it with --format preference, or set preference.loss_type=none",
        )
    elif form.kind == "texts" and found == "preference":
        yield Fault(
            fact=f"{field}={path!r} holds pairs of a chosen and a rejected answer",
            rule="a run of this job would learn the rejected ones too",
            remedy="set preference.loss_type=sigmoid, or prepare the chosen ones with --format chat --text-key chosen",
        )
    elif form.kind in FORMATS and found != FORMATS[form.kind]:
        yield Fault(
            fact=f"{field}={path!r} was prepared with --format {found}",
            rule=f"this job reads labels of rows that --format {FORMATS[form.kind]} prepares",
            remedy=f"prepare it with --format {FORMATS[form.kind]}, or change model.head or preference.loss_type",
        )
    elif form.kind == "texts" and found not in ("text", "chat", "images"):
        yield Fault(
            fact=f"{field}={path!r} was prepared with --format {found}",
            rule="a language model's loss reads no labels",
            remedy="set model.head.kind or preference.loss_type, or prepare it with --format text",
        )
    if loss_on in ("assistant", "completion") and not (meta and meta.has_targets):
        yield Fault(
            fact=f"data.loss_on={loss_on}, and {field}={path!r} holds texts",
            rule="only conversations say what the assistant writes",
            remedy="set data.loss_on=auto, or prepare it with --format chat",
        )
