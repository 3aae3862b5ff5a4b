"""Reading checkpoints: only the needed bytes, and clear refusal of damaged, incomplete or hostile ones."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.check import check_source
from converters.checkpoint.source import open_source
from converters.errors import ConversionError
from converters.families.read import read_architecture
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import save_tiny, tiny_config

pytestmark = newest_megatron


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Two files and an index."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "first": torch.randn(5, 7, generator=generator).bfloat16(),
        "second": torch.randn(4, 3, 2, generator=generator),
        "scalar": torch.tensor(3.5, dtype=torch.float16),
        "empty": torch.zeros(0, 3),
    }
    save_file({name: tensors[name] for name in ("first", "scalar")}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in ("second", "empty")}, tmp_path / "b.safetensors")
    write_index(
        tmp_path,
        {
            "first": "a.safetensors",
            "scalar": "a.safetensors",
            "second": "b.safetensors",
            "empty": "b.safetensors",
        },
    )
    return tmp_path, tensors


def test_names_shapes_dtypes_and_values(pair: tuple[Path, dict[str, Tensor]]) -> None:
    directory, tensors = pair
    source = open_source(str(directory))
    assert source.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert source.dtype(name) == tensor.dtype
        assert torch.equal(source.read(name), tensor)


SLICES = [
    ("first", (slice(1, 4),)),
    ("first", (slice(0, 0),)),
    ("first", (slice(None), slice(2, 7))),
    ("first", (slice(4, 5), slice(6, 7))),
    ("second", (slice(1, 3), slice(None), slice(1, 2))),
    ("second", ()),
    ("empty", (slice(0, 0), slice(1, 2))),
    ("scalar", None),
]


@pytest.mark.parametrize(("name", "slices"), SLICES)
def test_slices_are_owned_and_no_larger_than_asked(
    pair: tuple[Path, dict[str, Tensor]], name: str, slices: Any
) -> None:
    directory, tensors = pair
    expected = tensors[name] if slices is None else tensors[name][slices]
    read = open_source(directory).read(name, slices)
    assert torch.equal(read, expected)
    assert read.is_contiguous()
    assert read.untyped_storage().nbytes() == expected.numel() * expected.element_size()


@pytest.mark.parametrize(
    "slices", [(slice(0, 6),), (slice(-1, 2),), (slice(3, 2),), (slice(0, 4, 2),), (slice(0, 1),) * 3]
)
def test_slices_outside_the_tensor_are_refused(
    pair: tuple[Path, dict[str, Tensor]], slices: tuple[slice, ...]
) -> None:
    with pytest.raises(ConversionError, match=r"first has shape \[5, 7\]"):
        open_source(pair[0]).read("first", slices)


def test_a_slice_of_a_huge_tensor_costs_no_memory(tmp_path: Path) -> None:
    """The tensor is larger than what the process may grow by; the file is sparse, so that it takes no
    disk."""
    rows, columns = 1 << 20, 1024
    header = json.dumps(
        {"huge": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, 2 * rows * columns]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * rows * columns)
    program = f"""
import resource
from converters.checkpoint.source import open_source
source = open_source({str(tmp_path)!r})
source.shape("huge")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read = source.read("huge", (slice(500_000, 500_011),))
assert read.shape == (11, {columns}), read.shape
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 * 1024, "KiB"


def test_the_single_file_wins_over_an_index_as_in_transformers(pair: tuple[Path, dict[str, Tensor]]) -> None:
    save_file({"only": torch.ones(2)}, pair[0] / "model.safetensors")
    assert open_source(pair[0]).names() == ["only"]


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "~/no-such-model", "a/b/c", Path("nowhere")])
def test_a_missing_directory_is_refused_without_asking_the_hub(name: str | Path) -> None:
    with pytest.raises(ConversionError, match="does not exist"):
        open_source(name)


