"""Checkpoints of Megatron-Core's HybridModel, written by its own code, whose layers are halves of those of
other models."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from converters.command import main
from converters.families.read import read_architecture
from converters.model_config.megatron_settings import megatron_settings
from megarl.models.megatron.cuda_redirect import cuda_literals
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import save_tiny
from tests.unit.foreign_checkpoints import arguments_for, is_refused, tensors_of, write_checkpoint

on_hybrid = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.models.hybrid") is None,
    reason="this Megatron-Core has no HybridModel",
)
PATTERNS = {
    "qwen3": "*-*-*-",
    "llama_tied": "*-|*-*-",
    "qwen3_moe": "*E*E*E",
    "qwen3_moe_mixed": "*E*-*E",
    "qwen2_moe": "*E*E|*E",
}


@pytest.fixture(scope="module")
def one_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's groups in a world of one process."""
    if torch.distributed.is_initialized():
        pytest.skip("this process already belongs to a process group")
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def cpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core builds constants on the current CUDA device and switches CUDA generators around dropout;
    here both are the CPU's."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(get_cuda_rng_tracker(), "fork", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def hybrid_model(config: TransformerConfig, pattern: str, names_of_te: bool, **options: Any) -> Any:
    """Megatron-Core's own HybridModel and stack of layers, with the layers that need no Transformer
    Engine."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer

    sides: dict[str, ModuleSpec] = {}
    for experts, name in ((None, "mlp_layer"), (config.num_moe_experts, "moe_layer")):
        parts = get_gpt_layer_local_spec(
            experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        ).submodules
        if not names_of_te:
            parts = replace(parts, sharded_state_dict_keys_map={})
        mixer = replace(parts, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
        mlp = replace(
            parts, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
        )
        sides |= {
            "attention_layer": ModuleSpec(TransformerLayer, submodules=mixer),
            name: ModuleSpec(MLPLayer, submodules=mlp),
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        stack = ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**sides))
        return HybridModel(config, stack, hybrid_layer_pattern=pattern, pg_collection=groups, **options)


def saved(name: str, directory: Path, names_of_te: bool) -> Tensor:
    """Save a random model with its arguments as Megatron-LM does; its logits of some tokens."""
    architecture = read_architecture(save_tiny(directory / "hf", name).config)
    settings = megatron_settings(architecture)
    pattern = PATTERNS[name]
    transformer = {**settings.transformer, "num_layers": len(pattern.replace("|", "")), "moe_layer_freq": 1}
    config = TransformerConfig(
        **transformer,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    options = {name: value for name, value in settings.model.items() if name != "rope_scaling"} | {
        "vocab_size": 128
    }
    model = hybrid_model(config, pattern.replace("|", ""), names_of_te, **options).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            base = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(base + 0.2 * torch.randn(parameter.shape, generator=generator))
        ids = tokens()
        positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
        logits = model(
            ids, positions, torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
        )
    changes = {
        "hybrid_layer_pattern": pattern,
        "num_layers": config.num_layers,
        "is_hybrid_model": True,
        "position_embedding_type": "rope",
    }
    spec = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    arguments = arguments_for(name, **changes, spec=spec, moe_layer_freq=1)
    target = directory / "run" / "iter_0000012"
    target.mkdir(parents=True)
    with cuda_literals():
        dist_checkpointing.save(
            {"args": arguments, "checkpoint_version": 3.0, "model": model.sharded_state_dict()}, str(target)
        )
    (directory / "run" / "latest_checkpointed_iteration.txt").write_text("12\n")
    return logits[..., :101]


def tokens() -> Tensor:
    return torch.randint(0, 101, (2, 19), generator=torch.Generator().manual_seed(11))


@on_hybrid
@newest_megatron
@pytest.mark.parametrize("names_of_te", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.usefixtures("one_process_group", "cpu_device")
def test_what_megatron_core_saves_of_its_hybrid_model_is_exported(
    name: str, names_of_te: bool, tmp_path: Path
) -> None:
    """transformers computes with it what Megatron-Core's own model computes, with a config that is given and
    with one that is made."""
    from transformers import AutoModelForCausalLM

    logits = saved(name, tmp_path, names_of_te)
    options = {"experts_implementation": "eager"} if "moe" in name else {}
    for number, flags in enumerate(
        (["--hf-config", str(tmp_path / "hf")], ["--vocab-size", "101", "--eos-token-id", "2"])
    ):
        target = tmp_path / f"out{number}"
        assert main(["export", str(tmp_path / "run"), str(target), *flags]) == 0
        model = AutoModelForCausalLM.from_pretrained(target, **options).eval()
        assert model.config.num_hidden_layers == 3
        with torch.no_grad():
            torch.testing.assert_close(model(tokens()).logits, logits, rtol=0, atol=2e-5)
    assert logits.std() > 0.1


def halves(
    tensors: dict[str, Tensor], order: tuple[str, ...] = ("self_attention", "mlp")
) -> dict[str, Tensor]:
    """The tensors of stacked layers under the keys of a HybridModel's blocks."""
    found = {}
    for key, tensor in tensors.items():
        prefix, _, suffix = key.partition("decoder.layers.")
        if suffix:
            second = order.index("self_attention" if suffix.startswith("self_attention") else "mlp")
            found |= {
                f"{prefix}decoder.layers.{2 * layer + second}.{suffix}": one.contiguous()
                for layer, one in enumerate(tensor)
            }
        else:
            found[key.replace("final_layernorm", "final_norm")] = tensor
    return found


