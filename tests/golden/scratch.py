"""A folder of its own for what commands read and write, in an environment that no machine colours."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support.jobs import VERIFY

NAME = "FOLDER"
"""What the scratch folder is called in cases and in goldens; and jobs/verify.yaml:"""
JOB = "JOB"
FOREIGN = ("AWS_", "RAY_", "RAYMEGA_", "MLFLOW_", "PYTEST_", "FORCE_COLOR", "LINES")
"""Begins of variables that would change what is told."""
FIXED = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "RAY_AUTH_MODE": "disabled"}


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder to stand in, below which the home folder lies too."""
    with tempfile.TemporaryDirectory(prefix="raymega-golden-") as name:
        folder = Path(name).resolve()
        (folder / "home").mkdir()
        kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        with patch.dict(os.environ, clear=True), chdir(folder):
            os.environ.update(kept | FIXED | {"HOME": str(folder / "home")})
            yield folder


def placed(text: str, folder: Path) -> str:
    """The text of a case as it is for ``folder``."""
    return text.replace(NAME, str(folder)).replace(JOB, str(VERIFY))


def plain(text: str, folder: Path, *, mask: str = "") -> str:
    """What was told, without real names of folders, and with stars where the pattern ``mask`` fits."""
    told = text.replace(str(folder), NAME).replace(str(VERIFY), JOB)
    return re.sub(mask, "*", told) if mask else told
