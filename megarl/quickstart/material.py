"""The quickstart's arithmetic task: random problems, a tokenizer, a tiny model, and its evaluation.

The problems are in short English, and have an answer of one or two digits. So a model of about 150,000
parameters learns the task within minutes on a CPU, and exact match is a suitable reward.

Demonstrations for SFT contain mistakes: in a given fraction of them, a number is copied from the question
instead of computing the answer. So SFT stops at a moderate accuracy, which GRPO can improve.

``python -m megarl.quickstart.material MODEL_DIR PROBLEMS_JSONL`` prints the accuracy of an exported model
with plain transformers, as a check that is independent of megarl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from megarl.errors import DataError, MegarlError, ModelError

Split = Literal["train", "validation"]

NAMES = ("Tom", "Sara", "Ben", "Mia", "Leo", "Anna")
ITEMS = ("apples", "books", "coins", "pens", "eggs", "cards")
_VALIDATION_SHARE = 5  # One of this number of prompts is a validation prompt.


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, which ends where the answer begins, and its answer, an integer of one or two digits."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class _Exercise:
    """A prompt with its correct answer, and the number that a mistaken demonstration gives (by chance they
    may be equal)."""

    prompt: str
    answer: str
    mistake: str


def _digit_exercise(draw: random.Random, which: str, choose: Callable[[str], str]) -> _Exercise:
    """Return a question about the digits of a three-digit number; the mistake is the middle digit."""
    number = str(draw.randint(100, 999))
    return _Exercise(f"What is the {which} digit of {number}? Answer:", choose(number), number[1])


def _written_sum(draw: random.Random) -> _Exercise:
    name, left, right = draw.choice(NAMES), draw.randint(2, 9), draw.randint(1, 3)
    return _Exercise(f"{name} writes {left}+{right}=", str(left + right), str(left))


def _written_difference(draw: random.Random) -> _Exercise:
    name, left, right = draw.choice(NAMES), draw.randint(3, 9), draw.randint(1, 3)
    return _Exercise(f"{name} writes {left}-{right}=", str(left - right), str(left))


def _gain(draw: random.Random) -> _Exercise:
    name, item, start, more = draw.choice(NAMES), draw.choice(ITEMS), draw.randint(2, 9), draw.randint(1, 3)
    return _Exercise(
        f"{name} has {start} {item} and buys {more} more. How many {item}? Answer:",
        str(start + more),
        str(start),
    )


def _loss(draw: random.Random) -> _Exercise:
    name, item, start, lost = draw.choice(NAMES), draw.choice(ITEMS), draw.randint(3, 9), draw.randint(1, 3)
    return _Exercise(
        f"{name} has {start} {item} and loses {lost}. How many {item} are left? Answer:",
        str(start - lost),
        str(start),
    )


def _share_exercise(draw: random.Random, who: str, choose: Callable[[list[int]], int]) -> _Exercise:
    """Return a question that compares two people; the mistake is the first number."""
    (first, second), item, shares = draw.sample(NAMES, 2), draw.choice(ITEMS), draw.sample(range(2, 10), 2)
    prompt = f"{first} has {shares[0]} {item}, {second} has {shares[1]}. How many has the {who}? Answer:"
    return _Exercise(prompt, str(choose(shares)), str(shares[0]))


_KINDS: tuple[Callable[[random.Random], _Exercise], ...] = (
    partial(_digit_exercise, which="first", choose=lambda number: number[0]),
    partial(_digit_exercise, which="last", choose=lambda number: number[-1]),
    partial(_digit_exercise, which="largest", choose=max),
    partial(_digit_exercise, which="smallest", choose=min),
    _written_sum,
    _written_difference,
    _gain,
    _loss,
    partial(_share_exercise, who="richer", choose=max),
    partial(_share_exercise, who="poorer", choose=min),
)


def split_of(prompt: str) -> Split:
    """Return the split of a prompt. It depends only on the text, so files with different seeds share no
    prompt across splits."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % _VALIDATION_SHARE == 0 else "train"


def generate_problems(
    count: int, seed: int, split: Split = "train", mistake_share: float = 0.0
) -> list[Problem]:
    """Return random problems of one split; all kinds are equally likely. Deterministic; a prompt may occur
    twice.

    Args:
        count: number of problems, at least 1.
        seed: random seed.
        split: split of the prompts.
        mistake_share: probability that a problem has the mistake as its answer; does not change the prompts.

    Raises:
        DataError: ``count`` is not positive, ``split`` is unknown, or ``mistake_share`` is not in [0, 1].
    """
    if not 0.0 <= mistake_share <= 1.0:
        raise DataError(
            f"mistake_share = {mistake_share!r}: a probability is between 0 and 1. Fix: 0 for true "
            "answers only"
        )
    # A separate generator, so that the prompts do not depend on ``mistake_share``.
    care = random.Random(f"mistakes {seed}")
    return [
        Problem(exercise.prompt, exercise.mistake if care.random() < mistake_share else exercise.answer)
        for exercise in _exercises(count, seed, split)
    ]


