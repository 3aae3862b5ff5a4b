"""The code does not grow unnoticed."""

from __future__ import annotations

from pathlib import Path

from tests.code_tokens import bounds, counted, table, tokens_of


def test_no_package_has_more_tokens_than_its_bound() -> None:
    found, most = counted(), bounds()
    print(table(found, most))
    grown = {
        package: (count, most.get(package))
        for package, count in found.items()
        if count > most.get(package, 0)
    }
    assert not grown, (
        f"tokens and bounds: {grown}. Delete before adding; where the growth is worth it, raise the bound "
        "in tests/code_tokens.tsv, "
        "in a commit whose body says what it buys"
    )
    assert most.keys() <= found.keys(), "a package is gone: python -m tests.code_tokens --lower"


def test_words_and_layout_count_nothing(tmp_path: Path) -> None:
    plain, spoken = tmp_path / "plain.py", tmp_path / "spoken.py"
    plain.write_text('"""Doc."""\nx = 1\n')
    spoken.write_text('"""Doc\n\nof many words.\n"""\n\n# why\nx = (\n    1\n)\n')
    assert tokens_of(plain) == 4 and tokens_of(spoken) == 6
