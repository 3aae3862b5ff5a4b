"""A gated delta net, forward and backward, against the chunked implementation of transformers.

Both have the same weights and read the same hidden states; outputs and gradients are compared. All rows have
equal length, because transformers does not pack.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import Options
from benchmarks.point import Metric, Point, sides
from benchmarks.timing import Spent

if TYPE_CHECKING:
    from megarl.config.policy import PolicyConfig

# These are a quarter of the heads of Qwen3.5 9B, with their widths, in a narrower residual stream.
SIZES = {
    "vocab_size": 379,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SHAPES = {"long": (1, 2048), "short": (8, 256)}
"""Rows and tokens of each input."""
TOLERANCE = 1e-4
"""Largest relative difference of outputs and of gradients, in float32."""


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Yield one point for each input shape, on one rank."""
    from benchmarks.ranks import Ranks
    from benchmarks.subject import Work, policy_of

    with tempfile.TemporaryDirectory() as directory, Ranks(options.device) as ranks:
        model = _save_model(Path(directory) / "model")
        for shape, (rows, length) in SHAPES.items():
            length = length // 4 if quick else length
            policy = policy_of(model, "megatron", Work(rows, length), device=options.device)
            [(spent, error)] = ranks.run(1, _compare, policy, rows, length, 3 if quick else 7, options.device)
            yield Point({"shape": shape, "rows": rows, "length": length}, _metrics(spent, error))


def _save_model(directory: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"], pad_token_id=0, eos_token_id=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def _metrics(spent: Mapping[str, Spent], error: float) -> dict[str, Metric]:
    return {
        **sides("gdn", spent["megarl"], "transformers' layer", spent["transformers"]),
        "difference": Metric.of("largest relative difference of outputs and gradients", [error]),
    }


def _compare(
    config: PolicyConfig, rows: int, length: int, repeats: int, device: str
) -> tuple[dict[str, Spent], float]:
    """Return the times of both implementations, and the largest difference between their results."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks import tiny
    from benchmarks.device import clock_of
    from benchmarks.timing import spent_in_turn

    worker = tiny.worker_of(config)
    worker.prepare_for_training()
    # Take the layer alone, without the hooks of Megatron's gradient buffers, whose additions transformers
    # does not make.
    ours = worker.backend.stages[0].decoder.layers[0].self_attention
    model = AutoModelForCausalLM.from_pretrained(config["model_name"], dtype=torch.float32).to(device)
    theirs = model.model.layers[0].linear_attn
    hidden = torch.randn(rows, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).to(
        device
    )
    wanted = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(device)
    # Megatron's layers pass tensors on with positions first.
    by_position, pulled = hidden.transpose(0, 1).contiguous(), wanted.transpose(0, 1).contiguous()
    found: dict[str, tuple[Any, Any]] = {}

    def run_ours() -> None:
        inputs = by_position.clone().requires_grad_()
        outputs, _ = ours(inputs)
        outputs.backward(pulled)
        found["megarl"] = outputs.detach().transpose(0, 1), inputs.grad.transpose(0, 1)

    def run_theirs() -> None:
        inputs = hidden.clone().requires_grad_()
        outputs = theirs(inputs)
        outputs.backward(wanted)
        found["transformers"] = outputs.detach(), inputs.grad

    spent = spent_in_turn(
        {"megarl": run_ours, "transformers": run_theirs}, repeats=repeats, clock=clock_of(device)
    )
    worker.backend.close()
    pairs = zip(found["megarl"], found["transformers"], strict=True)
    error = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    if error > TOLERANCE:
        raise ValueError(
            f"outputs or gradients differ by {error:.2e} of their size: at most {TOLERANCE} is expected; "
            "mend the layer"
        )
    return spent, error
