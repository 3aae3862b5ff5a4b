"""GPT-OSS: all experts of a layer in one tensor, transposed, with rows of gate and up in turns; facts of its
config; attention sinks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.check import check_source
from converters.checkpoint.manifest import TensorHashes
from converters.checkpoint.source import open_source
from converters.checkpoint.work import RunOptions
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.families.read import read_architecture
from converters.importing import import_model, plan_import
from converters.mapping.rules import all_rules, rule_for
from converters.mapping.shards import join, load_shard, to_hf
from converters.model_config.megatron_settings import megatron_settings
from converters.opening import open_megatron
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.models.engine.attention import SequenceLayout, attention, causal_attention
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import save_tiny, stored_tensors
from tests.unit.published_models import published

pytestmark = newest_megatron
BLOCK = "model.layers.1.mlp.experts."


def test_rows_of_gate_and_up_are_taken_apart(tmp_path: Path) -> None:
    """Against the formula, on any number of ranks; and joined again as they were."""
    architecture = read_architecture(save_tiny(tmp_path, "gpt_oss").config)
    source, stored = open_source(tmp_path), stored_tensors(tmp_path)
    check_source(source, architecture)
    prefix = "decoder.layers.1.mlp.experts.local_experts.3."
    expected = stored[f"{BLOCK}gate_up_proj"][3].T
    for rank in range(2):
        half = slice(26 * rank, 26 * rank + 26)
        shard = load_shard(
            rule_for(f"{prefix}linear_fc1.weight", architecture), source, architecture, rank, 2
        )
        assert torch.equal(shard, torch.cat([expected[0::2][half], expected[1::2][half]]))
        shard = load_shard(
            rule_for(f"{prefix}linear_fc2.weight", architecture), source, architecture, rank, 2
        )
        assert torch.equal(shard, stored[f"{BLOCK}down_proj"][3].T[:, half])
        shard = load_shard(
            rule_for("decoder.layers.1.mlp.experts.linear_fc1.bias3", architecture),
            source,
            architecture,
            rank,
            2,
        )
        bias = stored[f"{BLOCK}gate_up_proj_bias"][3]
        assert torch.equal(shard, torch.cat([bias[0::2][half], bias[1::2][half]]))
    stream = (
        pair
        for rule in all_rules(architecture)
        for pair in to_hf(rule, [load_shard(rule, source, architecture)], architecture)
    )
    joined = dict(join(stream, architecture))
    assert joined.keys() == stored.keys() and all(
        torch.equal(joined[name], tensor) for name, tensor in stored.items()
    )


def test_keys_are_those_of_megatron(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "gpt_oss")
    import_model(plan_import(open_source(tmp_path / "hf")), tmp_path / "mcore")
    checkpoint = TorchDistCheckpoint(tmp_path / "mcore")
    assert checkpoint.shape("decoder.layers.self_attention.core_attention.softmax_offset") == (3, 6)
    assert checkpoint.shape("decoder.layers.mlp.experts.experts.linear_fc1.bias") == (3, 5, 104)
    assert checkpoint.shape("decoder.layers.mlp.experts.experts.linear_fc2.weight") == (3, 5, 42, 52)


@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"])
def test_what_is_wrong_with_the_experts_is_said_once(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    whole = tensors.pop(BLOCK + name)
    save_file({**tensors, f"{BLOCK}{name}s": whole}, file, metadata={"format": "pt"})
    with pytest.raises(ConversionError) as caught:
        plan_import(open_source(tmp_path))
    sizes = list(whole.shape)
    assert sorted(caught.value.details) == [
        f"missing: {BLOCK}{name} {sizes}",
        f"unknown: {BLOCK}{name}s {sizes}",
    ]
    save_file({**tensors, BLOCK + name: whole[:, :-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=f"{name} is .* config.json asks for"):
        plan_import(open_source(tmp_path))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_dequantised_blocks_are_not_transposed(name: str, tmp_path: Path) -> None:
    """They come out as the transposed tensors that transformers writes."""
    save_tiny(tmp_path / "hf", "gpt_oss")
    expected = stored_tensors(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{BLOCK}{name}_blocks"] = tensors.pop(BLOCK + name).transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    import_model(plan_import(open_source(tmp_path / "hf")), tmp_path / "mcore")
    export_model(plan_export(open_megatron(tmp_path / "mcore")), tmp_path / "back")
    back = stored_tensors(tmp_path / "back")
    assert back.keys() == expected.keys() and all(
        torch.equal(back[key], tensor) for key, tensor in expected.items()
    )


class Killed(BaseException):
    pass


def test_an_interrupted_export_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped inside a stack of experts; one finished stack is damaged meanwhile, and written again."""
    save_tiny(tmp_path / "hf", "gpt_oss")
    import_model(plan_import(open_source(tmp_path / "hf")), tmp_path / "mcore")
    export_model(plan_export(open_megatron(tmp_path / "mcore")), tmp_path / "expected")
    original, calls = TensorHashes.update, []

    def dying(self: TensorHashes, name: str, rows: Tensor, start: int | None = None) -> None:
        calls.append(name)
        if name.startswith("model.layers.2.mlp.experts.3.up_proj.weight"):
            raise Killed
        original(self, name, rows, start)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TensorHashes, "update", dying)
        export_model(plan_export(open_megatron(tmp_path / "mcore")), tmp_path / "back", RunOptions(workers=1))
    file = tmp_path / ".back.partial" / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 + length + json.loads(data[8 : 8 + length])[f"{BLOCK}gate_up_proj"]["data_offsets"][0] + 41] ^= 1
    file.write_bytes(data)
    outcome = export_model(
        plan_export(open_megatron(tmp_path / "mcore")), tmp_path / "back", RunOptions(workers=1)
    )
    assert outcome.resumed > 0
    expected, back = stored_tensors(tmp_path / "expected"), stored_tensors(tmp_path / "back")
    assert back.keys() == expected.keys() and all(
        torch.equal(back[name], tensor) for name, tensor in expected.items()
    )


