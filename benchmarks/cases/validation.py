"""A validation of 150 prompts, or of as many as were asked for, with 8 sampled answers each by a worker: in one call against calls of 32
prompts, the answers compared.

The worker decodes 256 rows at a time either way. Wall seconds and CPU seconds of each way in turn, the memory that it needs beyond what was
resident, and the seconds of the figures. One thread.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import Options
from benchmarks.point import Metric, Point
from megarl.parity.pool import WorkerPool

VOCABULARY, NEW_TOKENS, LONGEST, TOGETHER, AT_ONCE, REPEATS = 379, 16, 80, 32, 256, 3
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2}
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": None}


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Numbers of prompts x backends."""
    from benchmarks import tiny

    answers = 4 if quick else 8
    generation = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "stop_token_ids": list(range(40)), "pad_token_id": 0}
    changes = {"max_total_sequence_length": LONGEST, "generation_batch_size": AT_ONCE, "generation": generation}
    with tempfile.TemporaryDirectory() as directory, WorkerPool() as pool:
        model = tiny.save_model(Path(directory) / "model", LONGEST, num_attention_heads=4, num_key_value_heads=2, **SIZES)
        for prompts, backend in itertools.product(options.rows or (80 if quick else 150,), ("megatron", "dtensor")):
            config = tiny.policy_config(model, micro_batch=tiny.ROWS, backend=backend, **changes)
            [measured] = pool.run(1, _compare, config, prompts, answers, REPEATS)
            # other rows beside it round a row otherwise, and a token on the edge of what is kept or drawn is another one then
            assert measured["equal"] >= 0.99 * prompts * answers, f"only {measured['equal']} of {prompts * answers} answers are the same"
            yield Point({"backend": backend, "prompts": prompts, "answers": answers, "new_tokens": NEW_TOKENS}, _metrics(measured))


def _metrics(measured: Mapping[str, Any]) -> dict[str, Metric]:
    return {
        "one_call": Metric.ratio(f"calls of {TOGETHER} prompts", measured["one"], measured["several"]),
        "one_call_cpu": Metric.ratio(f"CPU seconds of calls of {TOGETHER} prompts", measured["one_cpu"], measured["several_cpu"]),
        "one_call_seconds": Metric.of("s", measured["one"]),
        "one_call_memory": Metric.of("MiB", [measured["one_memory"]]),
        "several_calls_memory": Metric.of("MiB", [measured["several_memory"]]),
        "figures": Metric.of("s", measured["figures"]),
        "equal_answers": Metric.of("share", [measured["equal"] / measured["rows"]]),
    }


def _compare(config: Mapping[str, Any], prompts: int, answers: int, repeats: int) -> dict[str, Any]:
    """Seconds and memory of both ways, how many answers are equal, and seconds of the figures."""
    import time

    from benchmarks import tiny
    from benchmarks.memory import peak_of
    from benchmarks.timing import collector_off
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.distributed.token_batches import pad_rows
    from megarl.rollout.evaluation import estimates_of
    from megarl.rollout.samples import validation_seeds

    torch.set_num_threads(1)
    worker = tiny.worker_of(config)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, LONGEST - NEW_TOKENS, (prompts,), generator=generator).tolist()
    ids, sizes = pad_rows([torch.randint(40, VOCABULARY, (length,), generator=generator).tolist() for length in lengths], 0)
    seeds = torch.tensor(validation_seeds("set", prompts, answers))
    rows: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": ids.repeat_interleave(answers, 0), "input_lengths": sizes.repeat_interleave(answers), "sampling_seeds": seeds}
    )
    worker.prepare_for_generation()

    def answered(size: int) -> list[list[int]]:
        found: list[list[int]] = []
        for start in range(0, prompts * answers, size * answers):
            output = worker.generate(
                data=rows.slice(start, min(start + size * answers, prompts * answers)), greedy=False, sampling=SAMPLING
            )
            totals = output["unpadded_sequence_lengths"].tolist()
            found += [row[:total] for row, total in zip(output["output_ids"].tolist(), totals, strict=True)]
        return found

    sides = {"one": prompts, "several": TOGETHER}
    measured: dict[str, Any] = {f"{side}{kind}": [] for side in sides for kind in ("", "_cpu")} | {"figures": []}
    texts: dict[str, list[list[int]]] = {}
    with collector_off():
        for turn in range(repeats + 1):
            for side, size in sides.items():
                wall, cpu = time.perf_counter(), time.process_time()
                texts[side] = answered(size)
                if turn:
                    measured[side].append(time.perf_counter() - wall)
                    measured[f"{side}_cpu"].append(time.process_time() - cpu)
    measured |= {f"{side}_memory": peak_of(lambda size=size: answered(size)) for side, size in sides.items()}  # type: ignore[misc]
    last = [row[-1] for row in texts["one"]]
    for _ in range(repeats):
        wall = time.perf_counter()
        estimates_of([float(token % 3 == 0) for token in last], answers, [str(token) for token in last])
        measured["figures"].append(time.perf_counter() - wall)
    worker.backend.close()
    return {**measured, "rows": len(last), "equal": sum(one == other for one, other in zip(texts["one"], texts["several"], strict=True))}
