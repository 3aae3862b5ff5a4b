"""Extraction of the final answer's text from a response: the content of its last boxes, else a statement such
as ``the answer is 5``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"[^\s$]+")

_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL)
_END_OF_THOUGHT = re.compile(r"</(?:think|thinking|thought|reasoning)>")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_STATED = re.compile(
    r"\b(?:answer|result)s?\b[*\s]*(?:\b(?:is|are)\b|:|=)[*:\s]*((?:(?!\b(?:answer|result)s?\b)[^\n])+)",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"\b(?:correct|right|best) (?:option|choice)\b[*\s]*(?:\bis\b|:|=)[*:\s]*([^\n]+)", re.IGNORECASE
)
_END_OF_SENTENCE = re.compile(
    r"[.!?](?:\s+[A-Z(]|[*\s]*$)|,?\s(?:because|since|as|so|which|where|not|rather)\b"
)

# Math delimiters and spaces are allowed between a box and its unit.
_OUTSIDE_BOX = r"(?:\\[)\],;!: ]|[$~\s,(])*"
_UNIT_AFTER_BOX = re.compile(
    r"(?:\\[,;!: ]|[~\s])*((?:\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}\s*(?:\^\s*\{?\s*\d\s*\}?)?)+"
    r"|\\?%|\^\s*(?:\{\s*\\circ\s*\}|\\circ))"
)
_ALTERNATIVE_AFTER_BOX = re.compile(
    _OUTSIDE_BOX + r"((?:or|and)\s+(?:more|less|fewer|greater|higher|lower|above|below|over|under)\b"
    r"|(?:or|and|/)\s*(?:\$|\\\()*[-+]?[\d.]+)"
)
_BETWEEN_VALUES = re.compile(
    r"(?:\\(?:quad|qquad|text|mathrm|left|right)|\\[()\[\],;:! ]|[$\s{}~*,;&/()]"
    r"|\b(?:and|or|also|both|either|else|maybe|perhaps|possibly|alternatively)\b|[A-Za-z](?:_\{?\w\}?)?\s*=)*"
)
_BRACKETED = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")
_CONNECTIVE = re.compile(r"[,;&/]|\b(?:and|or)\b")


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    content: str


def boxed_answer(response: str, values: int = 1) -> str | None:
    """Return the content of the last box, including a unit directly after the box. Return None if there is no
    box.

    Boxes inside ``<think>`` count only if there is no answer outside. Boxes joined by a comma, ``and`` or
    ``or`` form one answer with several values. If the reference has ``values`` > 1 values but the last box
    only one, the last ``values`` boxes form the answer, even if they are far apart.

    Args:
        response: the model's response.
        values: number of values in the reference.
    """
    outside = outside_thoughts(response)
    boxes = _boxes(outside)
    if not boxes and _statement(outside) is None:
        outside, boxes = response, _boxes(response)
    if not boxes:
        return None
    joined = _joined_to_last(outside, boxes)
    if len(joined) == 1 and values > 1 and not _CONNECTIVE.search(_BRACKETED.sub("", joined[0])):
        joined = [box.content for box in boxes[-values:]]
    joined[-1] += _after_box(outside, boxes[-1].end)
    # Two boxes with the same content are one value.
    return ", ".join(dict.fromkeys(joined))


def stated_answer(response: str) -> str | None:
    """Return the answer that a response without a box states, in ``<answer>`` tags or after ``the answer
    is``. Return None if there is no such statement."""
    return _statement(outside_thoughts(response))


def outside_thoughts(response: str) -> str:
    """Remove ``<think>...</think>`` from a response. The opening tag may be missing, because a chat template
    may write it in the prompt."""
    return _END_OF_THOUGHT.split(_THOUGHT.sub(" ", response))[-1]


def _statement(text: str) -> str | None:
    tagged = _TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip() or None
    stated = _STATED.findall(text) or _CHOSEN.findall(text)
    if not stated:
        return None
    last = str(stated[-1])
    end = _END_OF_SENTENCE.search(last)
    return (last[: end.start()] if end else last).strip(" *\t") or None


def _boxes(text: str) -> list[_Box]:
    """Return the outermost boxes that are closed and not empty."""
    closing = _closing_braces(text)
    boxes: list[_Box] = []
    for command in _BOX.finditer(text):
        start, inside = command.span()
        if boxes and start < boxes[-1].end:
            continue
        if inside in closing:
            end = closing[inside] + 1
            content = text[inside + 1 : end - 1]
        elif text[inside : inside + 1] != "{" and (token := _UNBRACED.match(text, inside)):
            end, content = token.end(), token[0]
        else:
            continue
        if content.strip():
            boxes.append(_Box(start, end, content))
    return boxes


def _closing_braces(text: str) -> dict[int, int]:
    """Map the offset of each opening brace to the offset of its closing brace. One linear scan, because a
    policy's text may contain thousands of braces."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for mark in _BRACE.finditer(text):
        if mark[0] == "{":
            opened.append(mark.start())
        elif mark[0] == "}" and opened:
            closing[opened.pop()] = mark.start()
    return closing


def _joined_to_last(text: str, boxes: list[_Box]) -> list[str]:
    """Return the contents of the last box and of those before it, as long as only connectives separate
    neighbours."""
    joined = [boxes[-1].content]
    for box, later in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        between = text[box.end : later.start]
        if not _CONNECTIVE.search(between) or not _BETWEEN_VALUES.fullmatch(between):
            break
        joined.insert(0, box.content)
    return joined


def _after_box(text: str, end: int) -> str:
    r"""Return a unit or an alternative directly after a box: ``\boxed{5}\text{ km}``, ``\boxed{8}$ or
    more``."""
    after = _UNIT_AFTER_BOX.match(text, end) or _ALTERNATIVE_AFTER_BOX.match(text, end)
    return f" {after[1]}" if after else ""
