"""What the check of one module of planted mistakes says of copies of the package: a JSON line for each.

``python -m tests.mutations.outcomes saves FOLDER...``: each folder holds a copy of ``raymega``; the module's ``outcome``
gets a folder to write in. Modules of other packages, such as torch, are loaded once.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path


def main(script: str, folders: list[str]) -> None:
    """Print the outcome of ``tests.mutations.SCRIPT`` in each of the folders."""
    outcome = importlib.import_module(f"tests.mutations.{script}").outcome
    for folder in folders:
        # forget the copy before
        for name in [name for name in sys.modules if name.split(".")[0] in ("raymega", "tests")]:
            del sys.modules[name]
        sys.path.insert(0, folder)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            print(json.dumps(outcome(Path(place))), flush=True)
        sys.path.remove(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
