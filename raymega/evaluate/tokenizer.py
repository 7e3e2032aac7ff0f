"""Finds the tokenizer of a checkpoint: a given file, the model's own, or that of the run's dataset."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.config.data import NO_PATH, is_synthetic
from raymega.convert.huggingface.extra_files import carried_config, find_carried
from raymega.data.format import META_FILE, TOKENIZER_FILE
from raymega.errors import ConfigError, Fault, RaymegaError
from raymega.storage.registry import open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTokenizer:
    """Tokenizer of a model.

    Attributes:
        tokenizer: Tokenizer of the `tokenizers` library.
        eod_id: Token that closes a document; None where nothing tells.
        source: Place where it was found, for messages.
    """

    tokenizer: Tokenizer
    eod_id: int | None
    source: str

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the largest one plus 1."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def ids(self, text: str) -> list[int]:
        """Return the tokens of ``text`` alone; text that spells a special token stays text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def find_tokenizer(checkpoint: Checkpoint, file: Path | None = None) -> ModelTokenizer:
    """Return the tokenizer of a checkpoint's model.

    Args:
        checkpoint: Checkpoint of a run, or of a converted model.
        file: Tokenizer file to use; None looks for the model's own, then for that of the run's dataset.

    Raises:
        ConfigError: There is none, or it is no file of the `tokenizers` library.
    """
    if file is not None:
        if not file.is_file():
            raise ConfigError(_fault(f"--tokenizer {file}", "it must be a tokenizer.json"))
        return _load(file.read_text(encoding="utf-8"), None, str(file))
    # files that came with the model
    carried = find_carried(checkpoint.store, checkpoint.manifest)
    if TOKENIZER_FILE in carried:
        eod_id = carried_config(carried).get("eos_token_id")
        text = carried[TOKENIZER_FILE].decode()
        return _load(text, eod_id if isinstance(eod_id, int) else None, "the model's own files")
    # the dataset of the run
    data = checkpoint.manifest.job.get("data")
    sources = [data, *data.get("sources", ())] if isinstance(data, dict) else []
    paths = [str(source.get("path", NO_PATH)) for source in sources]
    path = next((path for path in paths if path != NO_PATH), "")
    if path and not is_synthetic(path):
        try:
            store = open_store(path)
            meta = json.loads(store.get(META_FILE))
            return _load(store.get(TOKENIZER_FILE).decode(), meta["eod_id"], path)
        except RaymegaError as error:
            fact = f"the run's dataset {path} cannot be read: {error}"
            raise ConfigError(_fault(fact, "a task's text is cut into the run's tokens")) from error
    fact = f"{checkpoint.store.uri} has neither a tokenizer nor a dataset with one"
    raise ConfigError(_fault(fact, "a task's text is cut into the model's tokens"))


def _load(text: str, eod_id: int | None, source: str) -> ModelTokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(_fault(f"{source}: {error}", "it must be a tokenizer.json")) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return ModelTokenizer(tokenizer=tokenizer, eod_id=eod_id, source=source)


def _fault(fact: str, rule: str) -> Fault:
    return Fault(fact=fact, rule=rule, remedy="give --tokenizer FOLDER/tokenizer.json")
