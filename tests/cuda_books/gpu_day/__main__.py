"""Tries `benchmarks/gpu_day.py` with small shapes on the device that executes nothing: each part must end without error."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cuda_books.build import build_device

ROOT = Path(__file__).parents[3]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_books.gpu_day")
    parser.add_argument(
        "--build", type=Path, default=Path("build/cuda-books"), help="folder of the libraries"
    )
    parser.add_argument(
        "--part", action="append", default=[], help="only this part; may be repeated"
    )
    options = parser.parse_args()
    environment = build_device(options.build.absolute()) | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpu.json"
        words = [
            sys.executable,
            "-m",
            "benchmarks.gpu_day",
            "--json",
            str(file),
            "--small",
            "--stand-in",
        ]
        words += [word for part in options.part for word in ("--part", part)]
        ended = subprocess.run(words, cwd=ROOT, env=environment, check=False)
        # the first line describes the device; each further one is a part
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    bad = [line["part"] for line in lines if "error" in line]
    print(
        f"gpu_day on the stand-in: {len(lines) - 1 - len(bad)} of {len(lines) - 1} parts ended without error"
    )
    return ended.returncode or int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
