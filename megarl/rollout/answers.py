"""Final answers that are extracted from a response and compared as text or as a decimal number: GSM8K,
multiple choice, DAPO's rule; also a check of a response's format.

``megarl.rollout.mathematics`` compares the values of mathematical expressions.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = r"(?:[-+]\$?|\$[-+]?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED_NUMBER = re.compile(rf"####[ \t]*\**({_NUMBER})(\S*)")
_GOES_ON = re.compile(r"[.,]?[0-9]|[/^:]|[-*][0-9]")
_ANY_NUMBER = re.compile(rf"(?<![0-9.]){_NUMBER}")
_GUESS = r"(?:(?:maybe|perhaps|possibly|even|about|else)\s++)?"
# Units may stand between the number and its alternative.
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
# The letter is optional so that a text without one is passed over, and not read again from each box in it.
_CHOICE = re.compile(
    rf"(?:\\boxed\s*+\{{|\b(?i:answer|choice|option)[*]*+\s*+(?:(?i:is)\b\s*+:?|:)){_WRAPPING}(?:(?:(?i:option"
    rf"|choice)\s++)?{_LETTER})?"
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
"""Number of characters at the end of a response in which DAPO's rule searches for ``Answer:``."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_ARTICLES_AND_SPACES = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""))
_NAMES_SEVERAL = re.compile(
    r"\bor\b.*=|=.*(?:\b(?:or|and)\b|[,;]).*="
    r"|\$[^$]*\b(?:or|maybe|perhaps|possibly|alternatively)\b[^$]*\$"
    r"|\$\s*(?:and\b|[,;/&]|\\text\s*\{\s*and\s*\}|\\(?:lor|quad)\b|\s)+\s*(?:[a-z]\s*=\s*)?\$"
)
_NAMES_OF_TEXT = (("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"))
# Keep the original's list with its errors (childrentickets): a corrected list would be a different rule.
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
    """Return 1.0 if the response's final number equals the reference's as a decimal number, else 0.0. Commas
    and dollar signs are ignored.

    Args:
        response: text with ``#### 72``; the last one counts. A number that continues (``#### 3/4``) or has an
            alternative (``#### 72 or 71``) is not a valid number.
        answer: a whole solution with ``####``, as in the data set, or a number.
        method: ``strict``, or ``flexible`` for the last number anywhere in the response.
    """
    found = _last_number(response, method)
    return float(found is not None and found == _reference_number(answer))


def gsm8k_answer(response: str, method: str = "strict") -> str | None:
    """Return the number that ``gsm8k`` compares, in a normalised notation; None if there is none."""
    found = _last_number(response, method)
    if found is None:
        return None
    # Use `or` because Decimal("-0") is falsy, so that minus zero is written as zero.
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
    """Return the number after each ``####``, or None if it is not a valid number or an alternative follows
    it."""
    numbers: list[str | None] = []
    for found in _MARKED_NUMBER.finditer(response):
        # The pattern of a number also matches a comma after the number, so strip it.
        end = found.start(1) + len(found[1].rstrip(","))
        is_number = not _GOES_ON.match(found[2]) and not _ALTERNATIVE.match(response, end)
        numbers.append(found[1] if is_number else None)
    return numbers


def fault_of_gsm8k(answer: str) -> str | None:
    """Return why nothing can be compared with a GSM8K reference, or None if the reference is usable."""
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
    r"""Return 1.0 if the response chooses the reference's letter, else 0.0.

    The choice is the last of ``\boxed{B}``, ``Answer: B``, ``the answer is (B)`` and ``the choice is option
    B``, or a response that is just a letter. The first word of a sentence (``Answer: A good one``) is not a
    choice, nor are several letters (``B and C``, ``B / C``, ``\boxed{B} or \boxed{C}``).

    Args:
        response: the model's response.
        answer: a capital letter, alone or in brackets.
    """
    chosen = chosen_letter(response)
    return float(chosen is not None and chosen == _reference_letter(answer))


def chosen_letter(response: str) -> str | None:
    """Return the letter that ``multichoice`` considers chosen by a response, or None if there is none."""
    alone = _ONLY_A_LETTER.fullmatch(response)
    if alone is not None:
        return alone[1]
    chosen, hedged = None, -1
    for choice in _CHOICE.finditer(response):
        if choice[1] is None:
            continue
        second = _SECOND_LETTER.match(response, choice.end(1))
        # The letter that an earlier choice names as its alternative is not a choice either.
        chosen = None if second is not None or choice.start(1) == hedged else choice[1]
        if second is not None:
            hedged = max(map(second.start, range(1, len(second.groups()) + 1)))
    return chosen


def fault_of_choice(answer: str) -> str | None:
    """Return why no choice can be compared with a reference, or None if the reference is usable."""
    return None if _reference_letter(answer) else "it is no single capital letter"


def _reference_letter(answer: str) -> str | None:
    letter = _ONLY_A_LETTER.fullmatch(answer)
    return letter[1] if letter else None


def dapo_match(response: str, answer: str) -> float:
    """Return 1.0 if the response's final answer and the reference are equal as simplified text, else 0.0.
    This is the rule of DAPO's authors.

    The final answer is the text after the last ``Answer:`` in the last ``LONGEST_ENDING`` characters, up to
    the end of its line. A box alone does not count, and 1/2 does not equal 0.5.
    """
    stated = dapo_answer(response)
    return float(stated is not None and stated == simplified(answer))


def dapo_answer(response: str) -> str | None:
    """Return the simplified final answer that ``dapo_match`` compares, or None if the response states
    none."""
    stated = _ANSWER.findall(response[-LONGEST_ENDING:])
    return simplified(stated[-1]) if stated else None


def fault_of_text(answer: str) -> str | None:
    """Return why no text can be compared with a reference by DAPO's rule, or None if the reference is
    usable."""
    return None if simplified(answer) else "nothing is left of it without units, spaces and LaTeX markup"


def simplified(text: str) -> str:
    """Return a final answer without everything that DAPO's rule considers mere notation: text before ``=``,
    articles, spaces, units, dollar signs, boxes.

    Of several values (``$3$ or $4$``, ``x = 3 or x = 4``) DAPO's rule would keep one. This function keeps
    all, so that the result equals none of them.
    """
    names_several = _NAMES_SEVERAL.search(text) is not None
    if not names_several:
        text = text.split("=")[-1]
    # Keep the original's order: a later replacement matches what an earlier one leaves.
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
    """Return 1.0 if the response begins with its only ``<think>...</think>`` and an answer follows it, else
    0.0.

    Args:
        response: the model's response.
        prompt: text of the prompt; if it ends in ``<think>``, the response's thinking is already open.
    """
    if prompt.rstrip().endswith("<think>"):
        response = f"<think>{response}"
    begin, end = response.find("<think>"), response.find("</think>")
    once = response.count("<think>") == response.count("</think>") == 1
    return float(once and not response[:begin].strip() and bool(response[end + len("</think>") :].strip()))
