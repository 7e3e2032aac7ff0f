"""``python -m raymega``: the ``raymega`` command."""

from raymega.cli.main import run

if __name__ == "__main__":
    run()
