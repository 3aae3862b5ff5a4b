"""Normalisation of mathematical text: characters, LaTeX commands, digits, decimals, and the separation of
words from values.

All functions map text to text and preserve its meaning. Whatever cannot be normalised safely is left
unchanged.
"""

from __future__ import annotations

import re
import unicodedata

from megarl.rollout.mathematics_words import FUNCTIONS, is_unit, is_word

OPEN, CLOSE = "\ue000", "\ue001"
"""Marks around words; text outside them is mathematics.

They are private characters, which ``unify`` removes from any text.
"""

OR, AND = "\ue002", "\ue003"
"""Marks that replace the words between values of a list."""

_WORDS = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")


def _vulgar_fractions() -> dict[str, str]:
    """Map ½ and similar characters to LaTeX. Plain NFKC would turn 1½ into 11/2."""
    spelled: dict[str, str] = {}
    for code in (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189):
        parts = unicodedata.normalize("NFKC", chr(code)).split("\u2044")
        spelled[chr(code)] = f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
    return spelled


def _each(characters: str, latex: str) -> dict[str, str]:
    return dict.fromkeys(characters, latex)


_GREEK = {chr(code): f"\\{unicodedata.name(chr(code)).split()[-1].lower()} " for code in range(0x3B1, 0x3CA)}
_CHARACTERS = str.maketrans(
    _vulgar_fractions()
    | _GREEK
    | _each("\u2212\u2013\u2012\u2010\u2011", "-")
    | _each("\u2044\u2215", "/")
    | _each("\u00b0\u00ba\u02da", "^\\circ ")
    | _each("\u2264\u2a7d\u2266", "\\le ")
    | _each("\u2265\u2a7e\u2267", "\\ge ")
    | _each("\u2026\u22ef", "\\ldots ")
    | _each("\u00b7\u22c5\u2219", "\\cdot ")
    | _each("\u201c\u201d", '"')
    | _each("\u2018\u2019\u2032", "'")
    | {
        "\u00d7": "\\times ",
        "\u00f7": "\\div ",
        "\u221e": "\\infty ",
        "\u2260": "\\ne ",
        "\u2248": "\\approx ",
        "\u2261": "\\equiv ",
    }
    | {
        "\u00b1": "\\pm ",
        "\u2213": "\\mp ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2208": "\\in ",
        "\u2205": "\\emptyset ",
    }
    | {
        "\u2216": "\\setminus ",
        "\u2227": "\\wedge ",
        "\u2228": "\\vee ",
        "\u3002": ".",
        "\u3001": ",",
        "\u2211": "\\sum ",
    }
    | {
        "\u211d": "\\mathbb{R}",
        "\u2124": "\\mathbb{Z}",
        "\u2115": "\\mathbb{N}",
        "\u211a": "\\mathbb{Q}",
        "\u2102": "\\mathbb{C}",
    }
    | {"\u2103": "^\\circ C", "\u2109": "^\\circ F"}
)
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207d\u207e\u207f]+")
_LOWERED = re.compile("[\u2080-\u208b\u208d\u208e]+")
_OVERLINED = re.compile("(?:[0-9]\u0305)+")
_ROOT = re.compile("([\u221a\u221b])\\s*(?:([0-9]+(?:\\.[0-9]+)?|[a-zA-Z])|(?=[({]))")


def unify(text: str) -> str:
    """Replace characters that have the same meaning by one form: NFKC, and LaTeX for ½, x², √, π, ≤ and other
    symbols."""
    # Fast path: ASCII text contains none of the characters below.
    if text.isascii():
        return text
    # Before NFKC, which would turn a raised 2 into a plain 2.
    text = _RAISED.sub(lambda run: f"^{{{run[0]}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{run[0]}}}", text)
    text = _OVERLINED.sub(lambda run: "\\overline{" + run[0].replace("\u0305", "") + "}", text)
    # Translate before and after: NFKC would change some characters of the table, and produces others.
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    text = _ROOT.sub(_latex_of_root, text)
    # Remove invisible characters, and private ones, because these serve as marks here.
    return "".join(character for character in text if unicodedata.category(character) not in ("Cf", "Co"))


