"""Preference pairs: the forms in which they are stored, what is refused of them, and the batch that the loss
reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import DPOLossFn
from megarl.data import datasets
from megarl.data.columns import Kind, complete_source
from megarl.data.datasets import Dataset, Reading, load_dataset
from megarl.data.records import read_preferences
from megarl.data.tokenization import get_tokenizer
from megarl.distributed.token_batches import supervised_batch
from megarl.errors import DataError
from tests.unit.test_sources import BOT, MARKED_TEMPLATE, SYSTEM, TURN_TEMPLATE, USER
from tests.unit.test_tokenization import save_tokenizer, words

KEYS = {"chosen_key": "c", "rejected_key": "r"}
OTHER = {"role": "assistant", "content": "three three"}
TURNS = [SYSTEM, USER, BOT, {"role": "user", "content": "plus"}]


def load(
    directory: Path,
    rows: list[Any],
    template: str | None = "default",
    longest: int = 99,
    filters: bool = False,
    **more: Any,
) -> Dataset:
    file = directory / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = get_tokenizer({"name": save_tokenizer(directory / "t", chat=True), "chat_template": template})
    config: Any = {
        "max_input_seq_length": longest,
        "filter_overlong_prompts": filters,
        "cache_dir": str(directory / "cache"),
    }
    source: Any = {"path": str(file), **KEYS, **more}
    return load_dataset(source, Reading(config, tokenizer, True, pairs=True))


def shown(data: Dataset, pair: int) -> list[str]:
    """Prompt, and of either answer what is learned."""
    chosen, rejected = examples = data.select([pair])
    batch = supervised_batch(examples, 0)
    assert chosen.prompt_ids == rejected.prompt_ids and chosen.index == rejected.index == pair
    learned = [
        words(ids[mask > 0].tolist())
        for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)
    ]
    return [words(list(chosen.prompt_ids)), *learned]


def test_texts(tmp_path: Path) -> None:
    rows = [
        {"q": {"p": "two"}, "c": "five", "r": "three three"},
        {"q": {"p": [SYSTEM, USER]}, "c": "five", "r": "Q"},
    ]
    data = load(tmp_path, rows, prompt_key="q.p")
    assert len(data) == 2 and [example.answer for example in data.examples] == [
        "five",
        "three three",
        "five",
        "Q",
    ]
    assert shown(data, 0) == ["<user> two <bot>", "five </s>", "three three </s>"]
    assert shown(data, 1)[1:] == ["five </s>", "Q </s>"]


@pytest.mark.parametrize("template", [TURN_TEMPLATE, MARKED_TEMPLATE], ids=["by beginnings", "by marks"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt and answers", "two conversations"])
def test_conversations_differ_in_their_last_turn(tmp_path: Path, prompt: bool, template: str) -> None:
    row = {"p": TURNS, "c": [BOT], "r": [OTHER]} if prompt else {"c": [*TURNS, BOT], "r": [*TURNS, OTHER]}
    before = "<user> be kind <user> two <bot> five </s> Q <user> plus <bot>"
    data = load(tmp_path, [row], template, **({"prompt_key": "p"} if prompt else {}))
    assert shown(data, 0) == [before, "five </s>", "three three </s>"]


def test_texts_and_conversations_in_one_source(tmp_path: Path) -> None:
    rows = [
        {"p": "two", "c": "five", "r": "Q"},
        {"p": TURNS, "c": [BOT], "r": [OTHER]},
        {"p": "plus", "c": "Q", "r": "five"},
    ]
    data = load(tmp_path, rows, TURN_TEMPLATE, prompt_key="p")
    five, other, three = "five </s>", "Q </s>", "three three </s>"
    assert [shown(data, pair)[1:] for pair in range(3)] == [[five, other], [five, three], [other, five]]


@pytest.mark.parametrize(("bound", "value"), [("_CHUNK", 4), ("_CHUNK", 3), ("_CHUNK_CHARACTERS", 1)])
def test_a_pair_is_one_record_of_two_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    """Over the ends of chunks, wherever these would be, and where a source comes several times."""
    monkeypatch.setattr(datasets, bound, value)
    rows = [{"p": "two", "c": "five", "r": " ".join(["Q"] * (place + 1))} for place in range(5)]
    data = load(tmp_path, rows, prompt_key="p", repeat=2)
    assert (
        len(data) == 10
        and len(data.examples) == 20
        and [(each.start, each.end) for each in data.sources] == [(0, 10)]
    )
    assert [example.answer for example in data.select([7, 3])] == ["five", "Q Q Q", "five", "Q Q Q Q"]
    assert data.places([7, 3]) == [14, 15, 6, 7]
    assert [data.examples.origin(place) for place in (5, 15)] == [(0, 5), (0, 5)]
    [once] = data.examples.by_source()
    assert [example.answer for example in once] == [example.answer for example in list(data.examples)[:10]]


def test_what_is_learned_is_in_the_digest(tmp_path: Path) -> None:
    def digest(row: dict[str, Any], template: str | None = TURN_TEMPLATE) -> tuple[str, str]:
        data = load(tmp_path, [row], template, prompt_key="p")
        return data.fingerprint, data.examples.by_source()[0].digest(0, 2)

    row = {"p": TURNS, "c": [BOT], "r": [OTHER]}
    same = digest(row)
    assert digest(row) == same
    assert not {*digest({**row, "c": [OTHER], "r": [BOT]})} & {*same}
    # a turn that is marked to its end, and one that goes on behind it
    longer = MARKED_TEMPLATE.replace(" </s>{% endgeneration %} Q ", " </s> Q {% endgeneration %}")
    assert digest(row, longer)[1] != digest(row, MARKED_TEMPLATE)[1]


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"c": [*TURNS, BOT], "r": [USER, OTHER]}, {}, r"'c' and 'r' differ in more than their last turn"),
        ({"c": TURNS, "r": [*TURNS, BOT]}, {}, r"'c' ends with a turn of 'user'"),
        ({"c": "five", "r": "Q"}, {}, r"'c' = 'five' is not a list of messages"),
        ({"c": [*TURNS, BOT]}, {}, r"has no key 'r'"),
        ({"p": None, "c": "1", "r": "2"}, {"prompt_key": "p"}, r"'p' = None is neither"),
        ({"p": "two", "c": None, "r": "2"}, {"prompt_key": "p"}, r"'c' is null"),
        (
            {"p": TURNS, "c": [USER, BOT], "r": [BOT]},
            {"prompt_key": "p"},
            r"c\[4\] has the role 'user' after 'user'",
        ),
        ([1], {}, r"is a list, expected an object"),
    ],
)
def test_broken_pairs_are_named(tmp_path: Path, row: Any, more: dict[str, str], message: str) -> None:
    good = {"p": "two", "c": "1", "r": "five"} if more else {"c": [*TURNS, BOT], "r": [*TURNS, OTHER]}
    with pytest.raises(DataError, match=rf"pairs\.jsonl line 2.*{message}"):
        load(tmp_path, [good, row], TURN_TEMPLATE, **more)


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], [1, 1], [0, None], [0, math.nan], ["0", "1"], []])
def test_completions_of_which_none_is_better_are_refused(tmp_path: Path, ranks: list[Any]) -> None:
    def row(ranks: list[Any]) -> dict[str, Any]:
        answers = [{"rank": rank, "completion": [{**BOT, "content": f"{rank}"}]} for rank in ranks]
        return {"context": [USER], "completions": answers}

    keys = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    for given in (keys, dict.fromkeys(keys)):
        with pytest.raises(DataError, match=r"line 1: 'completions' has the ranks \[.*two completions"):
            load(tmp_path, [row(ranks), row([0, 1])], **given)
    file = tmp_path / "pairs.jsonl"
    source: Any = {"path": str(file)}
    complete_source(source, Kind.PAIRS, skips_bad_records=True)
    assert {key: source[key] for key in keys} == keys
    assert len(list(read_preferences(source, lambda error: None))) == 1
    own = {"chosen_key": "completions[1].completion", "rejected_key": "completions[0].completion"}
    *_, (chosen, _) = read_preferences({**source, **own, "prompt_key": "context"}, lambda error: None)
    assert chosen.answer == "1"


def test_equal_answers_are_counted_and_named(tmp_path: Path) -> None:
    """Also texts that differ where the tokenizer sees no difference."""
    rows = [
        {"p": "two", "c": c, "r": r}
        for c, r in (("five", "Q"), ("five", "five"), ("Q", "five"), ("three Q", "three  Q"))
    ]
    with pytest.raises(
        DataError,
        match=r"2 of 4 pairs have two answers with the same tokens.* line 2\): 'five'; .* line 4\): 'three "
        r"Q'",
    ):
        load(tmp_path, rows, prompt_key="p")
    with pytest.raises(DataError, match="1 of 1 pairs have two answers with the same tokens"):
        load(tmp_path, [{"c": [*TURNS, BOT], "r": [*TURNS, BOT]}], TURN_TEMPLATE)


def test_empty_answers_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"p": "two", "c": "", "r": "five"},
        {"p": "two", "c": "five", "r": "Q"},
        {"p": "two", "c": "five", "r": " "},
    ]
    data = load(tmp_path, rows, prompt_key="p")
    assert shown(data, 0) == ["<user> two <bot>", "</s>", "five </s>"]
    assert "2 empty answers in 3 records" in caplog.text
    assert "line 1): the chosen one" in caplog.text and "line 3): the rejected one" in caplog.text


def test_a_pair_goes_where_either_answer_is_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"p": "two", "c": "five", "r": answer} for answer in ("Q", "Q Q", "Q Q Q")]
    rows.append({"p": "two", "c": "five five five", "r": "Q"})
    found = load(tmp_path, rows, longest=6, filters=True, prompt_key="p")
    assert [(example.index, example.answer) for example in found.examples] == [
        (0, "five"),
        (0, "Q"),
        (1, "five"),
        (1, "Q Q"),
    ]
    assert "2 of 4 records (50.00 %) are left out" in caplog.text
    with pytest.raises(
        DataError,
        match=r"2 of 4 pairs exceed .* = 6\. Fix: raise it to 7, .* line 3\): 7 tokens; .* line 4\): 7 "
        r"tokens",
    ):
        load(tmp_path, rows, longest=6, prompt_key="p")
    with pytest.raises(DataError, match="all 4 pairs exceed"):
        load(tmp_path, rows, longest=1, filters=True, prompt_key="p")
    with pytest.raises(DataError, match="holds 0 pairs"):
        load(tmp_path, [], prompt_key="p")


def test_the_loss_reads_the_batch(tmp_path: Path) -> None:
    """Against the formula, a pair at a time: -log sigmoid(beta (R_chosen - R_rejected)), R over the tokens
    that are learned."""
    rows = [{"c": [*TURNS, BOT], "r": [*TURNS, OTHER]}, {"c": [USER, OTHER], "r": [USER, BOT]}]
    batch = supervised_batch(load(tmp_path, rows, TURN_TEMPLATE).select(range(2)), 0)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (
        torch.randn(batch["input_ids"].shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    batch["reference_policy_logprobs"] = torch.roll(theirs, -1, dims=1)
    tokens = batch["token_mask"][:, 1:].sum()
    loss, _ = DPOLossFn({"reference_policy_kl_penalty": 0.3})(batch, torch.tensor(4.0), tokens, ours[:, 1:])
    expected = 0.0
    for row in (0, 2):
        learned = [batch["token_mask"][each] > 0 for each in (row, row + 1)]
        better, worse = (
            float((ours - theirs)[row + place][mask].sum()) for place, mask in enumerate(learned)
        )
        expected += math.log1p(math.exp(-0.3 * (better - worse))) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)
