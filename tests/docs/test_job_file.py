"""The job-file page holds the tables that are made from the schema."""

import pytest

from tests.docs.job_file import PAGE, rendered


def test_tables_are_those_of_the_schema():
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page, "run make pages: docs/job-file.md is not what the schema says"


def test_section_that_is_missing_is_refused():
    page = PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"write .*'tracking'"):
        rendered(page.replace("\n## tracking\n", "\n"))
