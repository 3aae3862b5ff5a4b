"""References as data sets store them: bare LaTeX, of which the whole is right and no part is."""

from __future__ import annotations

import gc
import json
import weakref

import pytest

from megarl.rollout import mathematics
from megarl.rollout.mathematics import JudgementTimeoutError, fault_of_reference, math_verify
from megarl.rollout.programs import fault_of_tests
from tests.tiers import sampled
from tests.unit.mathematics_pairs import PAIRS

# kind -> reference, parts of it that are wrong, other ways to write it
REFERENCES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "numbers": [
        ("5", [], ["5.0", r"\frac{10}{2}"]),
        ("-7", ["7"], ["-7.0"]),
        ("1,234", ["1", "234"], ["1234"]),
        (r"32,\!000", ["32", "000"], ["32000"]),
        ("3.14", ["3", "14"], ["3.14"]),
        (".25", ["25"], ["0.25", r"\frac{1}{4}"]),
        (r"0.\overline{36}", ["0", "36"], [r"0.\overline{36}"]),
        ("10^{12}", ["10", "12"], ["1000000000000"]),
        (r"3 \times 10^8", ["3", "10^8"], ["300000000"]),
        ("5!", ["5"], ["120"]),
    ],
    "fractions": [
        (r"\frac{3}{4}", ["3", "4"], ["0.75", "3/4", r"\dfrac{3}{4}"]),
        (r"\frac34", ["3", "4", "34"], ["0.75"]),
        (r"-\frac{2}{9}", [r"\frac{2}{9}", "-2"], ["-2/9"]),
        ("7/12", ["7", "12"], [r"\frac{7}{12}"]),
        (r"2\frac{1}{3}", ["2", r"\frac{1}{3}"], [r"\frac{7}{3}"]),
        (r"\frac{270}7\text{ degrees}", ["270", "7"], [r"\frac{270}{7}"]),
    ],
    "roots and constants": [
        (r"3\sqrt{13}", ["3", r"\sqrt{13}", "13"], [r"\sqrt{117}"]),
        (r"\frac{\sqrt{3}}{2}", [r"\sqrt{3}", "2"], [r"\sqrt{3}/2"]),
        (r"2+\sqrt{5}", ["2", r"\sqrt{5}"], [r"\sqrt{5}+2"]),
        (r"1 \pm \sqrt{19}", ["1", r"1+\sqrt{19}", r"\sqrt{19}"], [r"1 \pm \sqrt{19}"]),
        (r"\frac{9\pi}{4}", ["9", r"\pi", r"\frac{9}{4}"], [r"2.25\pi"]),
        (r"11\sqrt2", ["11", r"\sqrt2"], [r"11\sqrt{2}"]),
    ],
    "expressions": [
        ("x^2+3x-5", ["x^2", "3x", "-5", "x^2+3x"], ["3x-5+x^2"]),
        (r"\frac{x+2}{7}", ["x+2", "7"], [r"\frac{1}{7}(x+2)"]),
        ("5x-7y+11z+4=0", ["5x-7y", "0", "4"], ["11z+5x-7y+4=0"]),
        ("y = 2x + 3", ["3", "2x"], ["2x+3"]),
        ("p - q", ["p", "q", "-q"], ["-q+p"]),
        (r"3\mathbf{i} - 2\mathbf{j}", ["3", r"3\mathbf{i}", "-2"], [r"3\mathbf{i}-2\mathbf{j}"]),
    ],
    "intervals": [
        ("[2,5)", ["2", "5", "(2,5)", "[2,5]"], ["[2, 5)"]),
        (r"(-\infty, 3]", [r"-\infty", "3", r"(-\infty,3)"], [r"(-\infty,3]"]),
        (r"(0,9)\cup(9,36)", ["(0,9)", "(9,36)", "9"], [r"(9,36)\cup(0,9)"]),
        (r"x \in [-2,7]", ["-2", "7", "[-2,7)"], ["[-2,7]"]),
    ],
    "several values": [
        (r"(3, \frac{\pi}{2})", ["3", r"\frac{\pi}{2}"], [r"(3, 0.5\pi)"]),
        ("(-1, 2, 5)", ["-1", "(-1,2)", "5"], ["(-1,2,5)"]),
        (r"\left( \frac{3}{5}, \frac{8}{3} \right)", [r"\frac{3}{5}", r"\frac{8}{3}"], [r"(0.6, \frac{8}{3})"]),
        (r"\{1, 2, 4\}", ["1", r"\{1,2\}", "4"], [r"\{4, 2, 1\}"]),
        ("1, 2, 3", ["1", "3", "1, 2"], ["3, 2, 1"]),
        (r"6 \text{ and } 8", ["6", "8"], ["6, 8"]),
        ("x = 3, y = 4", ["3", "4", "x = 3"], ["x = 3, y = 4"]),
    ],
    "matrices": [
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", ["1", "4", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"], []),
        (
            r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
            ["-1/3", "5/3", r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}"],
            [r"\begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \\ \frac{5}{3} \end{pmatrix}"],
        ),
    ],
    "complex": [
        ("3+4i", ["3", "4i", "4", "3+4"], ["4i+3"]),
        ("-i", ["i", "-1"], ["-i"]),
        (r"\frac{1+i}{2}", ["1+i", "2", r"\frac{1}{2}"], [r"\frac{1}{2}+\frac{i}{2}"]),
    ],
    "text": [
        (r"\text{east}", [r"\text{eas}", "e"], ["east"]),
        (r"\text{Evelyn}", [r"\text{Eve}"], ["Evelyn"]),
        (r"\text{(C)}", [r"\text{(B)}"], ["C", r"\text{C}"]),
        ("C", ["B"], [r"\text{(C)}"]),
    ],
    "units": [
        (r"12 \text{ inches}", ["1", "2"], ["12"]),
        (r"36\text{ square units}", ["3", "6"], ["36"]),
        (r"18.6 \text{ meters per second}", ["18", "6"], ["18.6"]),
        (r"10 \text{ m}^2", ["1", "0"], ["10", r"10\text{ m}^2"]),
        (r"144\pi \text{ cm}^{2}", ["144", r"\pi"], [r"144\pi"]),
        (r"1 \frac{1}{2} \text{ in}^3", [r"\frac{1}{2}"], [r"\frac{3}{2}"]),
        (r"3 \text{ hours and } 20 \text{ minutes}", ["3", "20"], []),
        (r"\$18.90", ["18", "90"], ["18.90", "18.9"]),
        (r"12.5\%", ["12", "5"], [r"12.5\%"]),
        (r"60^\circ", ["6"], ["60", r"60^{\circ}"]),
    ],
    "other bases": [("4210_5", ["4210", "5"], ["4210_{5}"]), ("10101_2", ["10101", "21"], ["10101_{2}"])],
}
CASES = [pytest.param(*case, id=f"{kind}: {case[0]}") for kind, cases in REFERENCES.items() for case in cases]


