"""Greedy generation by a worker against ``generate`` of transformers: same weights, same prompts, responses
compared.

Prompts have equal or ragged lengths, and 8 new tokens are generated, on one thread. Wall seconds and CPU
seconds of the process are measured for both sides, alternately.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.point import Metric, Point
from megarl.parity.pool import WorkerPool

if TYPE_CHECKING:
    from megarl.config.policy import PolicyConfig

VOCABULARY, NEW_TOKENS, LONGEST = 379, 8, 80
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPTS = {
    "14": (14, 14, 1),
    "7 to 19": (7, 19, 1),
    "8 to 64": (8, 64, 1),
    "8 to 64, 8 answers each": (8, 64, 8),
}
"""Shortest and longest prompt, in tokens, and rows per prompt."""


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each backend and kind of prompt lengths."""
    from benchmarks import tiny

    rows, repeats = (64, 3) if quick else (256, 4)
    with tempfile.TemporaryDirectory() as directory, WorkerPool() as pool:
        model = tiny.save_model(Path(directory) / "model", LONGEST, **SIZES)
        for backend in ("megatron", "dtensor", "fsdp1"):
            for lengths, sizes in PROMPTS.items():
                [measured] = pool.run(
                    1, _compare, _config(model, backend, rows), _prompts(rows, *sizes), repeats
                )
                yield Point(
                    {"backend": backend, "rows": rows, "prompts": lengths, "new_tokens": NEW_TOKENS},
                    _metrics(measured, rows),
                )


def _config(model: Path, backend: str, rows: int) -> dict[str, Any]:
    from benchmarks import tiny

    generation = {**tiny.SAMPLED, "max_new_tokens": NEW_TOKENS}
    changes = {"max_total_sequence_length": LONGEST, "generation_batch_size": rows, "generation": generation}
    return tiny.policy_config(model, micro_batch=tiny.ROWS, backend=backend, **changes)


def _prompts(rows: int, shortest: int, longest: int, alike: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(longest)
    lengths = torch.randint(shortest, longest + 1, (rows // alike,), generator=generator).tolist()
    # Always include both ends of the range.
    lengths[:2] = [shortest, longest]
    different = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [prompt for prompt in different for _ in range(alike)]


def _metrics(measured: Mapping[str, Any], rows: int) -> dict[str, Metric]:
    # Greedy responses diverge where two logits differ only by rounding, so some may differ.
    assert measured["equal"] >= 0.99 * rows, (
        f"only {measured['equal']} of {rows} answers are those of transformers"
    )
    seconds = {key: measured[key] for key in ("worker", "worker_cpu", "transformers", "transformers_cpu")}
    return {
        "generation": Metric.ratio("generate of transformers", seconds["worker"], seconds["transformers"]),
        "generation_cpu": Metric.ratio(
            "CPU seconds of generate of transformers", seconds["worker_cpu"], seconds["transformers_cpu"]
        ),
        "tokens_per_second": Metric.of("1/s", [rows * NEW_TOKENS / value for value in seconds["worker"]]),
        "transformers_seconds": Metric.of("s", seconds["transformers"]),
        "equal_answers": Metric.of("share", [measured["equal"] / rows]),
    }


def _compare(config: PolicyConfig, prompts: Sequence[Sequence[int]], repeats: int) -> dict[str, Any]:
    """Return the seconds of both sides, and how many of their responses are equal."""
    import time

    from transformers import AutoModelForCausalLM

    from benchmarks import tiny
    from benchmarks.timing import collector_off
    from megarl.distributed.batched_data_dict import BatchedDataDict

    torch.set_num_threads(1)
    worker = tiny.worker_of(config)
    model = AutoModelForCausalLM.from_pretrained(config["model_name"], dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    right, left, mask = (torch.zeros(len(prompts), longest, dtype=torch.int64) for _ in range(3))
    for row, prompt in enumerate(prompts):
        # The worker takes prompts padded on the right, and transformers takes them padded on the left.
        right[row, : len(prompt)] = left[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": right, "input_lengths": mask.sum(1)})
    worker.prepare_for_generation()

    def ours() -> list[list[int]]:
        found = worker.generate(data=data, greedy=True)
        return [
            ids[len(prompt) : len(prompt) + NEW_TOKENS]
            for ids, prompt in zip(found["output_ids"].tolist(), prompts, strict=True)
        ]

    @torch.no_grad()
    def theirs() -> list[list[int]]:
        # Both sides generate the same number of tokens, whatever these tokens are.
        options = {
            "max_new_tokens": NEW_TOKENS,
            "min_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "eos_token_id": None,
        }
        return model.generate(left, attention_mask=mask, **options)[:, longest:].tolist()

    sides: dict[str, Callable[[], list[list[int]]]] = {"worker": ours, "transformers": theirs}
    measured: dict[str, Any] = {f"{side}{kind}": [] for side in sides for kind in ("", "_cpu")}
    answers: dict[str, list[list[int]]] = {}
    with collector_off():
        for turn in range(repeats + 1):
            for side, run in sides.items():
                wall, cpu = time.perf_counter(), time.process_time()
                answers[side] = run()
                if turn:
                    measured[side].append(time.perf_counter() - wall)
                    measured[f"{side}_cpu"].append(time.process_time() - cpu)
    worker.backend.close()
    pairs = zip(answers["worker"], answers["transformers"], strict=True)
    return {**measured, "equal": sum(one == other for one, other in pairs)}
