"""The size of the code: tokens of Python a package, and the most that each may have
(``tests/code_tokens.tsv``).

``python -m tests.code_tokens`` prints both. ``--lower`` sets bounds down to what is there; a bound is raised
by hand, in a commit whose body says what it buys. Comments and layout count nothing, and a docstring as one
token, so that nobody saves words.
"""

from __future__ import annotations

import argparse
import subprocess
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUNDS = Path(__file__).with_suffix(".tsv")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def package_of(path: str) -> str:
    """The package that a file counts for: rooms of the library, the tests and the benchmarks as a whole."""
    top, *rest = path.split("/")
    if top not in {"megarl", "converters"}:
        return top
    return "/".join([top, *rest[:-1][: 2 if rest[0] == "models" else 1]])


def tokens_of(path: Path) -> int:
    """Tokens of a file."""
    with path.open("rb") as stream:
        return sum(token.type not in _LAYOUT for token in tokenize.tokenize(stream.readline))


def counted() -> Counter[str]:
    """Tokens of each package, of the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found: Counter[str] = Counter()
    for path in listed:
        if (ROOT / path).is_file():
            found[package_of(path)] += tokens_of(ROOT / path)
    return found


def bounds() -> dict[str, int]:
    """The most tokens of each package."""
    lines = BOUNDS.read_text(encoding="utf-8").splitlines()
    return {package: int(most) for package, most in (line.split("\t") for line in lines)}


def table(found: Mapping[str, int], most: Mapping[str, int]) -> str:
    """Packages with their tokens and bounds, the largest first."""
    rows = [
        f"{found.get(package, 0):>9,} of {most.get(package, 0):>9,}  {package}"
        for package in sorted(most, key=most.__getitem__)[::-1]
    ]
    library = sum(
        count for package, count in found.items() if package.split("/")[0] in {"megarl", "converters"}
    )
    return "\n".join([*rows, f"{library:>9,} megarl and converters together"])


def main() -> None:
    """Print the table, or lower the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lower",
        action="store_true",
        help="set bounds down to what is there; new packages get what they have",
    )
    found, most = counted(), bounds()
    if parser.parse_args().lower:
        most = {package: min(count, most.get(package, count)) for package, count in sorted(found.items())}
        BOUNDS.write_text(
            "".join(f"{package}\t{count}\n" for package, count in most.items()), encoding="utf-8"
        )
    print(table(found, most))


if __name__ == "__main__":
    main()
