"""Exact-match accuracy of a saved checkpoint, by plain transformers: an independent check of what training exported.

Command line: ``python -m megarl.quickstart.evaluate MODEL_DIR PROBLEMS_JSONL`` prints the accuracy.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from megarl.errors import DataError, MegarlError, ModelError
from megarl.quickstart.problems import read_problems

logger = logging.getLogger(__name__)


def _load(model_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (model_dir / "config.json").is_file():
        raise ModelError(f"model directory {str(model_dir)!r} holds no config.json. Fix: give the folder of an exported checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    return model.eval(), tokenizer


@torch.no_grad()
def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int, max_new_tokens: int
) -> Iterator[str]:
    """The decoded greedy continuation of each prompt, in order, without special tokens and surrounding blanks.

    Prompts are padded on the left, so ``tokenizer.padding_side`` must be ``"left"``.
    """
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
        for answer in tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True):
            yield answer.strip()


def evaluate_checkpoint(model_dir: str | Path, problems_path: str | Path, batch_size: int = 64, max_new_tokens: int = 4) -> float:
    """The share, between 0 and 1, of the file's problems that the checkpoint answers exactly (up to surrounding blanks).

    Raises:
        ModelError: ``model_dir`` holds no model.
        DataError: the problems cannot be read, or ``batch_size`` or ``max_new_tokens`` is not positive.
    """
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise DataError(f"{name} = {value}: must be at least 1. Fix: {name} >= 1")
    problems = read_problems(problems_path)
    model, tokenizer = _load(Path(model_dir))
    answers = greedy_answers(model, tokenizer, [problem.prompt for problem in problems], batch_size, max_new_tokens)
    correct = sum(answer == problem.answer.strip() for answer, problem in zip(answers, problems, strict=True))
    logger.info("%s: %d of %d problems answered exactly", model_dir, correct, len(problems))
    return correct / len(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code (0, or the error's own code with the reason on standard error)."""
    parser = argparse.ArgumentParser(prog="python -m megarl.quickstart.evaluate", description="Exact-match accuracy of a checkpoint.")
    parser.add_argument("model_dir", metavar="MODEL", help="folder with config.json, weights and tokenizer")
    parser.add_argument("problems_path", metavar="PROBLEMS", help="JSONL file of prompt and answer records")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=4)
    options = parser.parse_args(arguments)
    try:
        accuracy = evaluate_checkpoint(options.model_dir, options.problems_path, options.batch_size, options.max_new_tokens)
    except MegarlError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"accuracy {accuracy:.4f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
