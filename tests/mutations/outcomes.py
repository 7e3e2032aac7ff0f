"""What the check of one module of planted mistakes says of the package, as it is and with each mistake: a JSON line for each.

``main("saves", [["", ""], [FILE, TEXT], ...])``: with each text in the place of a file of ``raymega``, the module's
``outcome`` gets a folder to write in. Modules of other packages, such as torch, are loaded once.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.mutations.planting import plant, uproot

PACKAGE = Path(__file__).parents[2] / "raymega"


def main(script: str, planted: Iterable[tuple[str, str]]) -> None:
    """Print the outcome of ``tests.mutations.SCRIPT`` with each text in the place of its file; "" is none."""
    for file, text in planted:
        # forget the package before
        for name in [name for name in sys.modules if name.split(".")[0] in ("raymega", "tests")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        uproot()
        if file:
            plant(str(PACKAGE), file, text)
        outcome = importlib.import_module(f"tests.mutations.{script}").outcome
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            print(json.dumps(outcome(Path(place))), flush=True)
