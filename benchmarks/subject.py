"""Subjects of measurement: a model with random weights, a batch for it, and the policy configuration that
trains it in a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import tiny
from benchmarks.options import ONE_RANK, Layout, Options

# The model has only half a million weights, so that the cost per token decides, not the cost per weight.
NARROW = {
    "vocab_size": 379,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step.

    Attributes:
        rows: number of sequences.
        length: tokens of the longest sequence.
        micro_batches: micro-batches of each data-parallel rank.
    """

    rows: int
    length: int
    micro_batches: int = 1


def model_of(options: Options, directory: Path, longest: int, **sizes: int) -> Path:
    """Save the chosen model with random weights, or by default a Qwen2 of these sizes, and return its
    directory.

    Raises:
        ValueError: the chosen option is not a model.
    """
    if options.model is None:
        return tiny.save_model(directory, longest, **sizes)
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen = model_path(options.model)
    if not chosen.exists():
        raise ValueError(
            f"--model {options.model}: {chosen} does not exist. Fix: name a Hugging Face config.json, its "
            "directory, or a recipe"
        )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(chosen), dtype=torch.float32).save_pretrained(
        directory
    )
    return directory


def model_path(chosen: str) -> Path:
    """Return the path of a chosen model's config; for a recipe, that of its ``policy.model_name``."""
    path = Path(chosen)
    if path.suffix not in (".yaml", ".yml"):
        return path
    from megarl.config import load_config

    return Path(load_config(path)["policy"]["model_name"])


def config_of(model: Path) -> Any:
    """Return the transformers config of a model on disk."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model)


def batch_of(model: Path, work: Work, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return a batch of sequences between half and the full length; every token after the first is a
    target."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(2, work.length // 2), work.length + 1, (work.rows,), generator=generator)
    # Always include the longest row, so that padded batches have one shape.
    lengths[0] = work.length
    inside = torch.arange(work.length)[None] < lengths[:, None]
    # 0 is padding and 1 ends a sequence, so neither is sampled.
    ids = (
        torch.randint(2, config_of(model).vocab_size, (work.rows, work.length), generator=generator) * inside
    )
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": inside.float(),
        "sample_mask": torch.ones(work.rows),
    }


def policy_of(
    model: Path, backend: str, work: Work, layout: Layout = ONE_RANK, device: str = "cpu", **changes: Any
) -> dict[str, Any]:
    """Return the configuration of a policy that trains on ``work`` in a layout.

    Raises:
        ValueError: the backend does not have an axis of the layout.
    """
    names = {
        "megatron": {
            "tp": "tensor_model_parallel_size",
            "pp": "pipeline_model_parallel_size",
            "cp": "context_parallel_size",
        },
        "dtensor": {"tp": "tensor_parallel_size", "cp": "context_parallel_size"},
        "fsdp1": {},
    }[backend]
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp") if getattr(layout, axis) > 1}
    if not sizes.keys() <= names.keys():
        raise ValueError(
            f"layout {layout}: {backend} has no such axis. Fix: choose from {', '.join([*names, 'dp'])}"
        )
    section = {f"{backend}_cfg": {names[axis]: size for axis, size in sizes.items()}} if names else {}
    batch = {
        "train_global_batch_size": work.rows,
        "logprob_batch_size": rows_at_once(work, layout),
        "max_total_sequence_length": work.length,
        "precision": "bfloat16" if device == "cuda" else "float32",
    }
    # If a change sets one key of a section, keep the keys that the layout has set there.
    both = {
        key: {**section.get(key, {}), **value} if isinstance(value, Mapping) else value
        for key, value in changes.items()
    }
    return tiny.policy_config(
        model,
        micro_batch=rows_at_once(work, layout),
        backend=backend,
        ranks=layout.ranks,
        **{**batch, **section, **both},
    )


def rows_at_once(work: Work, layout: Layout = ONE_RANK) -> int:
    """Return the rows per micro-batch on a rank.

    Raises:
        ValueError: the rows are not divisible by ranks and micro-batches.
    """
    rows, rest = divmod(work.rows, layout.dp * work.micro_batches)
    if rest or not rows:
        raise ValueError(
            f"{work.rows} rows in {work.micro_batches} micro-batches on {layout.dp} data-parallel ranks: "
            "they do not divide"
        )
    return rows


def fits(backend: str, work: Work, layout: Layout) -> bool:
    """Return whether a backend has the axes of a layout, and the work has rows for each of its ranks."""
    axes = {"megatron": ("tp", "pp", "cp", "dp"), "dtensor": ("tp", "cp", "dp"), "fsdp1": ("dp",)}[backend]
    needed = [axis for axis in ("tp", "pp", "cp", "dp") if getattr(layout, axis) > 1]
    return set(needed) <= set(axes) and work.rows % (layout.dp * work.micro_batches) == 0
