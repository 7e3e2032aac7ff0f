"""Entry point for `ray job submit --working-dir . -- python jobs/train.py JOB.yaml --set a.b=c`."""

import sys

from raymega.cli.main import run

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    run()
