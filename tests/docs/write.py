"""Writes what is generated in the pages anew: ``python -m tests.docs.write`` (`make pages`). Read the diff."""

from __future__ import annotations

import os

# As tests/conftest.py, before torch and ray are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"

from tests.docs.blocks import ROOT
from tests.docs.job_file import PAGE, rendered
from tests.docs.running import GENERATED, page_folder, regenerated


def main() -> None:
    """Write the tables of the job-file page, and the outputs of commands on the pages that have such."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name in GENERATED:
        page = ROOT / name
        with page_folder() as folder:
            text = regenerated(page.read_text(encoding="utf-8"), name, folder, only_quick=False)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
