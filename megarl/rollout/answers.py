"""Extraction of a response's final answer and its comparison with the reference, as text or as a decimal
number: GSM8K, multiple choice and DAPO's rule. Also a check of the ``<think>`` format.

``megarl.rollout.mathematics`` compares mathematical expressions by value.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = r"(?:[-+]\$?|\$[-+]?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED_NUMBER = re.compile(rf"####[ \t]*\**({_NUMBER})(\S*)")
_GOES_ON = re.compile(r"[.,]?[0-9]|[/^:]|[-*][0-9]")
_ANY_NUMBER = re.compile(rf"(?<![0-9.]){_NUMBER}")
_GUESS = r"(?:(?:maybe|perhaps|possibly|even|about|else)\s++)?"
# Allow up to two words, such as a unit, between the number and its alternative.
_ALTERNATIVE = re.compile(
    rf"[*)}}]*(?:[ \t]++[A-Za-z]+){{0,2}}?[ \t]*+(?:[(,;]+[ \t]*+)?"
    r"(?:(?:or|and|to|versus|vs\.?)[ "
    rf"\t]++{_GUESS}(?:[*(]*{_NUMBER}|more\b|less\b|fewer\b|so\b)|(?:[,;/|&~\u00b1]|\+-)[ \t]*+[*]*{_NUMBER})"
)
_OR_BEFORE = re.compile(
    rf"[0-9][*)}}$]*+(?:[ \t]++[A-Za-z]++){{0,2}}?(?:[ \t]*+,)?[ \t]++or[ \t]++{_GUESS}[*($]*\Z"
)

_WRAPPING = r"(?:\\boxed\s*\{|\\(?:text|textbf|mathbf|mathrm)\s*\{|[*$\s({\[])*+"
# Restrict what may follow A and I, because both are also English words.
_LETTER = r"([B-HJ-Z](?![A-Za-z0-9'])|[AI](?=\s*(?:$|[)\].,:;!*}$\\\n]|(?:because|since|as|is)\b)))"
# The letter is optional, so that a match without one consumes the text; otherwise the search would scan the
# same text again from each box in it, in quadratic time.
_CHOICE = re.compile(
    rf"(?:\\boxed\s*+\{{|\b(?i:answer|choice|option)[*]*+\s*+(?:(?i:is)\b\s*+:?|:)){_WRAPPING}"
    rf"(?:(?:(?i:option|choice)\s++)?{_LETTER})?"
)
_CONNECTIVE = r"(?:\b(?:and|or|nor|vs)\b|\\text\s*\{\s*(?:and|or)\s*\}|[,;&/|+])"
_BEFORE_SECOND = r"\b(?i:maybe|perhaps|possibly|else|also|even|the|correct|answer|is|option|choice)\b|[: \t]"
_SECOND_LETTER = re.compile(
    r"[)\]}*$( "
    rf"\t]*+{_CONNECTIVE}(?:{_CONNECTIVE}|{_BEFORE_SECOND})*+{_WRAPPING}(?:([B-HJ-Z])(?![A-Za-z0-9'])"
    rf"|{_LETTER})"
    r"|[)\]}*$]*[ \t]+\(?([B-HJ-Z])\)?[ \t.]*(?=\n|\Z)"
)
_ONLY_A_LETTER = re.compile(r"[*($\[\s]*([A-Z])[*)$.\]\s]*")

LONGEST_ENDING = 300
"""DAPO's rule searches for ``Answer:`` in this number of characters at the end of a response."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_ARTICLES_AND_SPACES = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""))
_NAMES_SEVERAL = re.compile(
    r"\bor\b.*=|=.*(?:\b(?:or|and)\b|[,;]).*="
    r"|\$[^$]*\b(?:or|maybe|perhaps|possibly|alternatively)\b[^$]*\$"
    r"|\$\s*(?:and\b|[,;/&]|\\text\s*\{\s*and\s*\}|\\(?:lor|quad)\b|\s)+\s*(?:[a-z]\s*=\s*)?\$"
)
_NAMES_OF_TEXT = (("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"))
# DAPO's list, kept with its errors (childrentickets): a corrected list would be a different rule.
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents "
    "degrees cm gm pounds meters meals "
    "edges students childrentickets multiples \\text{s} \\text{.}"
)
_MARKS = (
    *(
        "\\text{\ns}",
        "\\text{}^2",
        "\\text{}^3",
        "\\text{\n}",
        "\\text{}",
        "\\mathrm{th}",
        "^\\circ",
        "^{\\circ}",
    ),
    *("\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = tuple(
    re.compile(rf"\\{name}\{{(.*{lazy})\}}")
    for name, lazy in (("text", "?"), ("textbf", "?"), ("overline", "?"), ("boxed", ""))
)


def gsm8k(response: str, answer: str, method: str = "strict") -> float:
    """Return 1.0 if the response's final number equals the reference number, else 0.0. Numbers are compared
    as decimals, without commas and dollar signs.

    Args:
        response: text with ``#### 72``; the last one counts. A number that continues (``#### 3/4``) or names
            an alternative (``#### 72 or 71``) is not accepted.
        answer: a complete solution with ``####``, as in the GSM8K data, or just a number.
        method: ``strict`` requires ``####``; ``flexible`` takes the last number anywhere in the response.
    """
    found = _last_number(response, method)
    return float(found is not None and found == _reference_number(answer))


def gsm8k_answer(response: str, method: str = "strict") -> str | None:
    """Return the number that ``gsm8k`` compares, without trailing zeros; None if the response has none."""
    found = _last_number(response, method)
    if found is None:
        return None
    # Decimal("-0") is falsy, so `or` writes minus zero as zero.
    text = f"{found or Decimal(0):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _last_number(response: str, method: str) -> Decimal | None:
    if method == "flexible":
        found = list(_ANY_NUMBER.finditer(response))
        # In "71 or 72", neither number is the answer.
        return (
            _number(found[-1][0]) if found and not _OR_BEFORE.search(response, 0, found[-1].start()) else None
        )
    marked = _marked_numbers(response)
    return None if not marked or marked[-1] is None else _number(marked[-1])


def _marked_numbers(response: str) -> list[str | None]:
    """Return the number after each ``####``. An entry is None if the text after the number makes it
    ambiguous: more of an expression, or an alternative such as ``or 6``."""
    numbers: list[str | None] = []
    for found in _MARKED_NUMBER.finditer(response):
        # The number pattern also consumes a comma that follows the number, so strip it.
        end = found.start(1) + len(found[1].rstrip(","))
        is_number = not _GOES_ON.match(found[2]) and not _ALTERNATIVE.match(response, end)
        numbers.append(found[1] if is_number else None)
    return numbers


def fault_of_gsm8k(answer: str) -> str | None:
    """Return why a GSM8K reference cannot be used, or None."""
    return (
        None
        if _reference_number(answer) is not None
        else "no number follows ####, and it is not a number itself"
    )


def _reference_number(answer: str) -> Decimal | None:
    last = answer.rpartition("####")[2].strip()
    return _number(last) if re.fullmatch(_NUMBER, last) else None


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))


