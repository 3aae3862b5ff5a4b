"""Adapters in the forms in which PEFT publishes them, merged into a model as it is read, against
``merge_and_unload``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, reference
from tests.dist.batches import make_batch
from tests.dist.layouts import CONFIG, LAYOUTS
from tests.dist.layouts import layout as named
from tests.models import make_tiny
from tests.tiers import sampled

SAVED = ("lora_", "modules_to_save", "trainable_tokens_delta")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PATTERNS = {
    "target_modules": ["q_proj", "o_proj", "down_proj"],
    "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 5},
    "alpha_pattern": {r"^model.layers.\d.self_attn.q_proj": 1.5},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "expression": ("qwen2", {"target_modules": r".*layers.[01].*(v|o|down)_proj", "use_rslora": True}),
    "patterns": ("qwen2", PATTERNS),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm", "o_proj"]}),
    "tokens": ("qwen2", {"target_modules": ["up_proj"], "trainable_token_indices": {"embed_tokens": [9, 3]}}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "stacked experts": ("qwen3_moe", {"target_parameters": EXPERTS}),
    "transposed experts": ("gpt_oss", {"target_parameters": EXPERTS}),
}
DENSE = [("megatron", "tp2-pp2"), ("dtensor", "tp2-dp2"), ("fsdp1", "dp2")]
RUNS = [(backend, layout, case) for backend, layout in DENSE for case in CASES if "experts" not in case]
RUNS += [
    ("megatron", layout, case) for layout in ("tp1", "tp2-sp-ep2") for case in CASES if "experts" in case
]


def published(model: Path, directory: Path, **options: Any) -> Path:
    """What PEFT writes of an adapter that has been trained."""
    torch.manual_seed(6)
    changed = get_peft_model(mixtures.load(model), LoraConfig(r=4, lora_alpha=6, bias="none", **options))
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if any(word in name for word in SAVED):
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    changed.save_pretrained(directory)
    return directory


@sampled(3)
@pytest.mark.parametrize(("backend", "layout", "case"), RUNS)
def test_a_published_adapter_computes_what_peft_does(
    pool: WorkerPool, tmp_path: Path, backend: str, layout: str, case: str
) -> None:
    family, options = CASES[case]
    model = make_tiny(tmp_path / "model", family, tied=False, seed=5)
    if case == "stacked experts":  # as transformers holds them, where its files have one after the other
        save_file(mixtures.load(model).state_dict(), model / "model.safetensors", metadata={"format": "pt"})
    adapter = published(model, tmp_path / "adapter", **options)
    merged = PeftModel.from_pretrained(mixtures.load(model), adapter).merge_and_unload()  # type: ignore[operator]
    batch = make_batch(rows=6, length=13, seed=3)
    expected = reference.logprobs(merged.eval(), batch)
    assert (reference.logprobs(mixtures.load(model), batch) - expected).abs().max() > 0.05
    world, placed = LAYOUTS[backend][layout] if "experts" not in case else named(layout, padded=True)
    config = {**CONFIG[backend](model, **{"gbs": 12, "mbs": 3, **placed}), "merged_adapter": str(adapter)}
    for found in pool.run(world, jobs.logprobs, config, batch):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
