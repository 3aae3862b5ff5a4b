"""Whole runs of the drivers in one process, around the plain reference policy: configurations, a policy that
fails, what a run leaves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megarl.algorithms.algorithm import ACTOR, Role
from megarl.config.nested import at
from megarl.run.resume import ResumePoint
from tests.unit.reference_policy import ReferencePolicy

STEPS = 4


def make_config(algorithm: str, run_dir: Path, model: str, data: str, **section: Any) -> dict[str, Any]:
    source = {"path": data, "prompt_key": "prompt", "answer_key": "answer"}
    config: dict[str, Any] = {
        "algorithm": algorithm,
        "seed": 11,
        "run_dir": str(run_dir),
        "policy": {
            "model_name": model,
            "tokenizer": {"name": model},
            "train_global_batch_size": 4 if algorithm == "sft" else 6,
            "train_micro_batch_size": 2,
            "logprob_batch_size": 2,
            "precision": "float32",
            "make_sequence_length_divisible_by": 1,
            "max_total_sequence_length": 24,
            "max_grad_norm": 1.0,
            "megatron_cfg": {
                "enabled": True,
                "optimizer": {"lr": 3e-3, "weight_decay": 0.01, "use_distributed_optimizer": False},
                "scheduler": {"lr_warmup_iters": 2, "lr_warmup_init": 1e-3},
            },
            "generation": {"backend": "megatron", "max_new_tokens": 3},
        },
        "data": {"train": source, "validation": source, "max_input_seq_length": 20},
        "checkpointing": {"enabled": True, "save_period": 2, "keep_top_k": None, "export_hf": True},
        "cluster": {"gpus_per_node": 1, "num_nodes": 1, "device": "cpu"},
    }
    if algorithm == "dpo":
        config["policy"] |= {"train_global_batch_size": 3, "train_micro_batch_size": 1}
        pairs = {"path": data, "prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
        config["data"] |= {"train": pairs, "validation": pairs, "cache_dir": str(run_dir.parent / "cache")}
        config["dpo"] = {
            "max_num_steps": STEPS,
            "val_period": 2,
            "val_global_batch_size": 4,
            "val_micro_batch_size": 2,
            **section,
        }
    elif algorithm == "sft":
        config["sft"] = {
            "max_num_steps": STEPS,
            "val_period": 2,
            "val_global_batch_size": 4,
            "val_micro_batch_size": 2,
            **section,
        }
    else:
        config[algorithm] = {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 3,
            "max_num_steps": STEPS,
            "val_period": 2,
            "val_batch_size": 3,
            "val_at_start": True,
            **section,
        }
        config["env"] = {"reward": "exact_match"}
        config["loss_fn"] = {
            "reference_policy_kl_penalty": 0.01,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "ratio_clip_c": None,
            "use_on_policy_kl_approximation": False,
            "use_importance_sampling_correction": False,
            "token_level_loss": True,
        }
    return config


class Crash(Exception):
    """Stands for whatever ends a run in the middle."""


class PolicyMaker:
    """Makes reference policies, and ones that fail or have something done at a given training call.

    Args:
        crash_after: training calls that go well before one fails; None for no failure.
        at_call: called at the beginning of each training call with its number, from 1.
    """

    def __init__(
        self, crash_after: int | None = None, at_call: Callable[[int], None] = lambda call: None
    ) -> None:
        self.crash_after = crash_after
        self.at_call = at_call
        self.policies: list[ReferencePolicy] = []

    def __call__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        start: ResumePoint,
        stack: ExitStack,
        role: Role = ACTOR,
        beside: ReferencePolicy | None = None,
    ) -> ReferencePolicy:
        policy = ReferencePolicy(
            at(config, role.section),
            tokenizer,
            *(
                None if path is None else str(path)
                for path in (start.weights_path(role), start.optimizer_path(role))
            ),
        )
        stack.callback(policy.shutdown)
        self.policies.append(policy)
        train, calls = policy.train, 0

        def train_or_crash(*args: Any, **kwargs: Any) -> dict[str, Any]:
            nonlocal calls
            if not kwargs.get("eval_mode"):
                calls += 1
                self.at_call(calls)
                if calls - 1 == self.crash_after:
                    raise Crash
            return train(*args, **kwargs)

        policy.train = train_or_crash  # type: ignore[method-assign]
        return policy


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The rows without clock readings."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("timing/", "performance/", "time"))}
        for row in rows(run_dir)
    ]


def cut_off(policy: ReferencePolicy, cut: Mapping[int, slice]) -> ReferencePolicy:
    """A policy that says of some of its answers, slices by the number of its call from 1, and of no others
    that they were cut off."""
    generate, calls = policy.generate, itertools.count(1)

    def generate_and_say(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        output["truncated"] = torch.zeros(len(output["output_ids"]), dtype=torch.bool)
        output["truncated"][cut.get(next(calls), slice(0))] = True
        return output

    policy.generate = generate_and_say  # type: ignore[method-assign]
    return policy


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "hf" / f"step_{STEPS}" / "model.safetensors")


def check_same(run_dir: Path, other: Path) -> None:
    """Two runs have the same rows and the same final weights, to the bit."""
    assert comparable(run_dir) == comparable(other), run_dir
    weights = final_weights(run_dir)
    assert [
        name for name, tensor in final_weights(other).items() if not torch.equal(weights[name], tensor)
    ] == [], run_dir