def _latex_of_root(root: re.Match[str]) -> str:
    degree = "[3]" if root[1] == "\u221b" else ""
    return f"\\sqrt{degree}" + (f"{{{root[2]}}}" if root[2] else "")


_REPLACED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Remove commands that only change the appearance.
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|large|Large|LARGE|huge|small|normalsize|bf|it"
            r"|mathstrut|strut)(?![a-zA-Z])",
            " ",
        ),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"\\(?:left|right|middle)(?:\.|(?![a-zA-Z]))|\\(?:big|Big|bigg|Bigg)[lrm]?(?![a-zA-Z])", ""),
        (r"\\(?:boxed|fbox|framebox|underline|ensuremath)(?![a-zA-Z])", ""),
        (
            r"\\h?phantom\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}|\\label\s*\{[^{}]*\}|\\tag\s*\{[^{}]*\}",
            " ",
        ),
        (r"(?<!\\)(?:\$|\\[()\[\]])|(?<![0-9a-zA-Z)}])\*\*|\*\*(?![-0-9a-zA-Z({\\])|`", " "),
        # Replace spaces: narrow ones by one space or nothing, wide ones, which may separate values, by two.
        (r"(?<=[0-9])\{\s*,\s*\}|,\s*\\!", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\(?:thinspace|enspace|enskip|thickspace|medspace)(?![a-zA-Z])|(?<!\\)~", " "),
        (r"\\(?:quad|qquad)(?![a-zA-Z])|\\\\\s*$", "  "),
        # Replace synonyms of a command by one name.
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|\\not\s*=|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:dots|dotsc|dotsb|cdots|hdots|dotsm)(?![a-zA-Z])|\.\.\.+", r"\\ldots "),
        (r"\\(?:mid|vert|lvert|rvert)(?![a-zA-Z])", "|"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:simeq|thickapprox|approxeq|doteq)(?![a-zA-Z])", r"\\approx "),
        (r"\\(?:R|reals|Reals)(?![a-zA-Z])|\\mathbb\s+R", r"\\mathbb{R}"),
        (r"\\(?:imath|jmath)(?![a-zA-Z])", "i"),
        (r"\\(?:vec|hat|mathbf|boldsymbol|bm|mathit|mathsf|mathcal)\s*\{\s*([a-zA-Z])\s*\}", r"\1"),
        (r"\\(?:boldsymbol|bm|pmb)(?![a-zA-Z])", ""),
        (r"\\mathbf(?=\s*\{[^{}]*[\\0-9])", ""),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"\\(?:backslash|smallsetminus)(?![a-zA-Z])", r"\\setminus "),
        (r"\\(?:lor|vee)(?![a-zA-Z])", f" {OR} "),
        (r"\\(?:land|wedge)(?![a-zA-Z])", f" {AND} "),
        (r"\*\*", "^"),
        (r"(?<=[0-9)}])\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"\\(?:bmod|mod)(?![a-zA-Z])", r"\\pmod "),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])", f" {OPEN}degree{CLOSE} "),
        (r"\\?%", f" {OPEN}percent{CLOSE} "),
        (r"\\\$|US\s*\$", f" {OPEN}dollar{CLOSE} "),
        (r"\\(?:pounds|text\s*\{\s*\u00a3\s*\})(?![a-zA-Z])|\u00a3", f" {OPEN}gbp{CLOSE} "),
        (r"\\(?:euro|texteuro)(?![a-zA-Z])|\u20ac", f" {OPEN}euro{CLOSE} "),
        (r"\u00a5", f" {OPEN}yen{CLOSE} "),
        (r"\u20b9", f" {OPEN}rupee{CLOSE} "),
        (r"\\cent(?![a-zA-Z])|\u00a2", f" {OPEN}cent{CLOSE} "),
    )
)
_IN_TEXT = re.compile(
    r"\\(?:text|textrm|textbf|textit|textsf|texttt|textnormal|textup|mathrm|mathbf|mathit|mathsf|mbox|hbox"
    r"|operatorname\*?|emph)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}|\{\s*\\rm\s*([^{}]*)\}"
)
_OF_DAY = re.compile(r"\b([apAP])\.\s?[mM]\b\.?")
_BARE = re.compile(
    rf"\\(?:begin|end)\s*\{{[^}}]*\}}|\\[a-zA-Z]+|{OPEN}[^{CLOSE}]*{CLOSE}|[a-zA-Z]{{2,}}(?:'[a-z]+)?\.?"
    rf"|(?<=[0-9.])(?:st|nd|rd|th)\b"
)
_ORDINAL = re.compile(
    rf"(?<=[0-9}}])\s*(?:\^\s*)?\{{?\s*(?:{OPEN}\s*(?:st|nd|rd|th)\s*{CLOSE}|(?:st|nd|rd|th)\b)\s*\}}?"
)
_UNIT_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*{OPEN}([^{CLOSE}]*){CLOSE}\s*\}}\s*\{{\s*{OPEN}([^{CLOSE}]*){CLOSE}\s*\}}"
)
_UNIT_POWER = re.compile(rf"\s*{CLOSE}\s*\^\s*\{{?\s*(-?[0-9])\s*\}}?")
_UNIT_QUOTIENT = re.compile(rf"{CLOSE}\s*/\s*(?:{OPEN}|([a-z]+)(?![a-zA-Z]))")
_UNIT_PRODUCT = re.compile(rf"{CLOSE}\s*(?:\\cdot|\\times)?\s*{OPEN}")
_ANGLE = re.compile(
    rf"(\\(?:sin|cos|tan|cot|sec"
    rf"|csc))\s*(\^\s*\{{?\s*[0-9]\s*\}}?)?\s*[({{]?\s*([0-9.]+)\s*{OPEN}degree{CLOSE}\s*[)}}]?"
)
_LISTED = re.compile(rf"{OPEN}[\s,;]*(and|or)[\s,;]*{CLOSE}")
_JOINING = re.compile(rf"\s+(and|or)\s*{CLOSE}(?=\s*[-+0-9\\(\[.])")
_BOUND = re.compile(r"^\s*\\(le|ge)\s*(?=[-\\0-9])")
_FULL_HOUR = re.compile(rf":00(?=\s*{OPEN}[ap]\.?m\b)", re.IGNORECASE)
_OUTWARD = re.compile(r"^\s*([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])\s*$")
_NAMED_SETS = (
    (
        re.compile(rf"{OPEN}\s*(?:the set of )?(?:all|any) real(?:s| numbers?)\s*{CLOSE}", re.IGNORECASE),
        r"\\mathbb{R}",
    ),
    (re.compile(rf"{OPEN}\s*(?:the )?empty set\s*{CLOSE}", re.IGNORECASE), r"\\emptyset "),
    (re.compile(r"\\mathbb\s*\{R\}\s*(?:\^\s*\{?\s*\+\s*\}?|_\s*\{?\s*(?:\+|>\s*0)\s*\}?)"), r"(0,\\infty)"),
    (re.compile(rf"{OPEN}\s*infinity\s*{CLOSE}", re.IGNORECASE), r"\\infty "),
)


