"""Finds the tokenizer of a checkpoint: a given file, the model's own, or that of the run's dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.convert.huggingface.extra_files import carried_config, files_of_model
from raymega.convert.huggingface.extra_files import find_tokenizer as find_files
from raymega.data.format import TOKENIZER_FILE
from raymega.data.images.files import MARK
from raymega.data.tokenizer_files import special_ids
from raymega.errors import ConfigError, Fault


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

    def marked_ids(self, text: str, token_id: int) -> list[int]:
        """Return the tokens of ``text``, in which special tokens are parsed and MARK is the token ``token_id``.

        Raises:
            ConfigError: The tokenizer has no such token.
        """
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            raise ConfigError(
                _fault(
                    f"{self.source} has no token {token_id}",
                    "model.vision.image_token_id is one of its tokens",
                )
            )
        self.tokenizer.encode_special_tokens = False
        try:
            return self.ids(text.replace(MARK, token))
        finally:
            self.tokenizer.encode_special_tokens = True


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
    files, store = model_files(checkpoint), checkpoint.store
    return tokenizer_in(files, f"the tokenizer in {store.uri}")


def tokenizer_in(files: Mapping[str, bytes], source: str) -> ModelTokenizer:
    """Return the tokenizer of files of a model or a dataset, among them tokenizer.json, from ``source``."""
    loaded = _load(files[TOKENIZER_FILE].decode(), None, source)
    eod_id = special_ids(files).eos
    if eod_id is None:  # 0 is a token like any other
        eod_id = carried_config(files).get("eos_token_id")
    return replace(loaded, eod_id=eod_id if isinstance(eod_id, int) else None)


def model_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the files of a checkpoint's model, with the tokenizer that it was trained with, by name.

    Raises:
        ConfigError: Neither has a tokenizer.
    """
    store, manifest = checkpoint
    files = files_of_model(store, manifest)
    if (
        TOKENIZER_FILE not in files
    ):  # such as tokenizer.model alone, which the dataset's was made of
        files = find_files(store, manifest, "")
    if TOKENIZER_FILE not in files:
        raise ConfigError(
            fact=f"{store.uri} has no tokenizer, and neither has the dataset of its run",
            rule="text is cut into the model's tokens",
            remedy="train on a dataset of `raymega data prepare`; `raymega eval` takes --tokenizer FOLDER/tokenizer.json",
        )
    return files


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
