"""Files that accompany a Hugging Face model: tokenizer, generation settings, config.json.

They are kept in the folder `hf/` of the checkpoint's store. A run that started from converted weights
has none of its own; they are looked up in the store that it started from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.errors import RaymegaError
from raymega.storage.store import Store

CONFIG = "config.json"
PREFIX = "hf/"
PATTERNS = (
    CONFIG, "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template*", "spiece.model",
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
            store, manifest = open_checkpoint(origin)
        except RaymegaError:  # the origin may be gone; the weights do not depend on it
            break
    return {}


def carried_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the config.json among ``files``, parsed; an empty dict without one."""
    config: dict[str, Any] = json.loads(files.get(CONFIG, b"{}"))
    return config


def _start_of(manifest: Manifest) -> str:
    checkpoint = manifest.job.get("checkpoint")
    return str(checkpoint.get("init_from", "none")) if isinstance(checkpoint, dict) else "none"
