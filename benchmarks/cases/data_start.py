"""Cost of a start that reads a supervised set of 50,000 rows, or of the requested number of rows. The first
start tokenizes the rows; the second one reads what the first has stored. Both are compared with reading the
same file and tokenizing the same texts, without storing anything.

Each start runs in its own process. Its memory is its peak beyond the resident memory at its beginning,
including the pages of mapped files. For the second start it is also measured after 100 batches of 512 rows in
shuffled order. The case fails if the second start has other rows than the first.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import Options
from benchmarks.point import Metric, Point

ROWS, QUICK_ROWS = (50_000,), (3_000, 12_000)
_CHUNK = 1024
_BATCH, _BATCHES = 512, 100
_WORDS = (
    "the",
    "sum",
    "of",
    "two",
    "numbers",
    "is",
    "what",
    "follows",
    "after",
    "other",
    "steps",
    "along",
    "a",
    "line",
)


@dataclass(frozen=True, slots=True)
class Start:
    """Cost of one start.

    Attributes:
        wall, cpu: wall and CPU seconds, of all threads.
        memory: peak memory in MiB beyond that at the beginning.
        drawn: the same after batches were read; 0 if none were.
        batch: seconds to read the rows of a batch.
        digest: digest of the rows that were read.
        tokens: tokens of all rows.
    """

    wall: float
    cpu: float
    memory: float
    drawn: float = 0.0
    batch: float = 0.0
    digest: str = ""
    tokens: int = 0


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Yield one point for each number of rows."""
    from megarl.quickstart.material import make_model

    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make_model(work / "model", 1)
        for rows in options.rows or (QUICK_ROWS if quick else ROWS):
            file = _write(work / "rows.jsonl", rows)
            # Force the cache to disk: the few rows of a quick run would stay in memory, and the second start
            # would not find them.
            most = 2**14 if quick else None
            limit = _apart(_tokenize_only, file, work / "model")
            first, second = (
                _apart(_start, file, work / "model", work / f"cache-{rows}", most) for _ in range(2)
            )
            if (first.digest, first.tokens) != (second.digest, second.tokens):
                raise AssertionError(f"{rows} rows: the second start has {second}, the first had {first}")
            yield Point(
                {"rows": rows, "tokens": first.tokens, "file_mib": round(file.stat().st_size / 2**20)},
                _metrics(limit, first, second),
            )


def _metrics(limit: Start, first: Start, second: Start) -> dict[str, Metric]:
    what = "reading and tokenizing alone"
    return {
        "first_start_cpu": Metric.ratio(f"CPU seconds of {what}", [first.cpu], [limit.cpu]),
        "second_start_cpu": Metric.ratio(f"CPU seconds of {what}", [second.cpu], [limit.cpu]),
        "first_start": Metric.ratio(what, [first.wall], [limit.wall]),
        "second_start": Metric.ratio(what, [second.wall], [limit.wall]),
        "first_start_seconds": Metric.of("s", [first.wall]),
        "second_start_seconds": Metric.of("s", [second.wall]),
        "against_seconds": Metric.of(f"s of {what}", [limit.wall]),
        "first_start_memory": Metric.of("MiB", [first.memory]),
        "second_start_memory": Metric.of("MiB", [second.memory]),
        "memory_after_batches": Metric.of("MiB", [second.drawn]),
        "batch_seconds": Metric.of(f"s for {_BATCH} rows", [second.batch]),
    }


def _write(path: Path, rows: int) -> Path:
    draw = random.Random(rows)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            prompt, answer = (" ".join(draw.choices(_WORDS, k=draw.randint(3, most))) for most in (14, 8))
            file.write(json.dumps({"question": {"text": f"{number} {prompt}"}, "answer": answer}) + "\n")
    return path


def _apart(action: Any, *arguments: Any) -> Start:
    # Use spawn, because a forked process would have the imports and the memory of this one.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(action, arguments)


def _source(file: Path) -> dict[str, Any]:
    return {"path": str(file), "prompt_key": "question.text", "answer_key": "answer"}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _tokenize_only(file: Path, model: Path) -> Start:
    from benchmarks.memory import peak_of
    from megarl.data.tokenization import get_tokenizer

    tokenizer = get_tokenizer({"name": str(model)})

    def action() -> None:
        with file.open(encoding="utf-8") as lines:
            texts: list[str] = []
            for line in lines:
                row = json.loads(line)
                texts += [row["question"]["text"], row["answer"]]
                if len(texts) == 2 * _CHUNK:
                    tokenizer(texts, add_special_tokens=False)
                    texts.clear()
            if texts:
                tokenizer(texts, add_special_tokens=False)

    begun, used = time.monotonic(), _cpu()
    memory = peak_of(action)
    return Start(time.monotonic() - begun, _cpu() - used, memory)


def _start(file: Path, model: Path, cache: Path, most_in_memory: int | None) -> Start:
    from benchmarks.memory import peak_of
    from megarl.data import datasets
    from megarl.data.sampler import ResumableSampler
    from megarl.data.tokenization import get_tokenizer

    if most_in_memory is not None:
        datasets._MOST_IN_MEMORY = most_in_memory  # type: ignore[misc]
    tokenizer = get_tokenizer({"name": str(model)})
    config: Any = {"max_input_seq_length": 512, "cache_dir": str(cache), "train": _source(file)}
    found: list[Any] = []
    digest = hashlib.blake2b(digest_size=16)

    def load() -> None:
        dataset = datasets.load_dataset(config["train"], datasets.Reading(config, tokenizer, True))
        found.extend([dataset, ResumableSampler(len(dataset), 1, True, dataset.fingerprint)])

    begun, used = time.monotonic(), _cpu()
    memory = peak_of(load)
    wall, cpu = time.monotonic() - begun, _cpu() - used
    dataset, sampler = found

    def draw() -> None:
        for _ in range(_BATCHES):
            digest.update(repr(dataset.select(sampler.take(_BATCH))).encode())

    begun = time.monotonic()
    drawn = peak_of(draw)
    batch = (time.monotonic() - begun) / _BATCHES
    tokens = int(dataset.examples.lengths(with_answers=True).sum())
    return Start(wall, cpu, memory, memory + drawn, batch, digest.hexdigest() + dataset.fingerprint, tokens)
