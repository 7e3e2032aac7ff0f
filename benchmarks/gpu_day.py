"""Everything that only a GPU can say, in parts with a time limit each: parity, speed, memory, recovery.

It needs one H100 or H200, torch 2.11 to 2.13 and raymega's training side; no network and no Ray. Each part
runs in a process of its own, and its line is appended to the file as soon as it is over. Two commands of
under ten minutes do all of them:

    python -m benchmarks.gpu_day --json gpu.json --half 1
    python -m benchmarks.gpu_day --json gpu.json --half 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

PARTS = {
    "parity": 60, "verify": 120, "speed": 90, "layers": 90, "experts": 60, "rates": 40, "memory": 30, "curve": 90,
    "fp8": 90, "grouped": 40, "offload": 60, "checkpoint": 60, "nccl": 40, "loading": 30, "sanitizer": 80,
}  # fmt: skip
"""Parts in the order of their value, with the seconds that each may take."""
FIRST_HALF = 8
SPEEDS = ("speed", "layers", "experts")
"""Parts that are models whose steps are timed."""
STAND_IN_LIMIT = 6
"""Factor of the limits where the device executes nothing and other work runs beside."""
NO_GPU = "no GPU: torch finds no CUDA device here, and every part of this benchmark needs one"


def main() -> int:
    """Run the command."""
    options = _options()
    # the child process of one part
    if options.only:
        return _run_part(options)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    names = list(PARTS)
    half = {1: names[:FIRST_HALF], 2: names[FIRST_HALF:]}.get(options.half, names)
    # first, so that a file that breaks off says whose figures it has
    append(options.json, {"part": "machine", **machine()})
    lines = [_in_process(name, options) for name in options.part or half]
    return int(any("error" in line for line in lines))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=Path, required=True, help="file to append a line of JSON a part to"
    )
    parser.add_argument(
        "--half", type=int, choices=(1, 2), help="only the first or second half of the parts"
    )
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this part; may be repeated"
    )
    parser.add_argument(
        "--small", action="store_true", help="small shapes, to try the script itself"
    )
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="the device executes nothing: put answers in, judge no value",
    )
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """Return what a figure depends on: the card, torch and the driver's memory."""
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda,
        "total_bytes": total, "context_bytes": total - free,
    }  # fmt: skip


def append(file: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON, and print it."""
    text = json.dumps(line)
    with file.open("a") as out:
        out.write(text + "\n")
    print(text, flush=True)


def _in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process of its own; append its results, or its error, and return that line."""
    flags = [
        f"--{flag.replace('_', '-')}" for flag in ("small", "stand_in") if getattr(options, flag)
    ]
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu_day",
        "--json",
        str(options.json),
        "--only",
        name,
        *flags,
    ]
    limit = PARTS[name] * (STAND_IN_LIMIT if options.stand_in else 1)
    began = time.monotonic()
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
        # results are the last line; libraries print before it
        last = next(iter(reversed(ended.stdout.splitlines())), "")
        found = json.loads(last) if ended.returncode == 0 else {"error": ended.stderr[-2000:]}
    # a part that hangs costs its own time alone
    except subprocess.TimeoutExpired as error:
        text = error.stderr or b""
        found = {"error": f"not over after {limit} s: {text[-1000:]!r}"}
    line = {"part": name, "seconds": round(time.monotonic() - began, 1), **found}
    append(options.json, line)
    return line


def _run_part(options: argparse.Namespace) -> int:
    """Print the results of one part as the last line; the body of its process."""
    from benchmarks import gpu_parts, gpu_rates, gpu_speed, gpu_verify

    setting = gpu_parts.Setting(is_small=options.small, is_stand_in=options.stand_in)
    homes = {"verify": gpu_verify, "rates": gpu_rates} | dict.fromkeys(SPEEDS, gpu_speed)
    results = getattr(homes.get(options.only, gpu_parts), f"measure_{options.only}")(setting)
    print(json.dumps(results), flush=True)
    if options.stand_in:
        # both streams are flushed: the process ends without Python's clean-up
        sys.stderr.flush()
        gpu_parts.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
