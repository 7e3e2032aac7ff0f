"""Model that a new job file is written for: a folder of Hugging Face, or a checkpoint of raymega."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.hub import download, hub_name
from raymega.config.schema import ModelSection
from raymega.convert.huggingface.extra_files import CONFIG, has_tokenizer
from raymega.convert.huggingface.importer import model_of_folder
from raymega.convert.native import model_of
from raymega.convert.tuned.adapted_weights import merged_model
from raymega.data.format import TOKENIZER_FILE
from raymega.data.synthetic import SYNTHETIC_VOCAB_SIZE
from raymega.errors import ConfigError, Fault, RaymegaError

SPECIAL_TOKENS = {
    "mask_token_id": ("[MASK]", "<mask>"),
    "cls_token_id": ("[CLS]", "<s>"),
    "sep_token_id": ("[SEP]", "</s>"),
}
"""Special tokens of BERT's and RoBERTa's tokenizers by field of ``data.masking``."""
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


def starting_model(place: str, *, option: str = "--model") -> StartingModel:
    """Return the model at ``place``: a folder with a config.json, or the URI of a checkpoint.

    Args:
        place: Folder or URI, as it was given.
        option: Option that gave it, for the error.

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
            import_line=f"raymega convert hf-import {quote(place)} --out {quote(uri)}",
            tokenizer=place if has_tokenizer(files) else "",
        )
    try:
        # the recipe decides what is trained, not the run that made the checkpoint
        model = merged_model(model_of(open_checkpoint(place).manifest))
    except RaymegaError as error:
        raise ConfigError(
            Fault(
                fact=f"{option} {place} has no {CONFIG}, and no checkpoint ({error.faults[0].fact})",
                rule="a model is a folder of Hugging Face, of which config.json is enough, or a checkpoint of raymega",
                remedy=_folder_line(option, place),
            )
        ) from error
    return StartingModel(model=model, init_from=place, import_line="", tokenizer="")


def _folder_line(option: str, place: str) -> str:
    """Return the line to paste for a place without a model: of a name of the Hub, how it becomes a folder."""
    name = hub_name(place)
    if not name:
        return f"give such a folder, for example {option} Llama-3.2-1B/"
    command, folder = download(name, "model")
    return f"`{command}`, then {option} {folder}"


def span_tokens(folder: str, vocab_size: int) -> dict[str, int]:
    """Return the ids of an encoder-decoder's special tokens by field of ``data.span_corruption``.

    They are those of the tokenizer in ``folder``; without one, the last tokens, and ids behind the built-in ones.
    """
    file = Path(folder) / TOKENIZER_FILE
    added: list[dict[str, Any]] = []
    if folder and file.is_file():
        added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or []
    ids = {token["content"]: int(token["id"]) for token in added}
    if "<extra_id_0>" in ids and "</s>" in ids:
        return {"first_sentinel_id": ids["<extra_id_0>"], "eos_token_id": ids["</s>"]}
    return {"first_sentinel_id": vocab_size - 1, "eos_token_id": SYNTHETIC_VOCAB_SIZE}


def special_tokens(folder: str) -> dict[str, int]:
    """Return the ids of an encoder's special tokens by field of ``data.masking``.

    They are those of the tokenizer in ``folder``; without one, ids behind the built-in tokens.
    """
    fields = tuple(SPECIAL_TOKENS)
    found = {name: SYNTHETIC_VOCAB_SIZE + place for place, name in enumerate(fields)}
    file = Path(folder) / TOKENIZER_FILE
    if not folder or not file.is_file():
        return found
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or []
    ids = {token["content"]: int(token["id"]) for token in added}
    known = {
        name: ids[text] for name, texts in SPECIAL_TOKENS.items() for text in texts if text in ids
    }
    return found if "mask_token_id" not in known else known
