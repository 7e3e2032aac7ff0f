"""Head of a new job's model: that of the folder, or one for classes, and the rows that it reads."""

from __future__ import annotations

from typing import Any

from raymega.config.heads.section import HeadSection
from raymega.config.schema import ModelSection
from raymega.data.heads.checks import FORMATS
from raymega.data.heads.form import form_of
from raymega.plan.tensor_table import model_tensors

NEW_HEAD = HeadSection(kind="sequence_classification", num_labels=2)
"""Head of the recipe classify, for a model that predicts tokens."""
REWARD_LOSS = "bradley_terry"


def with_new_head(model: ModelSection) -> tuple[ModelSection, dict[str, list[str]]]:
    """Return the model with a head for classes, and the fields by which a run starts it from the model's weights.

    A model that has a head without a vocabulary keeps it, and its weights.
    """
    if model.head.is_on:
        return model, {}
    headed = model.model_copy(update={"head": NEW_HEAD})
    # tensors that only one of the two models has
    before, after = ([tensor.name for tensor in model_tensors(each)] for each in (model, headed))
    rules = {
        "reinit": [name for name in after if name not in before],
        "init_ignore": [name for name in before if name not in after],
    }
    return headed, {field: names for field, names in rules.items() if names}


def set_rows(values: dict[str, dict[str, Any]], model: ModelSection) -> str:
    """Set what the rows of a model's head need in a job's values, and return the input of `raymega data prepare`."""
    values["data"] |= {"packing": "best_fit"}
    values["data"].pop("loss_on", None)  # labels are of documents
    # a reward model learns from pairs
    loss = REWARD_LOSS if model.head.kind == "reward" else "none"
    if loss != "none":
        values["preference"] = {"loss_type": loss}
    row_format = FORMATS[form_of(loss, model.head, model.family).kind]
    return f"my-{'pairs' if row_format == 'preference' else 'labels'}.jsonl --format {row_format}"
