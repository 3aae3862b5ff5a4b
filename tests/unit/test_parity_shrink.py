"""Shrinking: the smallest failing case is found, step by step, always in the same way, and only possible
cases are run."""

from __future__ import annotations

from dataclasses import replace

from megarl.parity.case import Case
from megarl.parity.lines import parse
from megarl.parity.shrink import MOST_TRIALS, shrink, simpler

BIG = parse(
    "seed=5 family=mistral tied=1 rope=yarn layers=7 kv=4 group=3 head=10 width=12 ffn=52 vocab=101 "
    "window=5 tp=2 sp=1 pp=2 first=3 last=4 "
    "cp=2 batching=packed mbs=2 micro=3 room=40 packer=concatenative length=21 pad=3 rows=5 lpbs=3 "
    "masked=some together=1 loss=pg+kl+dual "
    "temperature=0.7 clip=0.5 warmup=1 distopt=1 overlap=1 bucket=500 recompute=1 reference=1 evaluate=1"
)


def always(case: Case) -> bool:
    return True


def test_only_what_the_failure_needs_is_left() -> None:
    smallest = shrink(BIG, lambda case: case.cp > 1 and case.batching == "packed", always)
    assert smallest == Case(seed=5, cp=2, batching="packed")


def test_numbers_go_down_to_the_bound_of_the_failure() -> None:
    smallest = shrink(BIG, lambda case: case.length >= 11 and case.vocab > 50 and case.micro > 1, always)
    assert smallest == Case(seed=5, length=smallest.length, vocab=smallest.vocab, micro=2)
    assert 11 <= smallest.length <= 14 and 51 <= smallest.vocab <= 68


def test_options_of_a_loss_go_one_by_one() -> None:
    assert shrink(BIG, lambda case: "dual" in case.loss_options, always) == Case(seed=5, loss="pg+dual")


def test_numbers_and_options_of_advantages_go_where_they_are_not_needed() -> None:
    case = parse("loss=pg+kl:0.5+dual:3+entropy advantages=grpo+raw+clip:-1:none")

    def fails(smaller: Case) -> bool:
        return "dual" in smaller.loss_options and "clip" in smaller.advantages_options

    assert shrink(case, fails, always) == parse("loss=pg+dual advantages=grpo+clip")


def test_the_same_failure_shrinks_to_the_same_case() -> None:
    def fails(case: Case) -> bool:
        return case.tp * case.pp >= 2 and case.temperature != 1.0

    assert shrink(BIG, fails, always) == shrink(BIG, fails, always)


def test_impossible_cases_are_not_run() -> None:
    run: list[Case] = []

    def fails(case: Case) -> bool:
        run.append(case)
        return True

    smallest = shrink(BIG, fails, lambda case: case.tp == 2 and case.kv % 2 == 0)
    assert smallest.tp == 2 and smallest.kv == 2
    assert all(case.tp == 2 and case.kv % 2 == 0 for case in run)


def test_nothing_is_run_twice_and_the_end_comes() -> None:
    run: list[Case] = []

    def fails(case: Case) -> bool:
        run.append(case)
        return len(run) % 3 == 0

    shrink(BIG, fails, always)
    assert len(run) == len(set(run)) <= MOST_TRIALS


def test_a_case_that_cannot_be_simpler_stays() -> None:
    assert list(simpler(Case())) == []
    assert shrink(Case(), always, always) == Case()


def test_no_simpler_case_is_the_case_itself() -> None:
    assert all(candidate != BIG for candidate in simpler(BIG))


def test_a_mixture_becomes_dense_in_one_step_and_keeps_two_experts_otherwise() -> None:
    case = replace(
        Case(), family="qwen3_moe", experts=6, topk=3, expert=8, ep=2, dp=2, balance="aux", head=10
    )
    candidates = list(simpler(case))
    assert any(
        candidate.family == "llama" and candidate.experts == 0 and candidate.ep == 1
        for candidate in candidates
    )
    assert all(candidate.experts >= 2 for candidate in candidates if candidate.family == "qwen3_moe")


def test_heads_stay_even_which_rotary_embeddings_need() -> None:
    for head in range(6, 20, 2):
        assert all(candidate.head % 2 == 0 for candidate in simpler(replace(Case(), head=head)))
    assert {candidate.head for candidate in simpler(replace(Case(), head=12))} == {4, 6}
