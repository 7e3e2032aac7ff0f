"""Driver process of a run under chaos: `raymega train --json` with the workers of `chaos/worker_entry.py`.

``python -m raymega.chaos.driver_entry JOB.yaml HOST:PORT section.field=value ...``
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from raymega import api
from raymega.chaos.faulty_store import trouble_folders
from raymega.errors import RaymegaError
from raymega.tracking.jsonl import JsonLinesSink

ENTRY = "raymega.chaos.worker_entry"


def main(job_file: str, address: str, *overrides: str) -> int:
    """Run the job and return the exit code."""
    lines = JsonLinesSink(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            trouble_folders()
            job = api.load_job(job_file, overrides, is_for_training=True)
            api.train(job, address=address, sinks=(lines,), entry=ENTRY)
    except RaymegaError as error:
        for fault in error.faults:
            sys.stderr.write(f"{type(error).__name__}: {fault}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