def _exercises(count: int, seed: int, split: str, only_with_mistake: bool = False) -> Iterator[_Exercise]:
    """Yield exercises of a split; with ``only_with_mistake``, only those whose mistake differs from the
    answer."""
    if count < 1:
        raise DataError(f"count = {count!r}: at least one problem must be asked for. Fix: count >= 1")
    if split not in get_args(Split):
        raise DataError(
            f"split = {split!r}: the splits are {', '.join(get_args(Split))}. Fix: name one of them"
        )
    draw, made = random.Random(f"problems {seed}"), 0
    while made < count:
        # The split depends on the prompt alone, so no prompt is in two splits, whatever the seeds.
        exercise = draw.choice(_KINDS)(draw)
        if split_of(exercise.prompt) == split and not (
            only_with_mistake and exercise.mistake == exercise.answer
        ):
            made += 1
            yield exercise


def write_problems(
    path: str | Path, count: int, seed: int, split: Split = "train", mistake_share: float = 0.0
) -> Path:
    """Write the result of ``generate_problems`` to a JSON-lines file, as ``{"prompt": str, "answer": str}``;
    parent directories are created.

    Raises:
        DataError: see ``generate_problems``.
    """
    return write_lines(path, map(asdict, generate_problems(count, seed, split, mistake_share)))


def write_pairs(path: str | Path, count: int, seed: int, split: Split = "train") -> Path:
    """Write preference pairs to a JSON-lines file, as ``{"prompt": str, "chosen": str, "rejected": str}``.
    The chosen answer is correct, the rejected one is the mistake. The problems are those of
    ``generate_problems`` with the same seed and split, without those whose answers are equal.

    Raises:
        DataError: see ``generate_problems``.
    """
    exercises = _exercises(count, seed, split, only_with_mistake=True)
    return write_lines(
        path, ({"prompt": each.prompt, "chosen": each.answer, "rejected": each.mistake} for each in exercises)
    )


def write_lines(path: str | Path, records: Iterable[Mapping[str, object]]) -> Path:
    """Write records to a JSON-lines file; parent directories are created."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return target


def _parse_problem(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: {line[:80]!r} is not JSON ({error}). Fix: write one JSON object a line"
        ) from None
    prompt, answer = (
        (record.get("prompt"), record.get("answer")) if isinstance(record, dict) else (None, None)
    )
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise DataError(
            f'{where}: {line[:80]!r} has no string under both "prompt" and "answer". Fix: give both as '
            "strings"
        )
    return Problem(prompt, answer)


def read_problems(path: str | Path) -> list[Problem]:
    """Read the problems of a JSON-lines file; blank lines are skipped.

    Raises:
        DataError: the file is missing or empty, or a line is invalid (names its number).
    """
    source = Path(path)
    if not source.is_file():
        raise DataError(f"problems file {str(source)!r} does not exist. Fix: write one with write_problems")
    # splitlines would also split at U+2028 and similar characters inside a prompt.
    lines = source.read_text(encoding="utf-8").split("\n")
    problems = [
        _parse_problem(line, f"{source} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not problems:
        raise DataError(f"problems file {str(source)!r} holds no record. Fix: write one with write_problems")
    return problems


logger = logging.getLogger(__name__)


def _load(model_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (model_dir / "config.json").is_file():
        raise ModelError(
            f"model directory {str(model_dir)!r} holds no config.json. Fix: give the folder of an exported "
            "checkpoint"
        )
    # With left padding, all responses begin in the same column.
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    return model.eval(), tokenizer


@torch.no_grad()
def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    batch_size: int,
    max_new_tokens: int,
) -> Iterator[str]:
    """Yield the decoded greedy continuation of each prompt, in order, without special tokens and surrounding
    whitespace. ``tokenizer.padding_side`` must be ``"left"``."""
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(list(prompts[start : start + batch_size]), return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        # ``generate`` returns prompt and response, so drop the columns of the prompt.
        for answer in tokenizer.batch_decode(
            output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        ):
            yield answer.strip()


def evaluate_checkpoint(
    model_dir: str | Path, problems_path: str | Path, batch_size: int = 64, max_new_tokens: int = 4
) -> float:
    """Return the fraction of a file's problems that a model answers exactly, ignoring surrounding whitespace.

    Raises:
        ModelError: ``model_dir`` contains no model.
        DataError: the problems cannot be read, or ``batch_size`` or ``max_new_tokens`` is not positive.
    """
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise DataError(f"{name} = {value}: must be at least 1. Fix: {name} >= 1")
    problems = read_problems(problems_path)
    model, tokenizer = _load(Path(model_dir))
    answers = greedy_answers(
        model, tokenizer, [problem.prompt for problem in problems], batch_size, max_new_tokens
    )
    correct = sum(answer == problem.answer.strip() for answer, problem in zip(answers, problems, strict=True))
    logger.info("%s: %d of %d problems answered exactly", model_dir, correct, len(problems))
    return correct / len(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0, or print the error and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.quickstart.material", description="Exact-match accuracy of a checkpoint."
    )
    parser.add_argument("model_dir", metavar="MODEL", help="folder with config.json, weights and tokenizer")
    parser.add_argument("problems_path", metavar="PROBLEMS", help="JSONL file of prompt and answer records")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=4)
    options = parser.parse_args(arguments)
    try:
        accuracy = evaluate_checkpoint(
            options.model_dir, options.problems_path, options.batch_size, options.max_new_tokens
        )
    except MegarlError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"accuracy {accuracy:.4f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())


# A prime, so that every tensor-parallel size above 1 has to pad the vocabulary.
VOCABULARY_SIZE = 379
PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
_SAMPLE_COUNT = 3000
_SAMPLE_SEED = 1


def _qwen2(
    vocabulary: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None
) -> Qwen2Tokenizer:
    """Return a tokenizer of the class that transformers loads from a Qwen2 directory. ``unk_token`` is set,
    because the class would otherwise add a token."""
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        unk_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte-level BPE tokenizer of the arithmetic task, with ``VOCABULARY_SIZE`` tokens;
    deterministic.

    Words of the problems and decimal digits are single tokens; other text falls back to bytes, so decoding
    restores any text in Unicode's NFC form. No special token is added to a text; padding is on the right.
    """
    return new_tokenizer(
        [problem.prompt + problem.answer for problem in generate_problems(_SAMPLE_COUNT, _SAMPLE_SEED)]
    )


