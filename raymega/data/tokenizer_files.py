"""Takes a dataset's tokenizer along: into the store of the run that trains on it, and out of it.

So an export of the run has its tokenizer even where the dataset has moved. What the files hold is decided
by `raymega.prepare.tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raymega.config.data import is_computed
from raymega.data.format import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, local_folder
from raymega.data.megatron import is_megatron
from raymega.data.streaming.remote_dataset import is_remote, meta_at
from raymega.errors import RaymegaError
from raymega.storage.registry import open_store
from raymega.storage.store import Store

PREFIX = "tokenizer/"
"""Place of the files in the store of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """Ids of the tokens that begin and end a text; None where the tokenizer has none."""

    bos: int | None = None
    eos: int | None = None


def keep_tokenizer(store: Store, path: str) -> None:
    """Copy the tokenizer of the dataset at ``path`` into the store of a run, unless it is there.

    Tokens of no file have none, and a dataset without files of one is no error.

    Raises:
        StorageError: The store cannot be written.
    """
    if is_computed(path) or next(iter(store.list(PREFIX)), None):
        return
    for name, content in tokenizer_of_dataset(path).items():
        store.put(PREFIX + name, [content], overwrite=True)


def kept_tokenizer(store: Store) -> dict[str, bytes]:
    """Return the tokenizer in the store of a run, by name of the file; empty without one."""
    keys = list(store.list(PREFIX))
    return {key.removeprefix(PREFIX): store.get(key) for key in keys}


def tokenizer_of_dataset(path: str) -> dict[str, bytes]:
    """Return the tokenizer of the dataset at ``path``, by name of the file; empty without one.

    A dataset that was prepared without settings of its tokenizer gets those that load it.
    Tokens of no file and Megatron's files have none.
    """
    if is_computed(path) or is_megatron(path):
        return {}
    try:
        meta = meta_at(path)
    except RaymegaError:  # moved, or in a store that is out of reach
        return {}
    found = {}
    for name in meta.tokenizer.files:
        try:
            found[name] = _read(path, name)
        except (KeyError, FileNotFoundError):
            continue
    if TOKENIZER_FILE in found and TOKENIZER_CONFIG_FILE not in found:
        settings = loading_settings({}, eod=meta.tokenizer.eod_token, bos="")
        found[TOKENIZER_CONFIG_FILE] = encode_settings(settings)
    return found


def special_ids(files: Mapping[str, bytes]) -> SpecialIds:
    """Return the ids of ``bos_token`` and ``eos_token`` by the files of a dataset's tokenizer."""
    if not {TOKENIZER_FILE, TOKENIZER_CONFIG_FILE} <= files.keys():
        return SpecialIds()
    settings = json.loads(files[TOKENIZER_CONFIG_FILE])
    added = json.loads(files[TOKENIZER_FILE]).get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in added}
    return SpecialIds(
        bos=ids.get(token_text(settings.get("bos_token"))),
        eos=ids.get(token_text(settings.get("eos_token"))),
    )


def token_text(token: object) -> Any:
    """Return the text of a token in a tokenizer's settings, where older files have an object with its ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def template_of(files: Mapping[str, bytes]) -> str:
    """Return the chat template of a tokenizer by its files; empty without one."""
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode()
    setting = json.loads(files.get(TOKENIZER_CONFIG_FILE, b"{}")).get("chat_template")
    # one template, or several with names
    if isinstance(setting, list):
        setting = {each.get("name"): each.get("template") for each in setting}.get("default")
    return setting if isinstance(setting, str) else ""


LOADER = "PreTrainedTokenizerFast"
"""Class of transformers that takes everything from tokenizer.json; those of models rebuild parts of it."""
UNSAID = ("auto_map", "tokenizer_file", "vocab_file", "name_or_path", "_commit_hash", "backend")
"""Settings about files and code that do not come along."""


def loading_settings(settings: Mapping[str, Any], *, eod: str, bos: str) -> dict[str, Any]:
    """Return the tokenizer_config.json with which AutoTokenizer gives the ids of a dataset.

    Args:
        settings: Settings that the tokenizer came with.
        eod: Text of the end-of-document token.
        bos: Text of the token that begins every document; empty without. A document begins after the
            end of another one then, so ``bos_token`` is the end, as GPT-2 has it.
    """
    kept = {key: value for key, value in settings.items() if key not in UNSAID}
    return kept | {
        "tokenizer_class": LOADER,
        "eos_token": eod,
        "bos_token": bos or eod,
        "add_bos_token": bool(bos),
        "add_eos_token": False,
    }


def encode_settings(settings: Mapping[str, Any]) -> bytes:
    """Return the bytes of a tokenizer_config.json."""
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def _read(path: str, name: str) -> bytes:
    if is_remote(path):
        return open_store(path).get(name)
    return (local_folder(path) / name).read_bytes()