def test_facts_of_the_published_model() -> None:
    architecture = read_architecture(published("gpt-oss-20b-BF16"))
    assert architecture.window_layers == (True, False) * 12 and architecture.sliding_window == 128
    assert (architecture.sinks, architecture.gate_limit, architecture.activation) == (
        True,
        7.0,
        "clamped_swiglu",
    )
    settings = megatron_settings(architecture)
    assert settings.transformer["window_attn_skip_freq"] == [1, 0] * 12 and settings.transformer[
        "window_size"
    ] == (127, 0)
    assert (
        settings.transformer["softmax_type"] == "learnable"
        and settings.attributes["yarn_correction_range_round_to_int"] is False
    )


def literal(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, sinks: Tensor
) -> Tensor:
    """Attention with sinks, one query at a time."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    rows = []
    for head in range(heads):
        group = head * key.shape[1] // heads
        for place in range(queries):
            last = keys - queries + place
            seen = slice(max(0, last - window + 1) if window else 0, last + 1)
            scores = key[0, group, seen] @ query[0, head, place] * scale
            weights = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
            rows.append(weights @ value[0, group, seen])
    return torch.stack(rows).view(1, heads, queries, -1)


@pytest.mark.parametrize(("queries", "window"), [(9, None), (9, 3), (1, 4), (2, None), (5, 1)])
def test_sinks_take_their_share_of_the_softmax(queries: int, window: int | None) -> None:
    torch.manual_seed(queries)
    query, key, value = (torch.randn(1, heads, length, 8) for heads, length in ((6, queries), (2, 9), (2, 9)))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value, torch.randn(6))]
    mine, expected = (
        causal_attention(*inputs[:3], 0.4, window, inputs[3]),
        literal(*inputs[:3], 0.4, window, inputs[3]),
    )
    torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(mine.shape)
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (mine, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(mine, causal_attention(*inputs[:3], 0.4, window))


def test_packed_sequences_have_the_sinks_each() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (6, 2, 2))
    sinks = torch.randn(6)
    packed = attention(query, key, value, SequenceLayout((0, 4, 9)), scale=0.4, window=3, sinks=sinks)
    for part in (slice(0, 4), slice(4, 9)):
        alone = literal(query[:, :, part], key[:, :, part], value[:, :, part], 0.4, 3, sinks)
        torch.testing.assert_close(packed[:, :, part], alone, atol=1e-6, rtol=1e-5)
