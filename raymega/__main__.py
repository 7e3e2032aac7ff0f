"""The ``raymega`` command, also as ``python -m raymega``: loads the command line and runs it."""

import sys


def run() -> None:
    """Run the command line; a Ctrl-C while it loads ends it without a traceback."""
    try:
        from raymega.cli.main import run as command  # the load takes time: Ctrl-C may come here
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before anything was started\n")
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    run()
