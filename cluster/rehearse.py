"""Brings the shipped cluster files up for real, on machines made of Linux namespaces, and breaks them.

    sudo .venv/bin/python cluster/rehearse.py on-premise

needs root, /usr/bin/python3 of 3.11 or newer with venv, openssh-server, rsync and iproute2. The first
time it installs raymega with the shipped script, for which it needs the package index.
"""

import sys

from rehearsal import aws, hosts, local
from rehearsal.script import Record

REHEARSALS = {"on-premise": local.rehearse, "aws": aws.rehearse}


def main() -> int:
    """Run the rehearsals that are named; the last line of each is its figures as JSON."""
    names = sys.argv[1:] or list(REHEARSALS)
    if not set(names) <= set(REHEARSALS):
        sys.exit(f"{' '.join(names)}: choose from {', '.join(REHEARSALS)}")
    if reason := hosts.missing():
        sys.exit(reason)
    for name in names:
        record = Record()
        REHEARSALS[name](record)
        print(record.dump(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