def spell(text: str) -> str:
    """Normalise an answer: put words between marks, and write values in the form that math-verify parses
    best."""
    text = unify(text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    # Join a.m. and p.m. first, since single letters with full stops are not recognised as words.
    text = _OF_DAY.sub(r"\1m", text)
    text = _IN_TEXT.sub(_words_of_command, text)
    text = _ORDINAL.sub(" ", text)
    text = _BARE.sub(lambda run: _bare_word(text, run), text)
    text = _UNIT_FRACTION.sub(rf"{OPEN}\1 / \2{CLOSE}", text)
    # Convert degrees to radians, because math-verify parses arguments of functions as radians.
    text = _ANGLE.sub(r"\1\2(\\frac{\3\\pi}{180})", text)
    text = _UNIT_POWER.sub(rf"^\1{CLOSE}", text)
    text = _UNIT_QUOTIENT.sub(lambda quotient: f" / {quotient[1]}{CLOSE}" if quotient[1] else " / ", text)
    # Apply powers again, because merged quotients may be followed by one.
    text = _UNIT_POWER.sub(rf"^\1{CLOSE}", text)
    text = _UNIT_PRODUCT.sub(" ", text)
    text = _JOINING.sub(rf"{CLOSE} {OPEN}\1{CLOSE} ", text)
    text = _LISTED.sub(lambda word: f" {AND if word[1].lower() == 'and' else OR} ", text)
    for pattern, replacement in _NAMED_SETS:
        text = pattern.sub(replacement, text)
    text = _BOUND.sub(lambda bound: f"{OPEN}{'at most' if bound[1] == 'le' else 'at least'}{CLOSE}", text)
    text = _FULL_HOUR.sub("", text)
    text = _OUTWARD.sub(_inward_brackets, text)
    return _trimmed(_digits(text))


def _inward_brackets(interval: re.Match[str]) -> str:
    """Replace outward brackets at open ends of an interval by parentheses: ``]1,2[`` becomes ``(1,2)``."""
    return ("(" if interval[1] == "]" else "[") + interval[2] + (")" if interval[3] == "[" else "]")


def _words_of_command(command: re.Match[str]) -> str:
    r"""Return the replacement of ``\text{...}``: words go between marks, mathematics stays as it is."""
    content = (command[1] if command[1] is not None else command[2]).strip().replace("\n", " ")
    name = content.strip("() .")
    # Mathematics: no letters; or commands, or digits other than the power of a unit.
    if not re.search(r"[^\W\d_]", content) or re.search(r"[0-9\\]", re.sub(r"\^\s*\{?[0-9]\}?", "", content)):
        return f" {content} "
    if re.search(r",| and | or ", content) and not re.search(
        r"[^\W\d_]{2,}", re.sub(r"\b(?:and|or)\b", "", content)
    ):
        return f" {content} "  # choices: A, B and C
    choice = re.fullmatch(r"(?:option|choice|answer)\s*:?\s*\(?([A-Z])\)?", content, re.IGNORECASE)
    if choice:
        return choice[1]
    after_value = _ends_in_value(command.string[: command.start()])
    if content in FUNCTIONS and not after_value:
        return f"\\{content} "
    if len(name) == 1 and name.isalpha():
        # A letter after a number is a unit, as in 5\text{ m}. Elsewhere it is a choice or a variable.
        is_single_unit = after_value and name in "mgshlLNJWVAKCFtc" and "(" not in content
        return f" {OPEN}{name}{CLOSE} " if is_single_unit else f" {content} "
    return f" {OPEN}{content}{CLOSE} "


def _bare_word(text: str, run: re.Match[str]) -> str:
    r"""Return the replacement of letters outside ``\text{}``: words and units go between marks, and a
    function name becomes its command."""
    word = run[0].rstrip(".")
    if run[0][0] in f"\\{OPEN}":
        return run[0]
    # "min" after a value means minutes.
    if word.lower() in FUNCTIONS and not (word == "min" and _ends_in_value(text[: run.start()])):
        return f"\\{word.lower()} " if word.islower() else run[0]
    if is_word(word) or (is_unit(word) and _ends_in_value(text[: run.start()])):
        return f"{OPEN}{run[0]}{CLOSE}"
    return run[0]


def _ends_in_value(text: str) -> bool:
    """Return whether a text ends in a number, a bracket or a unit, so that the letters after it may be a
    unit."""
    # Skip an operator between two units.
    before = re.sub(rf"(?<=[{CLOSE}}}])\s*(?:\\cdot|\\times|/)\s*$", "", text.rstrip())
    return bool(before) and before[-1] in f"0123456789}}){{{CLOSE}"


_BY_SPACES = re.compile(
    r"(?<![0-9.,])([0-9]{1,3}(?: [0-9]{3})+)(?![0-9])|(?<=[0-9]\.)([0-9]{3}(?: [0-9]{3})* "
    r"[0-9]{1,3})(?![0-9])"
)
_BY_COMMAS = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?!,?[0-9])")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]{1,6})(?![\w.])")
_POWER = re.compile(r"\^\s*(?:\(\s*)?([-+]?[0-9]{2,}|[-+][0-9]+)(?:\s*\))?")
_MIXED = re.compile(r"(?<![0-9./^_{,])([0-9]+) +([0-9]+)/([0-9]+)(?![0-9./])")
_TWO_ARGUMENTS = re.compile(r"\\(frac|binom)\s*(\{[^{}]*\}|[0-9a-zA-Z])\s*(\{[^{}]*\}|[0-9a-zA-Z])")
_ROOT_IN_BRACKETS = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_ROOT_ARGUMENT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_REPEATING = re.compile(
    r"(?<![0-9])([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|overbar|dot)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
    r"(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?|\(([0-9]+)\))"
)
_CONTINUED = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]+)\s*\\ldots")


