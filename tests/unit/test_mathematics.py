"""References as data sets store them: bare LaTeX, of which the whole is right and no part is."""

from __future__ import annotations

import gc
import json
import re
import weakref
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.records import Doubt
from megarl.rollout import mathematics
from megarl.rollout.mathematics import JudgementTimeoutError, fault_of_reference, math_verify
from megarl.rollout.mathematics_statements import agree
from megarl.rollout.programs import fault_of_tests
from megarl.rollout.rewards import RewardSpec, get_reward
from tests.tables import DATA
from tests.tiers import sampled

ROOT = Path(__file__).parents[2]

AS_THEY_ARE = ("responses without a box", "as models write them")
"""Kinds of pairs whose responses are not put into a box."""


def by_kind(name: str) -> dict[str, list[list[Any]]]:
    """The records of a file of JSON lines, each as its other values in order, by their kind."""
    found: dict[str, list[list[Any]]] = {}
    for line in (DATA / name).read_text(encoding="utf-8").split("\n")[:-1]:
        kind, *values = json.loads(line).values()
        found.setdefault(kind, []).append(values)
    return found


PAIRS = by_kind("mathematics_pairs.jsonl")
CASES = [
    pytest.param(*case, id=f"{kind}: {case[0]}")
    for kind, cases in by_kind("mathematics_references.jsonl").items()
    for case in cases
]


@sampled(20)
@pytest.mark.parametrize(("reference", "parts", "others"), CASES)
def test_the_whole_reference_is_right_and_no_part_of_it(
    reference: str, parts: list[str], others: list[str]
) -> None:
    assert fault_of_reference(reference) is None
    for right in (reference, *others):
        assert (
            math_verify(f"Some thought, $x=99$. So the answer is $\\boxed{{{right}}}$.", reference) == 1.0
        ), right
    for wrong in parts:
        assert math_verify(f"So the answer is $\\boxed{{{wrong}}}$.", reference) == 0.0, wrong


def in_box(response: str, kind: str) -> str:
    return response if "box" in response or kind in AS_THEY_ARE else f"So $\\boxed{{{response}}}$."


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_of_a_kind(kind: str) -> None:
    judged = [(*pair, math_verify(in_box(pair[0], kind), pair[1])) for pair in PAIRS[kind]]
    assert [pair for pair in judged if pair[2] != pair[3]] == []


def documented_pairs() -> list[tuple[str, str, float]]:
    """Response, reference and score of each example in the table of configs/README.md."""
    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    section = text.split("## How mathematics is compared")[1].split("\n## ")[0]
    rows = [row.strip(" |").split(" | ") for row in section.splitlines() if row.startswith("| ")][1:]
    examples = [[re.findall(r"`([^`]*)`", cell) for cell in row[1:]] for row in rows]
    return [
        (response, reference[0], score)
        for reference, *sides in examples
        for side, score in zip(sides, (1.0, 0.0), strict=True)
        for response in side
    ]


@pytest.mark.parametrize(("response", "reference", "score"), documented_pairs())
def test_the_rules_that_are_written_down(response: str, reference: str, score: float) -> None:
    assert math_verify(f"\\boxed{{{response}}}", reference) == score


def test_every_kind_has_right_pairs_and_wrong_ones() -> None:
    """So that neither a rule that takes everything nor one that takes nothing passes."""
    pairs = [tuple(pair) for each in PAIRS.values() for pair in each]
    assert len(pairs) == len(set(pairs)) > 150
    assert all({right for *_, right in PAIRS[kind]} == {0, 1} for kind in PAIRS if kind != "hedges")


