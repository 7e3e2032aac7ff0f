"""SmolLM2-135M-Instruct, a published model, for tests that are marked `real_model`.

It comes from a package of 93 MB; without that the tests are skipped, with the line that installs it. Texts to measure it
on are WikiText's and LAMBADA's test files where RAYMEGA_TEST_SETS names the folder that has them, else pages of this
repository in the same forms.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "jobs" / "smollm2.py"
SETS = "RAYMEGA_TEST_SETS"


def skip_without_it():
    """Skip the test where the model or what reads it is not installed."""
    # the script is no module of a package: load it by its path
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if missing := script.missing():
        pytest.skip(f"{', '.join(missing)} not installed: `{script.INSTALL}` fetches 93 MB")


def write_model(folder):
    """Write the model as a folder of Hugging Face, as a reader does."""
    skip_without_it()
    command = [sys.executable, str(SCRIPT), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def has_test_sets():
    return SETS in os.environ


def text_files(scratch):
    """Return the paths of a long text and of passages; ``scratch`` is a folder for those of this repository."""
    if has_test_sets():
        folder = Path(os.environ[SETS])
        return folder / "wikitext2_test.txt", folder / "lambada_test.jsonl"
    pages = sorted((ROOT / "docs").glob("*.md"))
    long, passages = scratch / "long.txt", scratch / "passages.jsonl"
    long.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages))
    # paragraphs of prose stand for LAMBADA's passages
    found = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    sentences = [part for part in found if part[:1].isalpha() and 100 < len(part) < 600]
    passages.write_text("".join(json.dumps({"text": part}) + "\n" for part in sentences))
    return long, passages
