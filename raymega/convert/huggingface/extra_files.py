"""Files that accompany a Hugging Face model: tokenizer, generation settings, config.json.

Those of converted weights are kept in the folder `hf/` of the checkpoint's store; a run that started from
them looks there. A run from scratch has the tokenizer of its dataset, as has one on a dataset with other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.tools.inspection import open_checkpoint, run_of
from raymega.config.data import NO_PATH, SYNTHETIC_PATH
from raymega.config.encoder import NO_TOKEN
from raymega.data import tokenizer_files
from raymega.data.format import TEMPLATE_FILE, TOKENIZER_FILE, TOKENIZER_PATTERNS
from raymega.data.tokenizer_files import (
    kept_tokenizer,
    special_ids,
    template_of,
    tokenizer_of_dataset,
)
from raymega.errors import RaymegaError
from raymega.storage.store import Store

CONFIG = "config.json"
PREFIX = "hf/"
GENERATION_CONFIG = "generation_config.json"
PATTERNS = (
    CONFIG, GENERATION_CONFIG, "preprocessor_config.json", "processor_config.json", *TOKENIZER_PATTERNS
)  # fmt: skip
MAX_HOPS = 16
"""Longest chain of ``checkpoint.init_from`` that is followed; ends a circle."""


def files_to_carry(folder: Path) -> list[Path]:
    """Return the files of a model's folder that are kept with it, sorted by name."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in PATTERNS)
    ]


def find_carried(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """Return the content of the files that belong to a checkpoint, by name; empty without any."""
    # This store, then the store that its run started from, and so on.
    for _ in range(MAX_HOPS):
        keys = list(store.list(PREFIX))
        if keys:
            return {key.removeprefix(PREFIX): store.get(key) for key in keys}
        origin = _start_of(manifest)
        if origin == "none":
            break
        try:
            # the files are its run's, whose checkpoint that was started from may be deleted by now
            store, manifest = open_checkpoint(run_of(origin))
        except RaymegaError:  # the origin may be gone; the weights do not depend on it
            break
    return {}


def bring_along(source: Store, manifest: Manifest, target: Store) -> int:
    """Write the files that belong to a checkpoint into the store of its copy; return their number.

    What ``target`` has already stays: a run that continues there has files of its own.

    Raises:
        StorageError: A store failed; the same call again writes what is missing.
    """
    files = {PREFIX + name: data for name, data in find_carried(source, manifest).items()}
    for name, data in find_tokenizer(source, manifest, "").items():
        files[tokenizer_files.PREFIX + name] = data
    present = {*target.list(PREFIX), *target.list(tokenizer_files.PREFIX)}
    missing = files.keys() - present
    for key in sorted(missing):
        target.put(key, [files[key]], overwrite=True)
    return len(missing)


def files_of_model(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """Return the files of a checkpoint's model, with the tokenizer that it was trained with, by name."""
    files, tokenizer = files_and_tokenizer(store, manifest)
    if not tokenizer:
        return files
    config = carried_config(files)
    files |= generation_files(tokenizer, config)
    if CONFIG in files:
        files[CONFIG] = json.dumps(config, indent=2).encode()
    return files


def files_and_tokenizer(
    store: Store, manifest: Manifest, path: str = ""
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the files that came with a checkpoint's model, and the tokenizer that takes the place of theirs.

    The second is empty where theirs stays: it has more settings than that of a dataset with the same tokens. A chat
    template of the dataset is that of the answers that were trained, and comes first.

    Args:
        store: Store of the checkpoint.
        manifest: Manifest of the checkpoint.
        path: Path of the dataset whose tokenizer is taken in any case; empty for that of the run.
    """
    carried, own = find_carried(store, manifest), find_tokenizer(store, manifest, path)
    is_own = bool(path) or not has_tokenizer(carried) or _has_other_tokens(own, carried)
    if is_own and has_tokenizer(own):
        stays = {TEMPLATE_FILE} - own.keys()
        return {
            n: data for n, data in carried.items() if n in stays or not _is_of_tokenizer(n)
        }, own
    template = template_of(own)
    if template and template != template_of(carried):
        carried[TEMPLATE_FILE] = template.encode()
    return carried, {}


def _is_of_tokenizer(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_PATTERNS)


def _has_other_tokens(own: Mapping[str, bytes], carried: Mapping[str, bytes]) -> bool:
    """Return True if both have a tokenizer.json, with other tokens or other ids."""
    if TOKENIZER_FILE not in own or TOKENIZER_FILE not in carried:
        return False
    return _vocabulary(own[TOKENIZER_FILE]) != _vocabulary(carried[TOKENIZER_FILE])


def _vocabulary(content: bytes) -> dict[str, int]:
    return dict(Tokenizer.from_str(content.decode()).get_vocab(with_added_tokens=True))


def has_tokenizer(files: Mapping[str, bytes]) -> bool:
    """Return True if the files hold a tokenizer, in any form that AutoTokenizer loads."""
    forms = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.*")
    return any(fnmatch(name, form) for name in files for form in forms)


def find_tokenizer(store: Store, manifest: Manifest, path: str) -> dict[str, bytes]:
    """Return the files of the tokenizer that a run from scratch was trained with; empty without any.

    Args:
        store: Store of the run.
        manifest: Manifest of a checkpoint of the run.
        path: Path of the dataset to take it from; empty for the store of the run, else the dataset that
            the job names.
    """
    if path:
        return tokenizer_of_dataset(path)
    data = manifest.job.get("data")
    entries = [data, *data.get("sources", ())] if isinstance(data, dict) else []
    named = [str(entry.get("path", SYNTHETIC_PATH)) for entry in entries]
    first = next((path for path in named if path != NO_PATH), SYNTHETIC_PATH)
    return kept_tokenizer(store) or tokenizer_of_dataset(first)


def generation_files(tokenizer: Mapping[str, bytes], config: dict[str, Any]) -> dict[str, bytes]:
    """Set begin and end of a text in ``config``; return the generation settings and the tokenizer.

    Without a tokenizer both are null: an architecture's default ids would be tokens like any other.
    """
    ids = special_ids(tokenizer)
    config |= {"bos_token_id": ids.bos, "eos_token_id": ids.eos}
    if not tokenizer:
        return {}
    settings = {"bos_token_id": ids.bos, "eos_token_id": ids.eos}
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    return {**tokenizer, GENERATION_CONFIG: text.encode()}


def carried_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the config.json among ``files``, parsed; an empty dict without one."""
    config: dict[str, Any] = json.loads(files.get(CONFIG, b"{}"))
    return config


def trained_tokens(manifest: Manifest) -> dict[str, int]:
    """Return the special tokens with which an encoder-decoder model was trained, as config.json has them; else none."""
    data = manifest.job.get("data")
    spans = data.get("span_corruption") if isinstance(data, dict) else None
    if not spans or spans.get("eos_token_id", NO_TOKEN) == NO_TOKEN:
        return {}
    start = spans.get("decoder_start_token_id", 0)
    return {
        "eos_token_id": spans["eos_token_id"],
        "decoder_start_token_id": start,
        "pad_token_id": start,
    }


def _start_of(manifest: Manifest) -> str:
    checkpoint = manifest.job.get("checkpoint")
    return str(checkpoint.get("init_from", "none")) if isinstance(checkpoint, dict) else "none"
