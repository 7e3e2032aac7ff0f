"""Imports a model of transformers, as a user who has its folder does."""

from pathlib import Path

from raymega.convert.huggingface.importer import HfImport, hf_import
from tests.unit.convert.folders import NOW

MULTIPLE = 8
"""Multiple to which the rows of token tables are padded."""


def imported(folder: Path, model, *, name: str = "ours", plugins=()) -> HfImport:
    """Save a model to the folder ``theirs``, and import it to the checkpoint ``name`` beside it."""
    model.save_pretrained(folder / "theirs")
    return hf_import(
        folder / "theirs", str(folder / name), created=NOW, make_vocab_size_divisible_by=MULTIPLE,
        plugins=plugins,
    )  # fmt: skip
