"""Export of all weights of a mixture on Megatron as Hugging Face tensors, against one flat copy, with few and
with many experts of about the same total size.

Both refits and exports read these tensors: exports one by one, refits packed into a buffer. For comparison,
each parameter is also exported by itself: gathered from the ranks, then assembled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.point import Metric, Point
from megarl.parity.pool import WorkerPool

if TYPE_CHECKING:
    import torch

    from megarl.config.policy import PolicyConfig

LAYERS, HIDDEN = 8, 64
# These are experts per layer. Their number times their width is always about the same.
EXPERTS = (12, 125)
WIDTHS = 10_920
REPEATS, QUICK_REPEATS = 3, 2
# A refit may take this much where its memory is measured.
BUFFER_GIB = 0.0625
# These are tensor-parallel sizes, for experts too.
RANKS = (1, 2)


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each tensor-parallel size and number of experts per layer."""
    pool = WorkerPool()
    try:
        with tempfile.TemporaryDirectory() as directory:
            models = {count: _save_mixture(Path(directory) / str(count), count) for count in EXPERTS}
            for ranks in RANKS:
                for experts, model in models.items():
                    seconds, tensors, nbytes = pool.run(
                        ranks, _timed, _config(model, ranks), QUICK_REPEATS if quick else REPEATS
                    )[0]
                    memory = max(
                        pool.run(ranks, _memory, _config(model, ranks) | {"refit_buffer_size_gb": BUFFER_GIB})
                    )
                    parameters = {
                        "tensor_parallel": ranks,
                        "experts": experts,
                        "tensors": tensors,
                        "mebibytes": nbytes >> 20,
                    }
                    yield Point(parameters, _metrics(seconds, ranks, tensors, nbytes, memory))
    finally:
        pool.close()


def _save_mixture(directory: Path, experts: int) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        # Make the width even, because two tensor-parallel ranks shard it.
        moe_intermediate_size=2 * round(WIDTHS / experts / 2),
        num_experts=experts,
        num_experts_per_tok=2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def _config(model: Path, ranks: int) -> PolicyConfig:
    from benchmarks import tiny

    cut = {"expert_tensor_parallel_size": ranks, "sequence_parallel": ranks > 1}
    return tiny.policy_config(model, micro_batch=1, tensor_parallel=ranks, megatron_cfg=cut)


def _metrics(
    seconds: Mapping[str, Sequence[float]], ranks: int, tensors: int, nbytes: int, memory: float
) -> dict[str, Metric]:
    metrics = {
        "speed": Metric.of("GB/s", [nbytes / 1e9 / one for one in seconds["stream"]]),
        "against_each": Metric.ratio(
            "the speed of every parameter for itself", seconds["each"], seconds["stream"]
        ),
        "memory": Metric.of("MiB above the model, the rank that takes most", [memory]),
        "configured": Metric.of("MiB that a refit may take", [BUFFER_GIB * 1024]),
    }
    # With several ranks there is no such ratio, because sending between ranks is not a copy within memory.
    for way, name in (("stream", ""), ("laid", "laid_")) if ranks == 1 else ():
        beyond = [
            1e6 * (one - flat) / tensors for one, flat in zip(seconds[way], seconds["flat"], strict=True)
        ]
        metrics[f"{name}against_flat"] = Metric.ratio(
            "the speed of all bytes as one piece", seconds["flat"], seconds[way]
        )
        metrics[f"{name}beyond_flat"] = Metric.of("us a tensor", beyond)
    return metrics


def _timed(config: PolicyConfig, repeats: int) -> tuple[Mapping[str, list[float]], int, int]:
    """Return, on every rank, the seconds of every kind of export, the number of tensors and their bytes."""
    import torch

    from benchmarks import tiny
    from benchmarks.memory import use_pages
    from benchmarks.timing import in_turn
    from megarl.weight_sync.manifest import Manifest, pack

    use_pages()
    worker = tiny.worker_of(config)
    backend = worker.backend
    exported = dict(backend.export_hf())
    one_by_one = dict(_each(backend))
    same = exported.keys() == one_by_one.keys() and all(
        torch.equal(exported[name], tensor) for name, tensor in one_by_one.items()
    )
    assert same, "the two ways give other weights"
    one_by_one.clear()
    manifest = Manifest.of(exported.items())
    group = manifest.group(0, len(exported))
    buffer = torch.zeros(group.nbytes, dtype=torch.uint8)
    pack(backend.export_hf(), manifest, group, buffer)
    same = all(torch.equal(exported[name], tensor) for name, tensor in group.views(buffer))
    assert same, "other weights are laid down"
    flat = torch.cat([tensor.flatten() for tensor in exported.values()])
    target, count = torch.empty_like(flat), len(exported)
    exported.clear()
    actions = {
        "flat": lambda: target.copy_(flat),
        "stream": lambda: sum(1 for _ in backend.export_hf()),
        "laid": lambda: pack(backend.export_hf(), manifest, group, buffer),
        "each": lambda: sum(1 for _ in _each(backend)),
    }
    seconds = in_turn(actions, repeats=repeats, collect=True)
    worker.shutdown()
    return seconds, count, flat.nbytes


def _memory(config: PolicyConfig) -> float:
    """Return the memory that a policy's first refit takes above the model, in MiB: buffers, gathered tensors
    and lists."""
    from benchmarks import tiny
    from benchmarks.memory import peak_of
    from megarl.weight_sync.manifest import Manifest

    worker = tiny.worker_of(config)
    manifest = Manifest.from_description(worker.prepare_refit_info())

    def refit() -> None:
        for group in manifest.groups(worker.begin_refit()):
            worker.get_part_ipc_handles(group.first, group.count)

    taken = peak_of(refit)
    worker.shutdown()
    return taken


def _each(backend: Any) -> Iterator[tuple[str, torch.Tensor]]:
    import torch
    import torch.distributed as dist

    from converters.mapping.rules import rule_for
    from converters.mapping.shards import to_hf

    group = backend.groups.tensor
    for name, parameter in backend.parameters():
        shards = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, parameter.detach(), group=group)
        yield from to_hf(rule_for(name, backend.architecture), shards, backend.architecture)