def foreign(directory: Path, tensors: dict[str, Tensor], arguments: argparse.Namespace | None) -> Path:
    write_checkpoint(directory / "run" / "iter_0000012", tensors, arguments)
    (directory / "run" / "latest_checkpointed_iteration.txt").write_text("12\n")
    return directory / "run"


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "M-*-*-",
            (
                "layer 0 is M (Mamba), where * (attention) or + (latent attention) or G (gated delta net) is "
                "expected"
            ),
        ),
        ("**-*--", "layer 1 is * (attention), where - (MLP) or E (experts) is expected"),
        ("*-*-*", "layer 4 is * (attention), where no MLP follows it"),
        ("*-*-*-/*-", "layer 6 is / (layers that predict further tokens), where"),
        ("*-*-D-", "layer 4 is D (sparse attention), where"),
        ("*-*-*-*-", "num_layers = 4, by the config 3"),
        ("*-*-G-", "linear_attention_freq = [0, 0, 1]"),
    ],
)
def test_patterns_that_make_no_layers_are_refused_by_their_symbol(
    pattern: str, said: str, tmp_path: Path
) -> None:
    arguments = arguments_for("qwen3", num_layers=len(pattern), hybrid_override_pattern=pattern)
    run = foreign(tmp_path, halves(tensors_of("qwen3", tmp_path)), arguments)
    assert said in is_refused(run, "--hf-config", str(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: halves(tensors, ("mlp", "self_attention")),
            "is stored where layer 0 of a HybridModel has to be a mixer of tokens",
        ),
        (
            lambda tensors: halves(tensors) | {"decoder.layers.0.mixer.in_proj.weight": torch.ones(3)},
            "layers.0.mixer.in_proj.weight is stored",
        ),
        (
            lambda tensors: (
                halves(tensors) | {"decoder.layers.0.self_attention.in_proj.weight.query": torch.ones(3)}
            ),
            (
                "holds Megatron-Core's own gated delta nets "
                "(decoder.layers.0.self_attention.in_proj.weight.query)"
            ),
        ),
        (
            lambda tensors: halves(tensors) | {"mtp.layers.0.enorm.weight": torch.ones(3)},
            "predict further tokens (mtp.*)",
        ),
    ],
)
def test_blocks_that_make_no_layers_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    run = foreign(tmp_path, change(tensors_of("qwen3", tmp_path)), None)
    assert said in is_refused(run, "--hf-config", str(tmp_path / "hf"))
