"""Model that a new job file is written for: a folder of Hugging Face, or a checkpoint of raymega."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.schema import ModelSection
from raymega.convert.huggingface.extra_files import CONFIG, has_tokenizer
from raymega.convert.huggingface.importer import model_of_folder
from raymega.convert.native import model_of
from raymega.errors import ConfigError, Fault, RaymegaError

IMPORTED = "-raymega"
"""End of the name of the checkpoint that a folder of Hugging Face is imported to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingModel:
    """Model that a job begins with.

    Attributes:
        model: Model section.
        init_from: URI of the checkpoint that holds its weights, once ``import_line`` has run.
        import_line: Command that makes the checkpoint; empty where there is one already.
        tokenizer: Folder whose tokenizer cuts the text; empty where none is known.
    """

    model: ModelSection
    init_from: str
    import_line: str
    tokenizer: str


def starting_model(place: str) -> StartingModel:
    """Return the model at ``place``: a folder with a config.json, or the URI of a checkpoint.

    Raises:
        ConfigError: There is neither, or the model cannot be built.
    """
    folder = Path(place)
    if (folder / CONFIG).is_file():
        uri = f"{place.rstrip('/')}{IMPORTED}"
        files = {path.name: b"" for path in folder.iterdir()}
        return StartingModel(
            model=model_of_folder(folder),
            init_from=uri,
            import_line=f"raymega convert hf-import {place} --out {uri}",
            tokenizer=place if has_tokenizer(files) else "",
        )
    try:
        model = model_of(open_checkpoint(place).manifest)
    except RaymegaError as error:
        raise ConfigError(
            Fault(
                fact=f"--model {place} has no {CONFIG}, and no checkpoint ({error.faults[0].fact})",
                rule="a model is a folder of Hugging Face, of which config.json is enough, or a checkpoint of raymega",
                remedy="give such a folder: raymega init continue --model Llama-3.2-1B/",
            )
        ) from error
    return StartingModel(model=model, init_from=place, import_line="", tokenizer="")
