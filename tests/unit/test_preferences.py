"""Preference pairs: the forms in which they are stored, what is refused of them, and the batch that the loss reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import DPOLossFn
from megarl.data.datasets import Reading
from megarl.data.preferences import PreferencePair, alternating, load_preferences
from megarl.data.tokenization import get_tokenizer
from megarl.distributed.token_batches import supervised_batch
from megarl.errors import DataError
from tests.unit.test_sources import BOT, MARKED_TEMPLATE, SYSTEM, TURN_TEMPLATE, USER
from tests.unit.test_tokenization import save_tokenizer, words

KEYS = {"chosen_key": "c", "rejected_key": "r"}
OTHER = {"role": "assistant", "content": "three three"}
TURNS = [SYSTEM, USER, BOT, {"role": "user", "content": "plus"}]


def load(
    directory: Path, rows: list[Any], template: str | None = "default", longest: int = 99, filters: bool = False, **more: Any
) -> tuple[PreferencePair, ...]:
    file = directory / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = get_tokenizer({"name": save_tokenizer(directory / "t", chat=True), "chat_template": template})
    config: Any = {"max_input_seq_length": longest, "filter_overlong_prompts": filters}
    source: Any = {"path": str(file), **KEYS, **more}
    return load_preferences(source, Reading(config, tokenizer, True))


def shown(pair: PreferencePair) -> list[str]:
    """Prompt, and of either answer what is learned."""
    batch = supervised_batch(alternating([pair]), 0)
    assert pair.chosen.prompt_ids == pair.rejected.prompt_ids
    learned = [words(ids[mask > 0].tolist()) for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)]
    return [words(list(pair.chosen.prompt_ids)), *learned]


def test_texts(tmp_path: Path) -> None:
    rows = [{"q": {"p": "two"}, "c": "five", "r": "three three"}, {"q": {"p": [SYSTEM, USER]}, "c": "five", "r": "Q"}]
    first, second = load(tmp_path, rows, prompt_key="q.p")
    assert shown(first) == ["<user> two <bot>", "five </s>", "three three </s>"]
    assert shown(second)[1:] == ["five </s>", "Q </s>"] and (second.index, second.chosen.answer) == (1, "five")


@pytest.mark.parametrize("template", [TURN_TEMPLATE, MARKED_TEMPLATE], ids=["by beginnings", "by marks"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt and answers", "two conversations"])
def test_conversations_differ_in_their_last_turn(tmp_path: Path, prompt: bool, template: str) -> None:
    row = {"p": TURNS, "c": [BOT], "r": [OTHER]} if prompt else {"c": [*TURNS, BOT], "r": [*TURNS, OTHER]}
    [pair] = load(tmp_path, [row], template, **({"prompt_key": "p"} if prompt else {}))
    before = "<user> be kind <user> two <bot> five </s> Q <user> plus <bot>"
    assert shown(pair) == [before, "five </s>", "three three </s>"]


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"c": [*TURNS, BOT], "r": [USER, OTHER]}, {}, r"'c' and 'r' differ in more than their last turn"),
        ({"c": [*TURNS, BOT], "r": [*TURNS, BOT]}, {}, r"are the same answer 'five'"),
        ({"p": "two", "c": 5, "r": "5"}, {"prompt_key": "p"}, r"are the same answer '5'"),
        ({"c": TURNS, "r": [*TURNS, BOT]}, {}, r"'c' ends with a turn of 'user'"),
        ({"c": "five", "r": "Q"}, {}, r"'c' = 'five' is not a list of messages"),
        ({"c": [*TURNS, BOT]}, {}, r"has no key 'r'"),
        ({"p": None, "c": "1", "r": "2"}, {"prompt_key": "p"}, r"'p' = None is neither"),
        ({"p": TURNS, "c": [USER, BOT], "r": [BOT]}, {"prompt_key": "p"}, r"c\[4\] has the role 'user' after 'user'"),
        ([1], {}, r"is a list, expected an object"),
    ],
)
def test_broken_pairs_are_named(tmp_path: Path, row: Any, more: dict[str, str], message: str) -> None:
    good = {"p": "two", "c": "1", "r": "2"} if more else {"c": [*TURNS, BOT], "r": [*TURNS, OTHER]}
    with pytest.raises(DataError, match=rf"pairs\.jsonl line 2.*{message}"):
        load(tmp_path, [good, row], TURN_TEMPLATE, **more)


def test_a_pair_goes_where_either_answer_is_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"p": "two", "c": "five", "r": answer} for answer in ("Q", "Q Q", "Q Q Q")]
    rows.append({"p": "two", "c": "five five five", "r": "Q"})
    found = load(tmp_path, rows, longest=6, filters=True, prompt_key="p")
    assert [(pair.index, pair.rejected.answer) for pair in found] == [(0, "Q"), (1, "Q Q")]
    assert "2 of 4 pairs (50.00 %) are left out" in caplog.text
    with pytest.raises(DataError, match=r"2 of 4 pairs exceed .* = 6\. Fix: raise it to 7, .* line 3: 7 tokens; .* line 4: 7 tokens"):
        load(tmp_path, rows, longest=6, prompt_key="p")
    with pytest.raises(DataError, match="4 of 4 pairs exceed"):
        load(tmp_path, rows, longest=1, filters=True, prompt_key="p")
    with pytest.raises(DataError, match="holds 0 pairs"):
        load(tmp_path, [], prompt_key="p")


def test_the_loss_reads_the_batch(tmp_path: Path) -> None:
    """Against the formula, a pair at a time: -log sigmoid(beta (R_chosen - R_rejected)), R over the tokens that are learned."""
    rows = [{"c": [*TURNS, BOT], "r": [*TURNS, OTHER]}, {"c": [USER, OTHER], "r": [USER, BOT]}]
    pairs = load(tmp_path, rows, TURN_TEMPLATE)
    batch = supervised_batch(alternating(pairs), 0)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(batch["input_ids"].shape, generator=generator, dtype=torch.float64) for _ in range(2))
    config: Any = {"reference_policy_kl_penalty": 0.3, "preference_loss_weight": 1.0, "sft_loss_weight": 0.0}
    loss_fn = DPOLossFn({**config, "preference_average_log_probs": False, "sft_average_log_probs": False})
    batch["reference_policy_logprobs"] = torch.roll(theirs, -1, dims=1)
    tokens = batch["token_mask"][:, 1:].sum()
    loss, _ = loss_fn(batch, torch.tensor(4.0), tokens, ours[:, 1:])
    expected = 0.0
    for row in (0, 2):
        learned = [batch["token_mask"][each] > 0 for each in (row, row + 1)]
        better, worse = (float((ours - theirs)[row + place][mask].sum()) for place, mask in enumerate(learned))
        expected += math.log1p(math.exp(-0.3 * (better - worse))) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)