@sampled(20)
@pytest.mark.parametrize(("reference", "parts", "others"), CASES)
def test_the_whole_reference_is_right_and_no_part_of_it(reference: str, parts: list[str], others: list[str]) -> None:
    assert fault_of_reference(reference) is None
    for right in (reference, *others):
        assert math_verify(f"Some thought, $x=99$. So the answer is $\\boxed{{{right}}}$.", reference) == 1.0, right
    for wrong in parts:
        assert math_verify(f"So the answer is $\\boxed{{{wrong}}}$.", reference) == 0.0, wrong


def in_box(response: str, kind: str) -> str:
    return response if "box" in response or kind == "responses without a box" else f"So $\\boxed{{{response}}}$."


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_of_a_kind(kind: str) -> None:
    judged = [(*pair, math_verify(in_box(pair[0], kind), pair[1])) for pair in PAIRS[kind]]
    assert [pair for pair in judged if pair[2] != pair[3]] == []


@pytest.mark.parametrize("reference", [r"The sum is $\frac{3}{4}$.", r"so \boxed{\frac{3}{4}}", r"\(\frac{3}{4}\)", r"\[\frac{3}{4}\]"])
def test_a_reference_that_marks_its_mathematics_is_taken_as_it_is(reference: str) -> None:
    assert math_verify(r"\boxed{0.75}", reference) == 1.0
    assert math_verify(r"\boxed{3}", reference) == 0.0


@pytest.mark.parametrize("reference", ["", "  ", "}", r"\text{}", "$"])
def test_a_reference_that_says_nothing_is_found(reference: str) -> None:
    assert fault_of_reference(reference) == "no mathematical expression can be read from it"


@pytest.mark.parametrize("bomb", [r"\boxed{100000000!}", r"\boxed{999^{99999999}}", r"\boxed{9^{9^{9^{9}}}}"])
def test_an_answer_that_cannot_be_judged_in_time_is_found(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    math_verify(r"\boxed{1}", "1")  # imports take their time too
    monkeypatch.setattr(mathematics, "CHECK_SECONDS", 0.5)
    with pytest.raises(JudgementTimeoutError, match=r"within 0\.5 s; it counts as wrong"):
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
        assert mathematics._parsed(f"kept {number}") == mathematics._parsed(f"kept {number}") == (f"\\boxed{{kept {number}}}",)
    assert mathematics._parsed_before.cache_info().currsize <= 1024
    mathematics._parsed_before.cache_clear()
