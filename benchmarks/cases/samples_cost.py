"""What the samples of a step cost it: CPU seconds that it spends until they are handed over, and those of all until they are on disk.

Steps of GRPO as a run makes them, with the worker in this process and one thread: half a million weights, so that a step is as cheap as one
is. What a sample costs does not depend on the model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.point import Metric, Point

if TYPE_CHECKING:
    from benchmarks.grpo_sides import Task

PROMPTS, ANSWERS, NEW_TOKENS, LONGEST = 32, 8, 8, 64
KEPT = {"32, the default": {}, "all": {"num_train_samples": None}}
WARM_UP = 2


def measure(quick: bool) -> Iterator[Point]:
    """Samples that are kept of a step's."""
    from benchmarks import tiny
    from benchmarks.grpo_sides import Task, prompts_of
    from benchmarks.ranks import Ranks
    from benchmarks.subject import NARROW, Work, policy_of
    from megarl.quickstart.material import make_tokenizer, write_problems

    generation = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": None, "stop_token_ids": [], "pad_token_id": 0}
    with tempfile.TemporaryDirectory() as temporary, Ranks() as ranks:
        root, tokenizer = Path(temporary), make_tokenizer()
        model = tiny.save_model(root / "model", LONGEST, **{**NARROW, "vocab_size": len(tokenizer)})
        tokenizer.save_pretrained(model)
        task = Task(model, prompts_of(write_problems(root / "problems.jsonl", PROMPTS, 1), PROMPTS), ANSWERS, NEW_TOKENS)
        config = policy_of(
            model, "megatron", Work(task.rows, LONGEST), generation=generation, generation_batch_size=task.rows, max_grad_norm=1.0
        )
        [measured] = ranks.run(1, _steps, config, task, root, 3 if quick else 10)
    for kept, spent in measured["kept"].items():
        yield Point({"samples": task.rows, "kept": kept}, _metrics(spent, measured["step"]))


def _metrics(spent: Mapping[str, Any], step: list[float]) -> dict[str, Metric]:
    return {
        "handed_over": Metric.ratio("the step without them, in CPU seconds", spent["handed_over"], step),
        "on_disk": Metric.ratio("the step without them, in CPU seconds of all threads", spent["on_disk"], step),
        "handed_over_milliseconds": Metric.of("CPU ms", [1e3 * seconds for seconds in spent["handed_over"]]),
        "on_disk_milliseconds": Metric.of("CPU ms", [1e3 * seconds for seconds in spent["on_disk"]]),
        "step_cpu_seconds": Metric.of("CPU s", step),
        "kilobytes": Metric.of("kB a step", [spent["bytes"] / 1e3]),
    }


def _steps(config: Mapping[str, Any], task: Task, root: Path, repeats: int) -> dict[str, Any]:
    """CPU seconds of steps, and of the samples of each, kept in each way in turn."""
    import gc

    from benchmarks.grpo_sides import Ours
    from benchmarks.timing import collector_off
    from megarl.config.sections import SamplesConfig
    from megarl.key import defaults_of
    from megarl.observe.sample_files import TRAIN, SampleFiles, list_samples, read_samples
    from megarl.rollout.sample_log import SampleLog

    ours = Ours(config, task)
    spent: dict[str, dict[str, Any]] = {kept: {"handed_over": [], "on_disk": []} for kept in KEPT}
    logs = {
        kept: SampleLog(SampleFiles(root / str(place)), {**defaults_of(SamplesConfig), **keys}, ours.collector.tokenizer)
        for place, (kept, keys) in enumerate(KEPT.items())
    }
    with collector_off():
        for turn in range(WARM_UP + repeats):
            batch, _ = ours.step(turn >= WARM_UP)
            assert ours.rollouts is not None
            for kept, log in logs.items():
                here, all_threads = time.thread_time(), time.process_time()
                log.train(turn + 1, ours.rollouts, batch["advantages"][:, 0], batch["prev_logprobs"])
                handed_over = time.thread_time() - here
                log.files.flush()
                if turn >= WARM_UP:
                    spent[kept]["handed_over"].append(handed_over)
                    spent[kept]["on_disk"].append(time.process_time() - all_threads)
            gc.collect()
    for place, (kept, log) in enumerate(logs.items()):
        log.files.close()
        step, path = list_samples(root / str(place), TRAIN)[-1]
        found = len(read_samples(path))
        wanted = log.section["num_train_samples"] or task.rows
        assert (step, found) == (WARM_UP + repeats, wanted), f"{path} has {found} samples, {wanted} were to be kept"
        spent[kept]["bytes"] = path.stat().st_size
    ours.worker.backend.close()
    return {"kept": spent, "step": ours.phases.spent["step"].cpu}