def decimal_of(value: Fraction) -> str:
    """The decimal of a fraction by long division, with its period under a line."""
    rest, digits, seen = abs(value.numerator) % value.denominator, "", dict[int, int]()
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digits += str(rest * 10 // value.denominator)
        rest = rest * 10 % value.denominator
    sign = "-" if value < 0 else ""
    whole = f"{sign}{abs(value.numerator) // value.denominator}"
    if not digits:
        return whole
    return (
        f"{whole}.{digits[: seen[rest]]}\\overline{{{digits[seen[rest] :]}}}" if rest else f"{whole}.{digits}"
    )


def mixed_number(value: Fraction) -> str:
    whole, rest = divmod(abs(value.numerator), value.denominator)
    sign = "-" if value < 0 else ""
    return (
        f"{sign}{whole}\\frac{{{rest}}}{{{value.denominator}}}"
        if whole and rest
        else f"{value.numerator}/{value.denominator}"
    )


SPELLINGS = {
    "fraction": lambda value: f"\\frac{{{value.numerator}}}{{{value.denominator}}}",
    "dfrac": lambda value: f"{'-' * (value < 0)}\\dfrac{{{abs(value.numerator)}}}{{{value.denominator}}}",
    "slash": lambda value: f"{value.numerator}/{value.denominator}",
    "not in lowest terms": lambda value: f"\\frac{{{-6 * value.numerator}}}{{{-6 * value.denominator}}}",
    "sum": lambda value: f"{value.numerator - value.denominator}/{value.denominator} + 1",
    "root": lambda value: f"\\frac{{{value.numerator}\\sqrt{{2}}}}{{{value.denominator}\\sqrt{{2}}}}",
    "power": lambda value: f"{value.numerator} \\cdot {value.denominator}^{{-1}}",
    "mixed": mixed_number,
    "decimal": decimal_of,
    "thousands": lambda value: f"{value.numerator:,}/{value.denominator}".replace(",", "\\,"),
    "full width": lambda value: str(value).translate(
        {ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789/"}
    ),
}
RATIONALS = st.one_of(
    st.fractions(max_denominator=97).filter(lambda value: abs(value) < 10**6),
    st.builds(Fraction, st.integers(-(10**40), 10**40), st.sampled_from((1, 2**60, 3, 10**30))),
)
LONG_DECIMAL = 10**4
"""Denominators from which on a period may have more digits than anyone writes."""


@settings(max_examples=150)
@given(
    RATIONALS,
    st.sampled_from((0, 0, 1, -1, 10**-3)),
    st.sampled_from(sorted(SPELLINGS)),
    st.sampled_from(sorted(SPELLINGS)),
)
def test_exact_rationals_in_several_spellings(
    reference: Fraction, difference: float, one: str, other: str
) -> None:
    """A difference in the last place of a number of forty digits is one."""
    response = reference + Fraction(difference).limit_denominator(10**9) / max(1, reference.denominator)
    texts = []
    for value, spelling in ((reference, one), (response, other)):
        can_be_written = spelling != "decimal" or value.denominator < LONG_DECIMAL
        texts.append(SPELLINGS[spelling if can_be_written else "fraction"](value))
    assert math_verify(f"\\boxed{{{texts[1]}}}", texts[0]) == float(reference == response), texts


@given(
    st.text(alphabet="0123456789.,;:{}()[]\\\\^_$%/|<>=+-~ xnei\u00bd\u221a\uff12", max_size=40),
    st.sampled_from(("5", "1, 2", "[1,2)", r"3 \pmod 7")),
)
def test_no_text_is_a_fault(content: str, reference: str) -> None:
    """Whatever a model writes, it is judged without an exception that ``math_verify`` would catch, and a text
    equals itself."""
    assert agree(reference, content) in (True, False) and agree(content, reference) in (True, False)
    boxed = f"\\boxed{{{content}}}"
    if content.count("{") == content.count("}") == content.count("\\") == content.count(
        "$"
    ) == 0 and content.strip(" .,;:~"):
        assert math_verify(boxed, content) == 1.0


HOSTILE = {
    "braces": "\\boxed{" + "{" * 50_000 + "8" + "}" * 50_000 + "}",
    "boxes that never end": "\\boxed{" * 14_000,
    "boxes": r"\boxed{7}" * 11_000,
    "fractions": "\\boxed{" + r"\frac{1}{" * 380 + "2" + "}" * 380 + "}",
    "words": "\\boxed{" + r"\text{a " * 500 + "}" * 500 + "}",
    "spaces": "\\boxed{" + " " * 100_000 + "7}",
    "spaces after the box": r"\boxed{7}" + " " * 100_000 + "or",
    "brackets": "\\boxed{" + "(" * 3_900 + "}",
    "digits": "\\boxed{" + "9" * 3_900 + "}",
    "repeated digits": "\\boxed{0." + "3" * 3_900 + "...}",
    "dollars": "$ x " * 25_000,
    "thoughts": "<think>" * 14_000,
    "ends of thoughts": "</think>" * 12_000,
    "statements": "answer: " * 12_000,
    "tags": "<answer>" * 12_000,
    "prose": "so we see that the sum is 4 and 6 or 7 " * 2_500,
    "values": "\\boxed{" + "1," * 1_900 + "3}",
    "signs": "\\boxed{" + r"\pm 1 " * 500 + "}",
    "equations": "\\boxed{" + "x=" * 1_900 + "1}",
    "residues": "\\boxed{" + r"1 \pmod " * 480 + "}",
    "names": "\\boxed{a" + "_" * 3_900 + "= 7}",
    "indices": "\\boxed{" + "a_1" * 1_300 + "= 7}",
    "halves": "\u00bd" * 100_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_response_is_judged_in_time(kind: str) -> None:
    for reference in (
        "5",
        "x^2+1",
        "1, 2",
        "[1,2)",
        r"3 \pmod 7",
        r"1,2,\ldots,n",
        r"12 \text{ cm}",
        r"\approx 3.1",
    ):
        assert math_verify(HOSTILE[kind], reference) == 0.0, reference


def test_a_huge_power_is_right_where_it_is_the_reference() -> None:
    """Without being computed."""
    assert math_verify(r"\boxed{2^{10^9} - 1}", "2^{10^9}-1") == 1.0


@pytest.mark.parametrize(
    "reference",
    [r"The sum is $\frac{3}{4}$.", r"so \boxed{\frac{3}{4}}", r"\(\frac{3}{4}\)", r"\[\frac{3}{4}\]"],
)
def test_a_reference_that_marks_its_mathematics_is_taken_as_it_is(reference: str) -> None:
    assert math_verify(r"\boxed{0.75}", reference) == 1.0
    assert math_verify(r"\boxed{3}", reference) == 0.0


@pytest.mark.parametrize("reference", ["", "  ", "}", r"\text{}", "$"])
def test_a_reference_that_says_nothing_is_found(reference: str) -> None:
    assert fault_of_reference(reference) == "no mathematical expression can be read from it"


@pytest.mark.parametrize("options", [{}, {"math_verify_impl": "dapo_math_verify"}])
def test_a_reference_without_an_answer_is_doubted(options: dict[str, str]) -> None:
    """NuminaMath writes proof for problems that ask for one; a response that says so would be right."""
    find = get_reward(RewardSpec("math", options)).fault_of_reference
    assert find is not None
    for reference in ("proof", "notfound", " Not found"):
        found = find(reference)
        assert isinstance(found, Doubt) and "leave such problems out" in found.why
    assert find("proofs") is None and find("0") is None


@pytest.mark.parametrize("bomb", [r"\boxed{100000000!}", r"\boxed{999^{99999999}}", r"\boxed{9^{9^{9^{9}}}}"])
def test_an_answer_that_cannot_be_judged_in_time_is_found(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    math_verify(r"\boxed{1}", "1")  # imports take their time too
    monkeypatch.setattr(mathematics, "CHECK_SECONDS", 0.5)
    with pytest.raises(JudgementTimeoutError, match=r"within 0\.5 s; it counts as incorrect"):
        math_verify(bomb, "5")
    assert math_verify(r"\boxed{5}", "5") == 1.0


def test_what_the_library_raises_at_its_own_time_limit_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its TimeoutException is no Exception, so that a plain ``except Exception`` lets it end the run."""
    import math_verify as library
    from math_verify.errors import TimeoutException

    def out_of_time(*_: object, **__: object) -> bool:
        raise TimeoutException

    monkeypatch.setattr(library, "verify", out_of_time)
    with pytest.raises(JudgementTimeoutError):
        math_verify(r"\boxed{5}", "5")


@pytest.mark.parametrize(
    "name", ["sympy_numeric_eq", "sympy_symbolic_eq", "sympy_deep_compare_set_and_tuple"]
)
def test_a_library_that_would_round_again_takes_nothing_for_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library calls these functions may change: the pool of rewards asks whether 1 is 1 before it
    starts."""
    from math_verify import grader

    monkeypatch.delattr(grader, name)
    assert math_verify("1", "1") == 0.0


def test_no_alarm_is_left_behind() -> None:
    import signal

    before = signal.getsignal(signal.SIGALRM)
    math_verify(r"\boxed{5}", "5")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


class Reference(str):
    """A reference whose end can be seen."""

    __slots__ = ("__weakref__",)


def test_references_that_were_judged_do_not_stay_in_memory() -> None:
    """Tests of a program may take megabytes each, and every process of the pool meets every reference."""
    long = Reference(r"\text{" + "x" * 2000 + "} + 3")
    tests = Reference(json.dumps({"inputs": ["1"], "outputs": ["2"]}))
    gone = [weakref.ref(each) for each in (long, tests)]
    fault_of_reference(long)
    assert fault_of_tests(tests) is None
    del long, tests
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_what_is_kept_of_references_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "_parse", lambda text: [text])
    for number in range(1100):
        assert (
            mathematics._parsed(f"kept {number}")
            == mathematics._parsed(f"kept {number}")
            == (f"\\boxed{{kept {number}}}",)
        )
    assert mathematics._parsed_before.cache_info().currsize <= 1024
    mathematics._parsed_before.cache_clear()
