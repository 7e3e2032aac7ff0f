"""Reads the tokenizer that `--tokenizer FILE_OR_FOLDER` names, in any of the published formats.

Whatever the format, the result is a `tokenizers` JSON and the other files of a Hugging Face tokenizer.
Where the JSON is a conversion, it comes with the ids of the original library, to compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from raymega.data.format import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_PATTERNS
from raymega.data.tokenizer_files import token_text
from raymega.errors import ConfigError, Fault
from raymega.extras import import_extra
from raymega.prepare.tokenizer.sentencepiece_model import convert_sentencepiece, is_sentencepiece
from raymega.prepare.tokenizer.tiktoken_ranks import SUFFIX as TIKTOKEN
from raymega.prepare.tokenizer.tiktoken_ranks import convert_tiktoken

SPECIAL_TOKENS_MAP = "special_tokens_map.json"
EXTRA = "hf"
Witness = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTokenizer:
    """Tokenizer as it was found.

    Attributes:
        json: Content of its `tokenizers` file.
        settings: Content of tokenizer_config.json, with special tokens by name (``eos_token``).
        files: Other files of it by name, in the bytes that were found.
        identity: Content by which the recipe of a dataset knows the tokenizer.
        witness: Ids of a text by the library that the tokenizer was made for; None if that is
            `tokenizers`.
        library: Name of the library of ``witness``.
    """

    json: str
    settings: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    identity: bytes
    witness: Witness | None = None
    library: str = "tokenizers"


def read_source(path: Path) -> SourceTokenizer:
    """Return the tokenizer in the file or folder ``path``.

    Raises:
        ConfigError: The file is in no known format, or a package is needed that is not installed.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == TIKTOKEN:
        return _from_tiktoken(path, {})
    if is_sentencepiece(path):
        return _from_sentencepiece(path, _companions(path))
    content = path.read_bytes()
    text = content.decode(errors="replace")
    files = _companions(path)
    return SourceTokenizer(
        json=text, settings=_settings(files), files=_kept(files), identity=content
    )


def _read_folder(folder: Path) -> SourceTokenizer:
    """Read a folder as AutoTokenizer does: tokenizer.json first, then what it can convert."""
    if (folder / TOKENIZER_FILE).is_file():
        return read_source(folder / TOKENIZER_FILE)
    names = {path.name for path in folder.iterdir()}
    ranks = sorted(name for name in names if name.endswith(TIKTOKEN))
    if len(ranks) == 1:
        return _from_tiktoken(folder / ranks[0], _matching(folder))
    if not {TOKENIZER_CONFIG_FILE, "config.json", "merges.txt"} & names:
        pieces = sorted(name for name in names if name.endswith(".model"))
        if len(pieces) == 1 and is_sentencepiece(folder / pieces[0]):
            return _from_sentencepiece(folder / pieces[0], _matching(folder))
        raise ConfigError(
            _no_tokenizer(folder, f"it holds {', '.join(sorted(names)) or 'nothing'}")
        )
    return _from_transformers(folder)


def _from_transformers(folder: Path) -> SourceTokenizer:
    """Convert files such as vocab.json and merges.txt by transformers itself."""
    transformers = import_extra("transformers", extra=EXTRA, purpose=f"--tokenizer {folder}")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = loaded.backend_tokenizer.to_str()
    except Exception as error:  # whatever its many loaders raise
        raise ConfigError(_no_tokenizer(folder, str(error).splitlines()[0])) from error
    files = _matching(folder)
    named = {name: str(token) for name, token in loaded.special_tokens_map.items() if name in NAMED}
    return SourceTokenizer(
        json=text, settings={**_settings(files), **named}, files=_kept(files),
        identity=text.encode(),
    )  # fmt: skip


def _from_sentencepiece(path: Path, files: Mapping[str, bytes]) -> SourceTokenizer:
    text, named, witness = convert_sentencepiece(path)
    return SourceTokenizer(
        json=text, settings={**named, **_settings(files)},
        files={**_kept(files), "tokenizer.model": path.read_bytes()},
        identity=path.read_bytes(), witness=witness, library="sentencepiece",
    )  # fmt: skip


def _from_tiktoken(path: Path, files: Mapping[str, bytes]) -> SourceTokenizer:
    text, named, witness = convert_tiktoken(path)
    settings = {key: value for key, value in _settings(files).items() if key != "auto_map"}
    return SourceTokenizer(
        json=text, settings={**named, **settings},
        files={**_kept(files), path.name: path.read_bytes()},
        identity=path.read_bytes(), witness=witness, library="tiktoken",
    )  # fmt: skip


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in tokenizer_config.json."""


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return tokenizer_config.json, with tokens that only special_tokens_map.json names.

    Raises:
        ConfigError: One of the files is no JSON object.
    """
    found: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG_FILE):
        try:
            part = json.loads(files.get(name, b"{}"))
        except ValueError as error:
            raise ConfigError(_bad_settings(name, str(error))) from error
        if not isinstance(part, dict):
            raise ConfigError(_bad_settings(name, f"it is a {type(part).__name__}"))
        found |= {key: value for key, value in part.items() if value is not None}
    return {key: token_text(value) if key in NAMED else value for key, value in found.items()}


def _companions(path: Path) -> dict[str, bytes]:
    """Return the files beside a tokenizer.json or tokenizer.model; a file of another name is alone."""
    if path.name not in (TOKENIZER_FILE, "tokenizer.model"):
        return {}
    return {name: content for name, content in _matching(path.parent).items() if name != path.name}


def _matching(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in TOKENIZER_PATTERNS)
    }


def _kept(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that a dataset carries as they are; it writes the others itself."""
    written = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_MAP)
    return {name: content for name, content in files.items() if name not in written}


def _bad_settings(name: str, why: str) -> Fault:
    return Fault(
        fact=f"{name} beside the tokenizer cannot be read ({why})",
        rule="it is a JSON object with the names of the special tokens",
        remedy="repair it, or copy the tokenizer file alone into another folder",
    )


def _no_tokenizer(folder: Path, why: str) -> Fault:
    return Fault(
        fact=f"--tokenizer {folder} is no tokenizer ({why})",
        rule="a folder holds a tokenizer.json, one .model, one .tiktoken, or files that "
        "AutoTokenizer loads without code of their own",
        remedy="name the file, or save the tokenizer by transformers' save_pretrained",
    )
