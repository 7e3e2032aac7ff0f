"""Writes what is generated in the pages anew: ``python -m tests.docs.write`` (`make pages`). Read the diff."""

from __future__ import annotations

from tests.docs.job_file import PAGE, rendered


def main() -> None:
    """Write the tables of the job-file page."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