def test_a_hub_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConversionError, match=r"'nobody/no-such-model'; .*(revision default).*Fix: check the name"
    ):
        open_source("nobody/no-such-model")
    with pytest.raises(ConversionError, match=r"no such directory"):
        open_source("not a valid id!")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"first": "../a.safetensors"}}', "is not the plain name"),
        ('{"weight_map": {"first": "/etc/passwd"}}', "is not the plain name"),
        ('{"weight_map": {"first": "a.bin"}}', "is not the plain name"),
        ('{"weight_map": {"first": ".."}}', "is not the plain name"),
        ('{"weight_map": {"first": 3}}', "is not the plain name"),
        (
            '{"weight_map": {"first": "c.safetensors", "x": "d.safetensors"}}',
            r"c.safetensors does not exist[\s\S]*d.safetensors does not",
        ),
    ],
)
def test_a_bad_index_is_refused(pair: tuple[Path, dict[str, Tensor]], content: str, message: str) -> None:
    (pair[0] / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConversionError, match=message):
        open_source(pair[0])


def test_an_index_that_names_absent_tensors_is_refused_on_first_use(
    pair: tuple[Path, dict[str, Tensor]],
) -> None:
    write_index(pair[0], {"first": "a.safetensors", "ghost": "a.safetensors", "second": "b.safetensors"})
    source = open_source(pair[0])
    with pytest.raises(ConversionError, match=r"lacks tensors[\s\S]*ghost"):
        source.shape("first")
    assert source.shape("second") == (4, 3, 2)


def test_missing_tensors_and_files_are_refused(
    pair: tuple[Path, dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_source(pair[0])
    for call in (source.shape, source.dtype, source.read):
        with pytest.raises(ConversionError, match="has no tensor 'third'"):
            call("third")
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConversionError, match=r"has neither model.safetensors nor"):
        open_source(empty)
    (empty / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConversionError, match=r"only pytorch_model.bin"):
        open_source(empty)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file_is_refused(pair: tuple[Path, dict[str, Tensor]], keep: int) -> None:
    content = (pair[0] / "a.safetensors").read_bytes()
    (pair[0] / "a.safetensors").write_bytes(content[:keep])
    with pytest.raises(ConversionError, match=r"a.safetensors is (not a readable safetensors file|empty)"):
        open_source(pair[0]).read("first")


def test_a_matching_checkpoint_passes(tmp_path: Path) -> None:
    for name in ("llama_all_biases", "qwen2_tied", "qwen3"):
        model = save_tiny(tmp_path / name, name, max_shard_size="50KB")
        check_source(open_source(tmp_path / name), read_architecture(model.config))


def test_every_mismatch_is_reported_at_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(52, 42)
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(42)
    tensors["model.norm.weight"] = torch.ones(41)
    tensors["model.layers.1.mlp.gate_proj.weight"] = tensors["model.layers.1.mlp.gate_proj.weight"].to(
        torch.float8_e4m3fn
    )
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError) as caught:
        check_source(open_source(tmp_path), read_architecture(tiny_config("qwen2")))
    assert sorted(caught.value.details) == [
        (
            "dtype: model.layers.1.mlp.gate_proj.weight is torch.float8_e4m3fn; quantised weights have to be "
            "dequantised first"
        ),
        "missing: lm_head.weight [101, 42]",
        "missing: model.layers.2.mlp.up_proj.weight [52, 42]",
        "shape: model.norm.weight is [41], config.json asks for [42] = [hidden_size]",
        "unknown: model.layers.0.self_attn.o_proj.bias [42]",
        "unknown: model.layers.3.mlp.up_proj.weight [52, 42]",
    ]


def test_long_reports_are_cut_but_kept(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    with pytest.raises(ConversionError, match="and 10 more") as caught:
        check_source(
            open_source(tmp_path),
            read_architecture(tiny_config("qwen2", hidden_size=36, intermediate_size=50)),
        )
    assert len(caught.value.details) == 30


def test_stored_rotary_frequencies_are_passed_over(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors")
    check_source(open_source(tmp_path), read_architecture(tiny_config("llama")))


def test_a_redundant_output_layer_must_equal_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("converters.checkpoint.work.CHUNK_BYTES", 42 * 4 * 10)
    save_tiny(tmp_path, "llama_tied")
    architecture = read_architecture(tiny_config("llama_tied"))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    check_source(open_source(tmp_path), architecture)
    tensors["lm_head.weight"][100, 41] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    check_source(open_source(tmp_path), architecture, compare_tied=False)
    with pytest.raises(ConversionError, match="tie_word_embeddings is true: set it to false"):
        check_source(open_source(tmp_path), architecture)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].half()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match="differs from"):
        check_source(open_source(tmp_path), architecture)