def new_tokenizer(texts: Sequence[str], marks: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of ``VOCABULARY_SIZE`` tokens.

    Args:
        texts: training texts, whose words become tokens.
        marks: further texts that become one token each. They are not special tokens, so decoding shows them.
    """
    # Normalizer and pre-tokenizer must be those with which transformers will load the saved files.
    backend = _qwen2().backend_tokenizer
    trainer = trainers.BpeTrainer(
        # Leave room for the marks, which are added below.
        vocab_size=VOCABULARY_SIZE - len(marks),
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        # The alphabet comes in a random order, which would change the token ids.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # The merges are accessible only through JSON.
    model = json.loads(backend.to_str())["model"]
    tokenizer = _qwen2(model["vocab"], list(map(tuple, model["merges"])))
    tokenizer.add_tokens(list(marks))
    return tokenizer


_POSITIONS = 128  # About four times the longest prompt with its answer.


_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_5": ("qwen3_5_text", {"head_dim": 32, **_HYBRID}),
}
"""Family -> (``model_type``, config values specific to it). Qwen3.5 is a gated delta net followed by an
attention layer."""


def make_config(vocab_size: int, pad_token_id: int, eos_token_id: int, family: str = "qwen2") -> Any:
    """Return the config of a model with about 150,000 parameters. Heads and widths are even, for tensor
    parallelism; heads are 32 wide, because vLLM's CPU attention has no kernel for less.

    Args:
        vocab_size: number of rows of the embedding and the output layer.
        pad_token_id, eos_token_id: ids of the tokenizer.
        family: key of ``FAMILIES``.
    """
    model_type, own = FAMILIES[family]
    return AutoConfig.for_model(
        model_type,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False,
        # At this width the model learns several times faster than with the usual 0.02.
        initializer_range=0.1,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        dtype="float32",
        **own,
    )


def make_model(out_dir: str | Path, seed: int, family: str = "qwen2") -> Path:
    """Save a model, randomly initialized from ``seed``, and its tokenizer to ``out_dir`` as float32
    safetensors. The caller's random state is unchanged."""
    tokenizer = make_tokenizer()
    return save_new_model(out_dir, seed, tokenizer, family)


def save_new_model(out_dir: str | Path, seed: int, tokenizer: PreTrainedTokenizerBase, family: str) -> Path:
    """Save a model like ``make_model`` with another tokenizer."""
    config = make_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, family)
    # By default fork_rng saves the state of every GPU, which would initialize CUDA.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    target = Path(out_dir)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
