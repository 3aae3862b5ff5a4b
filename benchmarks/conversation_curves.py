"""Run the quickstart, then train its task as conversations that a user-defined function rewards.

The command is ``python -m benchmarks.conversation_curves``. For each seed the quickstart runs unchanged. Then
both of its parts run again on the same problems as ``messages``, with ``right`` instead of ``exact_match``.
Messages are either concatenated unchanged, which gives the same tokens, or formatted by a chat template that
names the speakers, which gives other tokens. Plain transformers evaluates all exported models. Finished runs
in ``--work`` are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.curves import ACCURACY, exported, rows_of

SPEAKERS = (
    "{% for message in messages %}{% if message['role'] == 'user' %}user: {{ message['content'] }}\n"
    "{% else %}assistant: {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {"messages": None, "messages, speakers named": SPEAKERS}


def right(prompt: str, response: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward: 1 if the response equals the record's answer, ignoring surrounding whitespace,
    otherwise 0."""
    found = float(response.strip() == record["answer"])
    return {"score": found, "acc": found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and write the figures to ``--out``. Return 0, or the quickstart's exit code if it
    failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conversation_curves", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="both ways for each seed (default 1 2 3)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/conversations"),
        help="directory of the runs (default runs/conversations)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/conversations.json"), help="the figures"
    )
    chosen = parser.parse_args(arguments)
    from megarl.quickstart.__main__ import main as quickstart
    from megarl.run.start import start_ray

    with ExitStack() as stack:
        start_ray(stack)
        # Describe the environment before the runs, which would otherwise be the load that it reports.
        around = {"commit": environment.commit(), "environment": environment.describe()}
        missing = [
            seed
            for seed in chosen.seeds
            if not (chosen.work / "quickstart" / f"seed-{seed}" / "summary.json").exists()
        ]
        code = (
            quickstart(["--out", str(chosen.work / "quickstart"), "--seeds", *map(str, missing)])
            if missing
            else 0
        )
        if code:
            return code
        ways: dict[str, dict[int, dict[str, Any]]] = {"quickstart": {}, **{way: {} for way in TEMPLATES}}
        for seed in chosen.seeds:
            plain = chosen.work / "quickstart" / f"seed-{seed}"
            ways["quickstart"][seed] = _figures(
                plain / "grpo", json.loads((plain / "summary.json").read_text())["accuracy_transformers"]
            )
            for way, template in TEMPLATES.items():
                name = "joined" if template is None else "messages"
                ways[way][seed] = _as_conversations(seed, plain, chosen.work / f"{name}-{seed}", template)
        weights = [
            _weights(chosen.work / "quickstart" / f"seed-{seed}") == _weights(chosen.work / f"joined-{seed}")
            for seed in chosen.seeds
        ]
    after = {
        way: statistics.mean(each["accuracy"][-1] for each in of_way.values()) for way, of_way in ways.items()
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        **around,
        "mean_accuracy_after": after,
        "messages_end_with_the_weights_of_the_quickstart": weights,
        "runs": ways,
    }
    chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    json.dump(after, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


def _weights(run_dir: Path) -> bytes:
    return (exported(run_dir / "grpo") / "model.safetensors").read_bytes()


def _as_conversations(seed: int, plain: Path, work: Path, template: str | None) -> dict[str, Any]:
    """Return the figures of both parts of the quickstart, run as conversations on the problems and the model
    that the quickstart made for a seed."""
    from megarl.config import load_config
    from megarl.quickstart.__main__ import CONFIGS
    from megarl.quickstart.material import evaluate_checkpoint
    from megarl.run.run import run

    work.mkdir(parents=True, exist_ok=True)
    sources = {
        name: _source(plain / "data" / f"{name}.jsonl", work)
        for name in ("demonstrations", "train", "validation")
    }
    common = [f"seed={seed}"]
    # The words that name the speakers make prompts longer.
    if template is not None:
        common += [
            f"policy.tokenizer.chat_template={json.dumps(template)}",
            "policy.max_total_sequence_length=64",
        ]
        common.append("data.max_input_seq_length=56")
    sft = [
        f"run_dir={work / 'sft'}",
        f"policy.model_name={plain / 'model'}",
        f"data.train={sources['demonstrations']}",
    ]
    run(load_config(CONFIGS / "sft.yaml", [*common, *sft]))
    data = [f"data.{key}={sources[key]}" for key in ("train", "validation")]
    taught = exported(work / "sft")
    grpo = [
        f"run_dir={work / 'grpo'}",
        f"policy.model_name={taught}",
        *data,
        f"env.reward={Path(__file__).resolve()}:right",
    ]
    run(load_config(CONFIGS / "grpo.yaml", [*common, *grpo]))
    rendered = work / "rendered.jsonl"
    rows = [json.loads(line) for line in (plain / "data" / "validation.jsonl").read_text().splitlines()]
    # Write the prompts as the chat template renders them, because the rows are evaluated as plain text.
    if template is not None:
        rows = [{**row, "prompt": f"user: {row['prompt']}\nassistant: "} for row in rows]
    rendered.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return _figures(work / "grpo", evaluate_checkpoint(exported(work / "grpo"), rendered, max_new_tokens=3))


def _source(problems: Path, work: Path) -> str:
    """Convert the problems of a file to conversations of one question and its answer, and return the data
    source as an override."""
    path = work / problems.name
    with problems.open() as lines, path.open("w") as out:
        for row in map(json.loads, lines):
            turns = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
            out.write(json.dumps({"messages": turns}) + "\n")
    return json.dumps([{"path": str(path), "messages_key": "messages"}])


def _figures(run_dir: Path, by_transformers: float) -> dict[str, Any]:
    """Return the greedy accuracy of a run at every validation, and that of its export under plain
    transformers."""
    return {
        "accuracy": [row[ACCURACY] for row in rows_of(run_dir) if row.get(ACCURACY) is not None],
        "transformers": by_transformers,
    }


if __name__ == "__main__":
    sys.exit(main())