def multichoice(response: str, answer: str) -> float:
    r"""Return 1.0 if the response chooses the reference letter, else 0.0.

    The last of these forms counts: ``\boxed{B}``, ``Answer: B``, ``the answer is (B)``, ``the choice is
    option B``. A response that consists of one letter counts too. A letter that starts a sentence (``Answer:
    A good one``) is no choice, nor is a pair of letters (``B and C``, ``B / C``, ``\boxed{B} or \boxed{C}``).

    Args:
        response: the model's response.
        answer: a capital letter, alone or in brackets.
    """
    chosen = chosen_letter(response)
    return float(chosen is not None and chosen == _reference_letter(answer))


def chosen_letter(response: str) -> str | None:
    """Return the letter that a response chooses by the rule of ``multichoice``, or None."""
    alone = _ONLY_A_LETTER.fullmatch(response)
    if alone is not None:
        return alone[1]
    chosen, hedged = None, -1
    for choice in _CHOICE.finditer(response):
        if choice[1] is None:
            continue
        second = _SECOND_LETTER.match(response, choice.end(1))
        # A letter that the previous match named as its alternative is not a choice either.
        chosen = None if second is not None or choice.start(1) == hedged else choice[1]
        if second is not None:
            hedged = max(map(second.start, range(1, len(second.groups()) + 1)))
    return chosen


def fault_of_choice(answer: str) -> str | None:
    """Return why a multiple-choice reference cannot be used, or None."""
    return None if _reference_letter(answer) else "it is no single capital letter"


def _reference_letter(answer: str) -> str | None:
    letter = _ONLY_A_LETTER.fullmatch(answer)
    return letter[1] if letter else None


def dapo_match(response: str, answer: str) -> float:
    r"""Return 1.0 if the response's final answer equals the reference after simplification, else 0.0. This is
    the rule of DAPO's authors.

    The final answer is the rest of the line after the last ``Answer:`` in the last ``LONGEST_ENDING``
    characters. A ``\boxed{}`` without ``Answer:`` does not count. The comparison is textual: 1/2 does not
    equal 0.5.
    """
    stated = dapo_answer(response)
    return float(stated is not None and stated == simplified(answer))


def dapo_answer(response: str) -> str | None:
    """Return the simplified final answer that ``dapo_match`` compares, or None if the response has none."""
    stated = _ANSWER.findall(response[-LONGEST_ENDING:])
    return simplified(stated[-1]) if stated else None


def fault_of_text(answer: str) -> str | None:
    """Return why a reference cannot be used with DAPO's rule, or None."""
    return None if simplified(answer) else "nothing is left of it without units, spaces and LaTeX markup"


def simplified(text: str) -> str:
    """Simplify a final answer by DAPO's rule: drop the text before ``=``, articles, spaces, units, dollar
    signs and boxes.

    If the text names several values (``$3$ or $4$``, ``x = 3 or x = 4``), DAPO's own code keeps one of them.
    This function keeps all, so that such a response matches no single-valued reference.
    """
    names_several = _NAMES_SEVERAL.search(text) is not None
    if not names_several:
        text = text.split("=")[-1]
    # Keep DAPO's order: later replacements match what earlier ones leave.
    for before, after in (
        *_ARTICLES_AND_SPACES,
        *_NAMES_OF_TEXT,
        *((each, "") for each in (*_UNITS.split(), *_MARKS)),
    ):
        text = text.replace(before, after)
    if not names_several:
        text = re.sub(r"(.*?)\$(.*?)\$(.*)", r"$\2$", text)
    for wrapping in _UNWRAPPED:
        text = wrapping.sub(r"\1", text)
    # Write \frac12 and \sqrt2 with braces.
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def thinks_first(response: str, prompt: str = "") -> float:
    """Return 1.0 if the response consists of exactly one ``<think>...</think>`` block followed by some text,
    else 0.0.

    Args:
        response: the model's response.
        prompt: prompt text. If it ends with ``<think>``, the chat template has already opened the block.
    """
    if prompt.rstrip().endswith("<think>"):
        response = f"<think>{response}"
    begin, end = response.find("<think>"), response.find("</think>")
    once = response.count("<think>") == response.count("</think>") == 1
    return float(once and not response[:begin].strip() and bool(response[end + len("</think>") :].strip()))
