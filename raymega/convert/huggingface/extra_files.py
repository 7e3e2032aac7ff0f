"""Files that come with a Hugging Face model and go with it: tokenizer, generation, config.json.

They lie beside the checkpoint, in the folder `hf/` of its store. A run that started from converted
weights has none of its own; they are found where it started from.
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


def files_to_carry(folder: Path) -> list[Path]:
    """What of a model's folder goes along, by name."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in PATTERNS)
    ]


def find_carried(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """Name to content of the files that belong to a checkpoint; nothing when there are none."""
    for _ in range(MAX_HOPS):
        keys = list(store.list(PREFIX))
        if keys:
            return {key.removeprefix(PREFIX): store.get(key) for key in keys}
        origin = _start_of(manifest)
        if origin == "none":
            break
        try:
            store, manifest = open_checkpoint(origin)
        except RaymegaError:  # what a run started from may be gone; its weights are not affected
            break
    return {}


def carried_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The config.json among them, or nothing."""
    config: dict[str, Any] = json.loads(files.get(CONFIG, b"{}"))
    return config


def _start_of(manifest: Manifest) -> str:
    checkpoint = manifest.job.get("checkpoint")
    return str(checkpoint.get("init_from", "none")) if isinstance(checkpoint, dict) else "none"
