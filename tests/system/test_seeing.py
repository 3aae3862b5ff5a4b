"""A whole run on a published model that also sees: what it leaves is that model, with another text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from megarl.quickstart.material import make_tokenizer, write_problems
from tests.seeing import FILES, make_seeing
from tests.system.whole_runs import LONGEST_WAIT_S, ROOT
from tests.tiers import slow


@slow
def test_a_run_leaves_the_model_with_another_text(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", make_tokenizer()
    # ids behind those of the tokenizer stand for pictures
    words = len(tokenizer)
    make_seeing(model, "qwen3_5", tied=False, vocab_size=words + 4, tokens=range(words, words + 4))
    tokenizer.save_pretrained(model)
    problems = write_problems(tmp_path / "problems.jsonl", 300, 5)
    changes = [
        "sft.max_num_steps=2",
        "checkpointing.save_period=2",
        f"run_dir={tmp_path / 'run'}",
        "data.max_input_seq_length=24",
    ]
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        "quickstart/sft",
        f"policy.model_name={model}",
        f"data.train.path={problems}",
    ]
    done = subprocess.run(
        [*command, *changes], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert (
        said.count(
            "not trained, and exported as it was: vision tower (33 tensors) and prediction layer (15 tensors)"
        )
        == 1
    )
    left = tmp_path / "run" / "hf" / "step_2"
    assert all((left / name).read_bytes() == (model / name).read_bytes() for name in FILES)
    after, report = AutoModelForImageTextToText.from_pretrained(left, output_loading_info=True)
    assert not any(report.values())
    before = AutoModelForImageTextToText.from_pretrained(model)
    assert equal(after.model.visual, before.model.visual) and not equal(
        after.model.language_model, before.model.language_model
    )


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
