"""Cases as lines of text: what is read is what was written, and a wrong word is named."""

from __future__ import annotations

import dataclasses

import pytest

from megarl.errors import ConfigError
from megarl.parity.case import Case, idle_fields
from megarl.parity.lines import CaseError, parse, words_of
from tests.tables import read_table

TABLES = read_table("parity_case.yaml")


def test_a_line_says_only_what_is_not_default_and_reads_back() -> None:
    case = Case(
        seed=7, tp=2, sp=True, loss="pg+kl:0.02+dual", temperature=0.7, clip=0.05, batching="packed", room=12
    )
    assert str(case) == (
        "backend=megatron seed=7 tp=2 sp=1 batching=packed room=12 loss=pg+kl:0.02+dual temperature=0.7 "
        "clip=0.05"
    )
    assert parse(str(case)) == case


def test_the_default_case_is_a_short_line() -> None:
    assert str(Case()) == "backend=megatron seed=0"
    assert parse("") == Case()


def test_every_field_survives_its_line() -> None:
    case = Case(backend="megatron", family="qwen3_moe", batching="dynamic")
    other = {int: 3, float: 0.5, bool: True}
    names = {
        "rope": "yarn",
        "dispatcher": "allgather",
        "balance": "seq",
        "masked": "rank",
        "loss": "dpo+sft",
        "optimizer": "sgd",
    }
    names |= {
        "router": "fp64",
        "comm": "p2p",
        "schedule": "cosine",
        "decay": "linear",
        "precision": "bfloat16",
        "layout": "Et*2|tL",
    }
    for field in dataclasses.fields(Case)[2:]:
        value = (
            other.get(type(field.default)) if not isinstance(field.default, str) else names.get(field.name)
        )
        if value is None or field.name in ("offload", "packer", "plan", "segments"):
            continue
        changed = dataclasses.replace(case, **{field.name: value})
        assert parse(str(changed)) == changed, field.name


@pytest.mark.parametrize(
    ("line", "words"),
    TABLES["a wrong word is named with what would do"],
)
def test_a_wrong_word_is_named_with_what_would_do(line: str, words: list[str]) -> None:
    with pytest.raises(CaseError) as caught:
        parse(line)
    assert isinstance(caught.value, ConfigError) and caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_numbers_of_options_are_those_of_the_line_or_the_first_ones() -> None:
    case = parse("loss=pg+kl:0.5+is+icepop:none:1.2+dual advantages=grpo+clip:-1:none")
    assert case.loss_options == {"kl", "is", "icepop", "dual"} and case.advantages_options == {"clip"}
    assert (case.loss_number("kl"), case.loss_number("dual"), case.loss_numbers("icepop")) == (
        0.5,
        1.5,
        (None, 1.2),
    )
    assert case.loss_numbers("cliprange") == (0.2, 0.28)


def test_sizes_follow_from_factors() -> None:
    case = Case(kv=2, group=3, width=7, mbs=2, micro=3, dp=2, tp=2, sp=True, cp=2)
    assert (case.heads, case.hidden, case.global_batch, case.total_rows, case.world, case.share) == (
        6,
        42,
        12,
        24,
        8,
        8,
    )
    assert dataclasses.replace(case, rows=5).logprob_rows == 5
    assert dataclasses.replace(case, rows=500).logprob_rows == case.total_rows


def test_a_token_budget_holds_one_padded_sequence_and_room() -> None:
    case = Case(batching="dynamic", length=9, cp=2, pad=3, round=8, room=5)
    assert case.budget == 24 + 5


def test_words_of_a_line_are_its_fields() -> None:
    assert words_of("cp=2 batching=packed") == {"cp": 2, "batching": "packed"}


def test_idle_fields_name_what_has_no_use_for_them() -> None:
    assert idle_fields(Case(backend="fsdp1", tp=2)) == {"tp": "backend=fsdp1"}
    assert idle_fields(Case(batching="packed", round=4)) == {"round": "batching=packed"}
    assert idle_fields(Case(tp=2)) == {}
