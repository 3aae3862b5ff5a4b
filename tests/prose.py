"""Figures of the prose in the code: ``python -m tests.prose`` prints them, a package a line.

They are those of the language's rules: docstrings whose first line is a class name split into words, or
begins with a question word; comments, of lines of code; lines over 110 columns; comprehensions.
``tests/unit/test_prose.py`` has the bounds.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 110
QUESTIONS = frozenset({"What", "Whether", "Of", "As", "How", "Where", "Those"})
"""Words with which no docstring begins: it says what the thing does, or names it."""
GLOSSARY = (
    *("anew", "for ever", "cut off", "judged", "drawn", "said", "told", "lies", "lie", "beside", "so often"),
    *("so many", "halvings", "parcels", "ticket", "broken off", "brought up to date", "played", "census"),
)
"""Words of our own for which the field has others."""
DOCUMENTS = ("*.md", "configs/*.yaml", "launch/*.sh", "launch/*.sbatch", "tests/data/evidence.yaml")
_COUNTED = re.compile(rf"\b({'|'.join(map(re.escape, GLOSSARY))})\b", re.IGNORECASE)
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Figures:
    """Counts over some files; lists have ``file:line``."""

    lines: int = 0
    code: int = 0
    comments: int = 0
    comprehensions: int = 0
    docstrings: int = 0
    questions: list[str] = field(default_factory=list)
    split_names: list[str] = field(default_factory=list)
    wide_text: list[str] = field(default_factory=list)
    wide_code: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = (
            f"{self.docstrings:5,} docstrings",
            f"{len(self.questions):3} begin with a question word",
            f"{len(self.split_names):2} split a class name",
            f"{self.comments / max(self.code, 1):5.1%} comments",
            f"{len(self.wide_text):4} + {len(self.wide_code):4} wide lines of text and code",
            f"{1000 * self.comprehensions / max(self.lines, 1):2.0f} comprehensions per 1,000 lines",
            f"{len(self.words):3,} words of the glossary",
        )
        return "  ".join(parts)


def python_files(*packages: str) -> list[Path]:
    """Return the tracked Python files below some directories."""
    listed = subprocess.run(
        ["git", "ls-files", *packages], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.splitlines() if name.endswith(".py")]


def figures(paths: Iterable[Path]) -> Figures:
    """Count what is in some files."""
    found = Figures()
    for path in paths:
        _add(found, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    return found


def words_of_documents() -> list[str]:
    """Return the places of glossary words in documents, recipes and scripts, as ``file:line: word``. Words in
    backticks, in blocks of code and in commands are names."""
    listed = subprocess.run(
        ["git", "ls-files", *DOCUMENTS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found = list[str]()
    for name in listed.splitlines():
        in_code = False
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            if name.endswith(".md") and line.startswith("```"):
                in_code = not in_code
            text = re.sub(r"`[^`]*`", "", line)
            if not name.endswith((".md", "evidence.yaml")):
                text = text.partition("#")[2]
            if not in_code:
                found.extend(f"{name}:{number}: {word}" for word in _COUNTED.findall(text))
    return found


def split_name(name: str) -> str:
    """Return a class name as words: ``RayWorkerBuilder`` as ``ray worker builder``."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name)).lower()


def _add(found: Figures, name: str, text: str) -> None:
    tree, lines = ast.parse(text), text.splitlines()
    prose = dict[int, str]()
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found.comments += 1
            prose[token.start[0]] = token.string
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in _docstrings(tree):
        span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        code.difference_update(span)
        prose.update((line, lines[line - 1]) for line in span)
    for node in ast.walk(tree):
        found.comprehensions += isinstance(node, _COMPREHENSIONS)
        documented = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if documented and isinstance(node, _DOCUMENTED):
            found.docstrings += 1
            place = f"{name}:{node.body[0].lineno}: {documented.splitlines()[0]}"
            if documented.split()[0].strip(",.:;") in QUESTIONS:
                found.questions.append(place)
            words = split_name(node.name) if isinstance(node, ast.ClassDef) else ""
            if " " in words and documented.lower().replace("-", " ").startswith(f"{words}:"):
                found.split_names.append(place)
    found.lines += len(lines)
    found.code += len(code)
    for number, line in enumerate(lines, 1):
        # a checker's pragma has to stand on the line that it is for
        if len(re.sub(r"  # (type: ignore|noqa).*", "", line)) > WIDTH:
            (found.wide_text if number in prose and number not in code else found.wide_code).append(
                f"{name}:{number}"
            )
    for number, line in prose.items():
        # the names of arguments at the head of an entry, and names in backticks, are code
        text = re.sub(r"``[^`]*``|^ *[\w*]+(, [\w*]+)*: ", "", line)
        found.words.extend(f"{name}:{number}: {word}" for word in _COUNTED.findall(text))


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Yield the docstrings of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement


if __name__ == "__main__":
    packages = sorted(
        {"/".join(path.relative_to(ROOT).parts[:2]) for path in python_files("megarl", "converters")}
    )
    for package in (*packages, "converters", "megarl", "benchmarks"):
        print(f"{package:<28}{figures(python_files(package))}")