def _digits(text: str) -> str:
    """Remove thousands separators, and write repeating decimals as fractions and ``5e-1`` as a product."""
    text = _BY_SPACES.sub(lambda number: number[0].replace(" ", ""), text)
    text = _BY_COMMAS.sub(
        lambda number: number[0] if _is_bracketed(text, number.start()) else number[0].replace(",", ""), text
    )
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _CONTINUED.sub(_continued_decimal, text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = _POWER.sub(r"^{\1}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _TWO_ARGUMENTS.sub(_with_braces, text)
    text = _ROOT_IN_BRACKETS.sub(r"\\sqrt{\1}", text)
    return _ROOT_ARGUMENT.sub(r"\\sqrt{\1}", text)


def _with_braces(command: re.Match[str]) -> str:
    r"""Write ``\frac12`` as ``\frac{1}{2}``."""
    return f"\\{command[1]}" + "".join(f"{{{each.strip('{}')}}}" for each in command.groups()[1:])


def _is_bracketed(text: str, place: int) -> bool:
    """Return whether a position is inside brackets, where a comma separates coordinates rather than
    thousands."""
    before = text[:place]
    return sum(map(before.count, ("(", "[", "\\{"))) > sum(map(before.count, (")", "]", "\\}")))


def _repeating_decimal(decimal: re.Match[str]) -> str:
    whole, fixed = decimal[1], decimal[2]
    repeated = decimal[3] or decimal[4] or decimal[7]
    if decimal[6] is not None:
        repeated += decimal[5] + decimal[6]
    return _as_fraction(whole, fixed, repeated)


def _continued_decimal(decimal: re.Match[str]) -> str:
    """Convert a decimal with an ellipsis, such as 0.1666..., to a fraction. Leave it unchanged if its last
    digits do not repeat, as in 3.1415..."""
    digits = decimal[2]
    for period in range(1, len(digits) // 2 + 1):
        repeated = digits[-period:]
        # A single repeated digit must occur three times if other digits precede it: two may be chance.
        times = 3 if period == 1 and len(set(digits)) > 1 else 2
        if digits.endswith(repeated * times):
            return _as_fraction(decimal[1], digits[:-period], repeated)
    return decimal[0]


def _as_fraction(whole: str, fixed: str, repeated: str) -> str:
    scale = 10 ** len(fixed)
    period = 10 ** len(repeated) - 1
    numerator = (int(whole or "0") * scale + int(fixed or "0")) * period + int(repeated)
    return f"\\frac{{{numerator}}}{{{scale * period}}}"


def _trimmed(text: str) -> str:
    """Strip spaces and punctuation at both ends, and braces around the whole text."""
    text = re.sub(r"\s+", " ", text).strip(" \"',;:").rstrip(" .,;:?")
    while text.startswith("{") and closes_at_end(text, "{", "}"):
        text = text[1:-1].strip(" ,;:").rstrip(" .,;:?")
    choice = re.fullmatch(r"([A-Z])\)", text)
    return choice[1] if choice else text


def closes_at_end(text: str, opening: str, closing: str) -> bool:
    """Return whether the bracket that opens a text is closed by its last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == opening) - (character == closing)
        if depth == 0:
            return place == len(text) - 1
    return False
