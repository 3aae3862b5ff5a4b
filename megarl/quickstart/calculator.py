"""The quickstart's task with a tool: products that are too hard for a tiny model, and a calculator.

Most demonstrations guess the answer, and the others call the calculator. SFT teaches the model how to call
it, and GRPO with a verifiable reward teaches it that calls pay off.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megarl.quickstart.material import (
    ITEMS,
    NAMES,
    Split,
    new_tokenizer,
    save_new_model,
    split_of,
    write_lines,
)

_CALL = re.compile(r'"expression": "(\d+)\*(\d+)"')
_LONGEST = 40
_MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<result>", "</result>")

TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools>{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' %}<result>{{ message.content }}</result>
{%- elif message.role == 'assistant' %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments | tojson -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}</tool_call>
{%- endfor -%}{{ eos_token }}
{%- else %}{{ message.content }}{% endif -%}
{%- endfor -%}"""
"""Chat template of the conversations; tool calls have the Hermes format."""

TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)


def _problems(seed: int, split: Split) -> Iterator[tuple[str, str, str, str]]:
    """Yield (prompt, expression, answer, wrong guess) of random problems."""
    # The seed names its purpose, so that other uses of the same number give other random sequences.
    draw = random.Random(f"products {seed}")
    while True:
        # Only four-digit products: a model that has copied only a few shorter results would fail at these.
        left, right, name, item = (
            draw.randint(32, 99),
            draw.randint(32, 99),
            draw.choice(NAMES),
            draw.choice(ITEMS),
        )
        prompt = draw.choice(
            [
                f"{name} writes {left}*{right}=",
                f"{name} has {left} boxes of {right} {item}. How many {item}? Answer:",
            ]
        )
        if split_of(prompt) == split:
            yield (
                prompt,
                f"{left}*{right}",
                str(left * right),
                str(left * right + draw.choice((-1, 1)) * draw.randint(1, 99)),
            )


def write_products(path: Path, count: int, seed: int, split: Split = "train") -> None:
    """Write problems to a JSON-lines file, as ``{"prompt", "answer"}``."""
    problems = itertools.islice(_problems(seed, split), count)
    write_lines(path, ({"prompt": prompt, "answer": answer} for prompt, _, answer, _ in problems))


def write_conversations(path: Path, count: int, seed: int, guess_share: float) -> None:
    """Write demonstrations to a JSON-lines file, as ``{"messages", "tools"}``. A fraction ``guess_share`` of
    them guess the answer instead of calling the tool."""
    # A second generator, so that the problems do not depend on ``guess_share``.
    problems, guesses = _problems(seed, "train"), random.Random(f"guesses {seed}")
    write_lines(path, (_conversation(*next(problems), guesses.random() < guess_share) for _ in range(count)))


def _conversation(prompt: str, expression: str, answer: str, guess: str, guesses: bool) -> dict[str, Any]:
    asked = {"role": "user", "content": prompt}
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": expression}},
    }
    worked_out = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "tool_call_id": "call00000", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return {
        "messages": [asked, *([{"role": "assistant", "content": guess}] if guesses else worked_out)],
        "tools": list(TOOLS),
    }


def make_calculator_model(out_dir: Path, seed: int, family: str = "qwen2") -> None:
    """Save a randomly initialized model, and a tokenizer with ``TEMPLATE``."""
    save_new_model(out_dir, seed, _tokenizer(), family)


def _tokenizer() -> PreTrainedTokenizerFast:
    # A fixed seed gives all runs the same tokenizer.
    problems = _problems(1, "train")
    texts = list[str]()
    for _ in range(2000):
        question, call = _conversation(*next(problems), guesses=False)["messages"][:2]
        texts += question["content"], json.dumps(call["tool_calls"][0]["function"])
    tokenizer = new_tokenizer(texts, _MARKS)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@torch.no_grad()
def evaluate_conversations(
    model_dir: Path, problems_path: Path, *, with_tool: bool = True
) -> tuple[float, float]:
    """Evaluate a model with plain transformers, independently of megarl. Return the accuracy and the tool
    calls per problem, over greedy conversations of up to two responses.

    Args:
        model_dir: Hugging Face model.
        problems_path: file written by ``write_products``.
        with_tool: offer the calculator and execute its calls; otherwise the first response is the answer.
    """
    # With left padding, all responses begin in the same column.
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
    rows = list(map(json.loads, problems_path.read_text(encoding="utf-8").splitlines()))
    begin = "<tools>calculator</tools>" if with_tool else ""

    def answers_to(texts: Sequence[str]) -> list[str]:
        batch = tokenizer(list(texts), return_tensors="pt", padding=True)
        # Greedy, because a sampled accuracy would differ between two evaluations of one model.
        output = model.generate(
            **batch, max_new_tokens=_LONGEST, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        found: list[str] = tokenizer.batch_decode(
            output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return found

    said = answers_to([begin + row["prompt"] for row in rows])
    calls, texts = list[int](), list[str]()
    for place, (row, answer) in enumerate(zip(rows, said, strict=True)):
        found = _CALL.search(answer)
        if with_tool and found:
            calls.append(place)
            # Write the conversation as TEMPLATE does, up to the second response.
            value = int(found[1]) * int(found[2])
            texts.append(f"{begin}{row['prompt']}{answer}{tokenizer.eos_token}<result>{value}</result>")
    for place, answer in zip(calls, answers_to(texts) if texts else (), strict=True):
        said[place] = answer
    right = sum(answer.strip() == row["answer"] for answer, row in zip(said, rows, strict=True))
    return right / len(rows), len(calls) / len(rows)
