"""Recognises names of the Hugging Face Hub where a folder is meant, and says how to download them.

raymega reads folders and object stores; nothing is downloaded by it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PREFIX = re.compile(r"(hf://|https?://huggingface\.co/)(models/|datasets/)?")


def hub_name(text: str) -> str:
    """Return the OWNER/NAME that ``text`` most likely means; empty for anything else.

    Args:
        text: Path as it was given, or made absolute; a URI ``hf://`` or an address of the Hub.
    """
    bare = _PREFIX.sub("", text, count=1)
    if bare != text:
        return "/".join(bare.split("/")[:2])
    # the job file's paths are absolute by now
    with suppress(ValueError):
        bare = Path(text).relative_to(Path.cwd()).as_posix()
    is_name = _NAME.fullmatch(bare) and not bare.endswith((".yaml", ".json", ".jsonl", ".txt"))
    return bare if is_name and not Path(bare).parent.exists() else ""


def download(name: str, kind: Literal["model", "dataset"]) -> tuple[str, str]:
    """Return the command that downloads a repository of the Hub, and the folder that it makes."""
    folder = name.rpartition("/")[2]
    option = " --repo-type dataset" if kind == "dataset" else ""
    return f"hf download {name}{option} --local-dir {folder}", folder
