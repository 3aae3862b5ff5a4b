"""Quantised Hugging Face checkpoints: FP8 in blocks and MXFP4, dequantised as transformers does it, by box,
and through the conversions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from converters.checkpoint import quantized, work
from converters.checkpoint.quantized import BlockScaled, DequantizedSource, Microscaled, open_dequantized
from converters.checkpoint.source import open_source
from converters.command import main
from converters.errors import ConversionError
from converters.families.read import read_architecture
from tests.tiers import sampled, slow
from tests.unit.converters_tiny import save_tiny, stored_tensors

BLOCK = (16, 12)
FP8_CONFIG = {
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
}
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a tensor, which begin inside blocks."""
    monkeypatch.setattr(work, "CHUNK_BYTES", 1500)
    monkeypatch.setattr(quantized, "_PIECE_ELEMENTS", 100)


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def in_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """FP8 values and float32 scales, as DeepSeek-V3 is quantised."""
    scales = torch.empty(grid(tuple(weight.shape), block))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            scales[row, column] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return stored, scales


def reader(tensor: Tensor) -> Callable[[Any], Tensor]:
    return lambda box: tensor[tuple(slice(*span) for span in box)].clone()


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    return st.tuples(
        *(
            st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))
            for size in shape
        )
    )


@settings(max_examples=60)
@given(st.data())
def test_every_box_of_blocks_is_the_formula(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=3), "shape"))
    block = data.draw(st.tuples(st.integers(1, 17), st.integers(1, 17)), "block")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weight = torch.randn(shape, generator=generator).mul(100).to(torch.float8_e4m3fn)
    scale = torch.rand(grid(shape, block), generator=generator) + 0.01
    # float64 holds the product of four bits and 24 exactly; one rounding follows
    wide = (
        scale.double()
        .repeat_interleave(block[0], -2)
        .repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]
    )
    expected = (weight.double() * wide).float()
    box = data.draw(boxes(shape), "box")
    cut = tuple(slice(*span) for span in box)
    made = BlockScaled("w", shape, block, reader(weight), reader(scale))
    for dtype in (torch.float32, torch.bfloat16):
        found = made.read(box, dtype)
        assert found.dtype == dtype and found.is_contiguous() and torch.equal(found, expected[cut].to(dtype))


def test_blocks_as_transformers_reads_them() -> None:
    stored, scales = in_blocks(torch.randn(48, 36), BLOCK)
    expected = Fp8Dequantize(SimpleNamespace())._dequantize_one(stored, scales, output_dtype=torch.bfloat16)
    found = BlockScaled("w", (48, 36), BLOCK, reader(stored), reader(scales)).read(
        ((0, 48), (0, 36)), torch.bfloat16
    )
    assert torch.equal(found, expected)


