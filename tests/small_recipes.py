"""Recipes made small: a tiny model of the recipe's family, two steps, and the rows in the published form of
its data set that are shipped.

What a recipe is about stays as it is: sources, templates, rewards, loss. Sizes, layout and devices become
those of a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megarl.cli import load_and_check
from megarl.config.sections import Config
from megarl.config.validation_sets import GENERATIONS
from megarl.quickstart.material import make_tokenizer
from tests.models import make_tiny

CONFIGS = Path(__file__).parents[1] / "configs"
ROWS = CONFIGS / "quickstart"
STEPS = 2
LONGEST_PROMPT, LONGEST_ANSWER = 440, 8
# to each prompt of a validation set that says how many it wants
ANSWERS = 2
# as that of Qwen3: told not to think, it writes an empty thought where the answer starts
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
# recipe: rows of the published form, and the family of its model
RECIPES: dict[str, tuple[str, str]] = {
    "grpo-gsm8k-qwen2.5-1.5b-1gpu-megatron": ("gsm8k.jsonl", "qwen2"),
    "grpo-gsm8k-qwen2.5-7b-8gpu-megatron": ("gsm8k.jsonl", "qwen2"),
    "grpo-dapo17k-qwen2.5-1.5b-1gpu-megatron": ("dapo-math-17k.jsonl", "qwen2"),
    "grpo-dapo17k-qwen2.5-7b-8gpu-megatron": ("dapo-math-17k.jsonl", "qwen2"),
    "grpo-dapo17k-asynchronous-qwen2.5-7b-8gpu-megatron": ("dapo-math-17k.jsonl", "qwen2"),
    "grpo-dapo17k-qwen3-30b-a3b-thinking-2x8gpu-megatron": ("dapo-math-17k.jsonl", "qwen3_moe"),
    "grpo-dapo17k-qwen3-30b-a3b-without-thinking-2x8gpu-megatron": ("dapo-math-17k.jsonl", "qwen3_moe"),
    "ppo-gsm8k-qwen2.5-1.5b-1gpu-megatron": ("gsm8k.jsonl", "qwen2"),
    "sft-messages-qwen2.5-1.5b-megatron": ("ultrachat-200k.jsonl", "qwen2"),
    "dpo-ultrafeedback-qwen2.5-1.5b-megatron": ("ultrafeedback-binarized.jsonl", "qwen2"),
}


def make_small_model(directory: Path, family: str) -> Path:
    """A tiny model of a family with the quickstart's tokenizer, which falls back to bytes, and a chat
    template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    make_tiny(directory, family, tied=False, layers=2, **sizes, **tokens)
    tokenizer.save_pretrained(directory)
    return directory


def small(recipe: str, model: Path, directory: Path, ranks: int = 1, **changes: Any) -> Config:
    """The checked configuration of a recipe made small; its run lies in ``directory``.

    Args:
        recipe: a key of ``RECIPES``.
        model: of ``make_small_model``.
        directory: that the run may write to.
        ranks: on which the model is divided: its experts where it has some, else its tensors.
        changes: of the ``policy`` section.
    """
    rows, family = RECIPES[recipe]
    # the sources of the recipe itself, read from the rows that are shipped: named sets stay named
    sources = {
        key: [_read_from_rows(source, rows) for source in _sources(recipe, key)]
        for key in ("train", "validation")
    }
    parallel = (
        {"expert_model_parallel_size": ranks}
        if family == "qwen3_moe"
        else {"tensor_model_parallel_size": ranks}
    )
    longest = LONGEST_PROMPT + LONGEST_ANSWER
    policy = {
        "model_name": str(model),
        "precision": "float32",
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 4,
        "generation_batch_size": 8,
        "max_total_sequence_length": longest,
        "sequence_packing": {"train_mb_tokens": 2 * longest, "logprob_mb_tokens": 2 * longest},
        "megatron_cfg": {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "sequence_parallel": ranks > 1 and family != "qwen3_moe",
            **parallel,
        },
        **changes,
    }
    layer: dict[str, Any] = {
        "policy": policy,
        "data": {**sources, "max_input_seq_length": LONGEST_PROMPT},
        "checkpointing": {"save_period": STEPS},
        "cluster": {"gpus_per_node": ranks, "num_nodes": 1, "device": "cpu"},
    }
    overrides = [f"run_dir={directory / 'run'}"]
    section = recipe.split("-")[0]
    if section in ("grpo", "ppo"):
        policy["generation"] = {"max_new_tokens": LONGEST_ANSWER}
        steps = {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "val_batch_size": 8,
            "max_val_samples": 10,
        }
        layer[section] = {**steps, "max_num_steps": STEPS, "val_period": STEPS}
        if section == "ppo":
            # a step with the actor, whose loss is there then
            layer["ppo"]["critic_warmup_steps"] = 0
        overrides.append("~policy.generation.backend")
        if "asynchronous" in recipe:
            # engines are processes of their own, which only whole programs have
            apart = ranks > 1
            policy["generation"]["colocated"] = {
                "enabled": not apart,
                "resources": {"gpus_per_node": 1 if apart else None},
            }
            policy["generation"]["engine_check"] = {"sequences": 3 if apart else 0}
            layer["grpo"]["async_grpo"] = {"enabled": apart}
            layer["cluster"]["gpus_per_node"] += apart
        if "dapo" in recipe:
            layer["env"] = {"rewards": {"short": {"overlong_buffer_length": LONGEST_ANSWER // 2}}}
            # a tiny model solves no problem, and would look in vain for one that it solves now and then
            layer["grpo"] |= {"use_dynamic_sampling": False, "batch_multiplier": 1}
    else:
        layer[section] = {"max_num_steps": STEPS, "val_period": STEPS, "val_batches": 1}
        layer["data"]["cache_dir"] = str(directory / "cache")
    path = directory / "small.yaml"
    path.write_text(yaml.safe_dump(layer))
    return load_and_check(str(CONFIGS / f"{recipe}.yaml"), overrides, [str(path)])


def _sources(recipe: str, key: str) -> list[dict[str, Any]]:
    found: Any = load_and_check(str(CONFIGS / f"{recipe}.yaml"), [])["data"][key]  # type: ignore[literal-required]
    return found if isinstance(found, list) else [found]


def _read_from_rows(source: dict[str, Any], rows: str) -> dict[str, Any]:
    """A source that is read from the shipped rows; a set without an adapter is known by its keys alone."""
    kept = {name: value for name, value in source.items() if name not in {"split", "subset"}}
    if GENERATIONS in kept:
        kept[GENERATIONS] = ANSWERS
    if {"messages_key", "chosen_key"} & kept.keys():
        del kept["name"]
    return {**kept, "path": str(ROWS / rows)}
