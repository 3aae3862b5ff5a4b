"""The page of evidence is that of its data, and names tests that exist."""

from __future__ import annotations

from tests.evidence import PAGE, TESTS, named_tests, page, tables


def test_the_page_is_written_from_its_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.evidence writes it"


def test_every_row_is_whole_and_every_test_that_it_names_exists() -> None:
    for title, table in tables().items():
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}, title
    names = set(named_tests())
    assert len(names) > 150
    assert {name for name in names if not list(TESTS.glob(name))} == set()
