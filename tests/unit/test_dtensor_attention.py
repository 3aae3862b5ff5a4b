"""The engine's attention inside transformers' models: masks, windows, caches and packed rows against
transformers' own attention."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from megarl.errors import ModelError
from megarl.models.engine.attention import SequenceLayout
from megarl.models.huggingface.attention import IMPLEMENTATION, attention_forward, default_layout
from megarl.models.huggingface.loading import (
    build_on_meta,
    check_names,
    is_tied,
    layers_of,
    parameters_on_meta,
    recompute_layers,
)
from tests.models import make_tiny, tiny_config

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "mistral_window"]
LENGTH = 17


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny(root / family, family, tied=False, seed=3) for family in FAMILIES}


def both(directory: Path) -> tuple[Any, Any]:
    """The model on our attention, and on transformers' eager one."""
    load = AutoModelForCausalLM.from_pretrained
    return tuple(
        load(directory, dtype=torch.float32, attn_implementation=name).eval()
        for name in (IMPLEMENTATION, "eager")
    )


def tokens(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_eager_attention(models: dict[str, Path], family: str) -> None:
    ours, theirs = both(models[family])
    torch.testing.assert_close(ours(tokens()).logits, theirs(tokens()).logits, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_the_window_is_seen(models: dict[str, Path]) -> None:
    ours, _ = both(models["mistral_window"])
    changed = tokens().clone()
    changed[:, 0] = 50
    same = (ours(tokens()).logits - ours(changed).logits).abs().amax(dim=(0, 2))
    reach = 1 + ours.config.num_hidden_layers * (ours.config.sliding_window - 1)
    assert same[:reach].gt(0).any() and ours.config.sliding_window == 7


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_with_a_cache_equals_whole_sequences(models: dict[str, Path], family: str) -> None:
    ours, _ = both(models[family])
    ids, cache, pieces = tokens(), DynamicCache(config=ours.config), []
    for first, last in [(0, 9), (9, 10), (10, 11), (11, 15), (15, LENGTH)]:
        positions = torch.arange(first, last).expand(2, -1)
        pieces.append(
            ours(ids[:, first:last], position_ids=positions, past_key_values=cache, use_cache=True).logits
        )
    torch.testing.assert_close(torch.cat(pieces, dim=1), ours(ids).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_sequences_do_not_see_one_another(models: dict[str, Path], family: str) -> None:
    ours, theirs = both(models[family])
    ids, starts = tokens(1), (0, 5, 14, LENGTH)
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(starts)])[None]
    packed = ours(ids, position_ids=positions, sequence_layout=SequenceLayout(starts)).logits
    alone = [theirs(ids[:, start:end]).logits for start, end in itertools.pairwise(starts)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=2e-5, rtol=1e-5)
    with default_layout(SequenceLayout(starts)):
        assert torch.equal(ours(ids, position_ids=positions).logits, packed)


@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
def test_recomputed_layers_see_the_same_layout(models: dict[str, Path], family: str) -> None:
    ids, starts = tokens(1), (0, 5, 14, LENGTH)
    gradients = []
    for recompute in (False, True):
        ours, _ = both(models[family])
        calls: list[int] = []
        layers_of(ours)[0].self_attn.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if recompute:
            recompute_layers(ours)
        ours.train()
        ours(ids, sequence_layout=SequenceLayout(starts), use_cache=False).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in ours.parameters()])
        assert len(calls) == 1 + recompute
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"dropout": 0.1}, "attention_dropout = 0.1"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask"),
        ({"is_causal": False}, "is_causal=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_is_not_is_refused(asked: dict[str, Any], word: str) -> None:
    states = torch.zeros(1, 2, 3, 4)
    arguments = {"attention_mask": None, **asked}
    with pytest.raises(ModelError, match=word):
        attention_forward(torch.nn.Module(), states, states, states, **arguments)


# models without their weights


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    model = build_on_meta(tiny_config("llama", tied=True), vocabulary=104)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(not buffer.is_meta and bool(buffer.isfinite().all()) for buffer in model.buffers()) and list(
        model.buffers()
    )
    assert is_tied(model) and model.lm_head.weight.shape == (104, 36)
    assert model.get_input_embeddings().padding_idx is None
    expected = AutoModelForCausalLM.from_config(tiny_config("llama", tied=True)).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_an_error_while_building_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        raise ZeroDivisionError
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_dropout_is_said_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config("llama", tied=False)
    config.attention_dropout = 0.1
    model = build_on_meta(config)
    assert model.config.attention_dropout == 0.0 and model.model.layers[0].self_attn.attention_dropout == 0.0
    assert config.attention_dropout == 0.1  # as the export has to say it
    assert "attention_dropout = 0.1 in the model's config.json: training uses 0" in caplog.text


def test_a_rotary_factor_of_vllm_is_refused() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = tiny_config("llama", tied=False)
    config.rope_parameters = {**rope, "attn_factor": 0.8}
    with pytest.raises(
        ModelError, match=r"attn_factor = 0\.8: transformers does not read it, vLLM multiplies"
    ):
        build_on_meta(config)
    config.rope_parameters = {**rope, "attn_factor": 1.0}
    build_on_meta(config)


def test_all_that_does_not_fit_is_said_at_once(models: dict[str, Path]) -> None:
    from converters.checkpoint.source import HuggingFaceSource

    source = HuggingFaceSource(models["llama"])
    shapes = {name: source.shape(name) for name in source.names() if name != "model.norm.weight"}
    shapes |= {"lm_head.weight": (7, 7), "extra": (1,)}
    with pytest.raises(ModelError, match="3 problems") as caught:
        check_names(source, shapes, tied=False)
    for line in (
        "missing: extra [1]",
        "shape: lm_head.weight is [101, 36], config.json asks for [7, 7]",
        "unknown: model.norm.weight",
    ):
        assert line in str(caught.value)
    del shapes["lm_head.weight"], shapes["extra"]
    check_names(source, {**shapes, "model.norm.weight": (36,)}, tied=True)