@settings(max_examples=60)
@given(st.data())
def test_every_box_of_groups_is_what_transformers_reads(data: st.DataObject) -> None:
    experts, columns, groups = (
        data.draw(st.integers(1, 6), name) for name in ("experts", "columns", "groups")
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    blocks = torch.randint(0, 256, (experts, columns, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(60, 190, (experts, columns, groups), dtype=torch.uint8, generator=generator)
    made = Microscaled("w", (experts, columns, groups), reader(blocks), reader(scales))
    assert made.shape == (experts, columns, groups * 32)
    box = data.draw(boxes(made.shape), "box")
    cut = tuple(slice(*span) for span in box)
    # transformers' models have the matrices transposed
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)[cut]
    found = made.read(box, torch.bfloat16)
    assert found.is_contiguous() and torch.equal(
        found.view(torch.int16), expected.contiguous().view(torch.int16)
    )


def test_groups_by_hand() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, :3] = torch.tensor([0x21, 0xF7, 0x9C], dtype=torch.uint8)
    made = Microscaled("w", (1, 1, 1), reader(blocks), reader(torch.full((1, 1, 1), 130, dtype=torch.uint8)))
    assert made.read(((0, 1), (0, 1), (0, 32)), torch.float32).flatten()[:7].tolist() == [
        4.0,
        8.0,
        48.0,
        -48.0,
        -16.0,
        -4.0,
        0.0,
    ]
    with pytest.raises(ConversionError, match="a scale of 255, which stands for NaN"):
        Microscaled(
            "w", (1, 1, 1), reader(blocks), reader(torch.full((1, 1, 1), 255, dtype=torch.uint8))
        ).read(((0, 1), (0, 1), (0, 1)), torch.float32)


def is_quantised(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not any(word in name for word in ("embed", "lm_head", "gate.weight"))


def save_fp8(
    directory: Path, plain: Path, change: Callable[[Tensors], Any] = lambda tensors: None, **config: Any
) -> Path:
    """The model in ``plain`` with its matrices in FP8."""
    directory.mkdir()
    tensors: Tensors = {}
    for name, tensor in stored_tensors(plain).items():
        if is_quantised(name, tensor):
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(tensor.float(), BLOCK)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((plain / "config.json").read_text())
    described |= {"dtype": "bfloat16", "quantization_config": {**FP8_CONFIG, **config}}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


def dequantised(directory: Path, dtype: torch.dtype) -> Tensors:
    """By whole tensors, in float64."""
    stored = stored_tensors(directory)
    made = {}
    for name, tensor in stored.items():
        scale = stored.get(f"{name}_scale_inv")
        if scale is not None:
            wide = scale.double().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            made[name] = (tensor.double() * wide[: tensor.shape[0], : tensor.shape[1]]).float().to(dtype)
        elif not name.endswith("_scale_inv"):
            made[name] = tensor
    return made


def run(*argv: str | Path) -> None:
    assert main([*map(str, argv)]) == 0, argv


@sampled(1)
@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_the_whole_way(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "plain", family)
    hf = save_fp8(tmp_path / "hf", tmp_path / "plain")
    mcore, back = tmp_path / "mcore", tmp_path / "back"
    run("import", hf, mcore, "--workers", "3")
    run("export", mcore, back)
    expected, found = dequantised(hf, torch.bfloat16), stored_tensors(back)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    for directory in (mcore / "huggingface", back):
        assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    for pair in ((hf, mcore), (mcore, hf), (back, hf)):
        run("verify", *pair)
    run("verify", hf, mcore, "--logits")
    run("verify", hf)
    capsys.readouterr()
    assert main(["inspect", str(hf), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    count = sum(is_quantised(name, tensor) for name, tensor in expected.items())
    assert inspected["dequantized_from"] == "fp8" and inspected["dequantized_tensors"] == count > 0
    manifest = json.loads((mcore / "conversion.json").read_text())
    assert manifest["notes"] == {"dequantized_from": "fp8", "dequantized_tensors": count}
    # one element of one scale
    tensors = stored_tensors(hf)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[f"{name}_scale_inv"][1, 2] *= 1.5
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(hf), str(mcore), "--json"]) == 1
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert [(each["kind"], each["name"]) for each in differences] == [("values", name)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_another_dtype_is_rounded_to_once(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "plain", "qwen2")
    hf = save_fp8(tmp_path / "hf", tmp_path / "plain")
    run("import", hf, tmp_path / "mcore", "--dtype", dtype)
    run("export", tmp_path / "mcore", tmp_path / "back")
    found, wanted = stored_tensors(tmp_path / "back"), getattr(torch, dtype)
    for name, tensor in dequantised(hf, wanted).items():
        assert torch.equal(found[name], tensor.to(wanted)), name
    run("verify", hf, tmp_path / "back") if dtype == "bfloat16" else None
    notes = json.loads((tmp_path / "mcore" / "conversion.json").read_text())["notes"]
    assert (notes.get("largest_error", 0) > 0) == (dtype != "float32")


def test_a_wide_import_is_verified_in_its_own_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "plain", "qwen2")
    hf = save_fp8(tmp_path / "hf", tmp_path / "plain")
    run("import", hf, tmp_path / "mcore", "--dtype", "float32")
    capsys.readouterr()
    main(["verify", str(hf), str(tmp_path / "mcore"), "--json"])
    found = json.loads(capsys.readouterr().out)["differences"]
    quantised = {
        name for name, tensor in stored_tensors(tmp_path / "plain").items() if is_quantised(name, tensor)
    }
    # what was bfloat16 before is said to be float32 now; what was quantised is compared in float32
    assert not quantised & {each["name"] for each in found} and {each["kind"] for each in found} == {"dtype"}


NAME = "model.layers.1.mlp.down_proj.weight"
SCALE = f"{NAME}_scale_inv"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop(SCALE),
            f"missing: {SCALE} [3, 5], the scales of {NAME} [42, 52] in blocks of [16, 12]",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(5, 3)}),
            f"shape: {SCALE} is [5, 3], {NAME} [42, 52] in blocks of [16, 12]",
        ),
        (
            lambda tensors: tensors.update({SCALE: torch.ones(3, 5, dtype=torch.float16)}),
            f"dtype: {SCALE} is torch.float16",
        ),
        (lambda tensors: tensors.update({NAME: torch.ones(42, 52)}), f"unknown: {SCALE}"),
        (
            lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.ones(1, 1)}),
            "unknown: model.norm.weight_scale_inv [1, 1]",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(42).to(torch.float8_e4m3fn)}),
            "model.norm.weight [42]: only matrices are stored in blocks",
        ),
        (lambda tensors: tensors.pop(NAME), f"missing: {NAME} [42, 52]"),
    ],
)
def test_scales_that_do_not_fit(
    change: Callable[[Tensors], Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "plain", "llama")
    save_fp8(tmp_path / "hf", tmp_path / "plain", change)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "mcore")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "mcore").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq"}, "only quant_method 'fp8'"),
        ({"weight_block_size": None}, "weight_block_size = None: two positive whole numbers"),
        ({"weight_block_size": [128, True]}, "weight_block_size = [128, True]"),
        ({"weight_block_size": [0, 128]}, "weight_block_size = [0, 128]"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({"a_new_key": 3}, "a_new_key = 3"),
    ],
)
def test_configs_that_are_refused(
    config: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "plain", "llama")
    save_fp8(tmp_path / "hf", tmp_path / "plain", **config)
    for action in ("inspect", "plan"):
        assert main([action, str(tmp_path / "hf")]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bits": 4, "group_size": 128, "quant_method": "gptq"}, "give the model that was quantised"),
        ({"bits": 4, "quant_method": "awq", "version": "gemm"}, "give the model that was quantised"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, ".dequantize().save_pretrained(OUT)"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "give the model that was quantised"),
        (FP8_CONFIG, "megarl convert import MODEL TMP, then export TMP OUT"),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_a_refusal_says_what_works(
    config: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of training names the command that dequantises only where that does."""
    save_tiny(tmp_path / "hf", "llama")
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    described |= {"quantization_config": config}
    with pytest.raises(ConversionError) as refused:
        read_architecture(described)
    assert said in str(refused.value)
    if config is not FP8_CONFIG:
        (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
        assert main(["import", str(tmp_path / "hf"), str(tmp_path / "mcore")]) == 2
        assert said in capsys.readouterr().err


def test_workers_are_not_given_quantised_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", "llama")
    hf = save_fp8(tmp_path / "hf", tmp_path / "plain")
    assert not isinstance(open_source(hf), DequantizedSource) and isinstance(
        open_dequantized(hf), DequantizedSource
    )
    assert not isinstance(open_dequantized(tmp_path / "plain"), DequantizedSource)


def test_other_blocks_are_another_source(tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", "llama")
    hf = save_fp8(tmp_path / "hf", tmp_path / "plain")
    identities = [
        str(DequantizedSource(hf, {**FP8_CONFIG, "weight_block_size": block}).identity())
        for block in ([16, 12], [17, 12])
    ]
    assert identities[0] != identities[1]


def test_mxfp4_tensors_of_a_directory(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8)
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}})
    )

    def opened(**tensors: Tensor) -> Any:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return open_dequantized(tmp_path)

    source = opened(up_blocks=blocks, up_scales=scales, up_bias=torch.ones(3, 10))
    assert (
        source.names() == ["up_bias", "up_blocks"]
        and "up_scales" not in source
        and source.shape("up_blocks") == (3, 10, 64)
    )
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert source.dtype("up_blocks") == torch.bfloat16 and torch.equal(source.read("up_blocks"), expected)
    assert torch.equal(
        source.read("up_blocks", (slice(1, 2), slice(5, 9), slice(3, 40))), expected[1:2, 5:9, 3:40]
    )
    with pytest.raises(ConversionError, match=r"up_blocks has shape \[3, 10, 64\]; dimension 1 has no slice"):
        source.read("up_blocks", (slice(0, 1), slice(0, 65)))
    with pytest.raises(
        ConversionError, match=r"missing: up_scales \[3, 10, 2\], the scales of up_blocks \[3, 10, 2, 16\]"
    ):
        opened(up_blocks=blocks)
    with pytest.raises(ConversionError, match=r"shape: up_scales is \[3, 10\]"):
        opened(up_blocks=blocks, up_scales=scales[..., 0].contiguous())
    with pytest.raises(ConversionError, match=r"up_blocks is torch.float32 \[3, 10, 2, 16\]; torch.uint8"):
        opened(up_blocks=blocks.float(), up_scales=scales)


@slow
def test_gpt_oss_as_it_was_released(tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", "gpt_oss", torch.bfloat16, hidden_size=64, intermediate_size=96)
    tensors, expected = stored_tensors(tmp_path / "plain"), stored_tensors(tmp_path / "plain")
    generator = torch.Generator().manual_seed(5)
    experts = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(experts) == 6
    for name in experts:
        count, inner, outer = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (count, outer, inner // 32, 16), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(110, 130, (count, outer, inner // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    hf, mcore, back = tmp_path / "hf", tmp_path / "mcore", tmp_path / "back"
    hf.mkdir()
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    run("import", hf, mcore)
    run("export", mcore, back)
    run("verify", hf, back)
    run("verify", hf, mcore)
    found = stored_tensors(back)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
