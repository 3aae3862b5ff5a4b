"""Import and export of a bfloat16 model, against a plain copy of its bytes and against loading and saving it
with transformers.

Everything is flushed to disk within the measured time. Each conversion runs in its own process and reports
its peak memory. This peak is compared with the size of one shard plus the largest tensor, both with and
without the memory that PyTorch, transformers and other imports take.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.point import Metric, Point
from benchmarks.timing import seconds_of
from converters.checkpoint.safetensors_file import SafetensorsFile

WIDTH, FFN, HEADS, GROUPS, HEAD_DIM, VOCABULARY = 2048, 5632, 32, 4, 64, 32000
BLOCK = 8 * 2**20
SHARD_BYTES = 400_000_000
TRANSFORMERS = """
import json, os, sys, time
import torch
from transformers import AutoModelForCausalLM
begun = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", low_cpu_mem_usage=True)
model.save_pretrained(sys.argv[2], max_shard_size="400MB")
os.sync()
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({"seconds": time.monotonic() - begun, "peak_memory": peak}))
"""
IMPORTS = """
import json, sys
from pathlib import Path
import converters.command, converters.exporting, converters.importing, converters.checkpoint.quantized
from converters.families.read import read_architecture
from converters.checkpoint.artifacts import read_config
from converters.files.process import status_bytes
read_architecture(read_config(Path(sys.argv[1])))
print(json.dumps({"peak_memory": status_bytes("VmHWM")}))
"""


def measure_import(quick: bool) -> Iterator[Point]:
    """Yield the cost of a conversion from Hugging Face to Megatron-Core."""
    return _measured("import", quick)


def measure_export(quick: bool) -> Iterator[Point]:
    """Yield the cost of a conversion from Megatron-Core to Hugging Face."""
    return _measured("export", quick)


def _measured(direction: str, quick: bool) -> Iterator[Point]:
    """Yield the cost of converting a model of 0.1 GB, with one worker and with two."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("MEGARL_BENCHMARK_DIR")) as temporary:
        root = Path(temporary)
        written = save_llama(root / "hf", 100_000_000)
        source = root / "hf"
        bound = shard_and_tensor(source)
        if direction == "export":
            source = root / "mcore"
            _convert("import", root / "hf", source, 2)
        imports = _json_of([sys.executable, "-c", IMPORTS, str(root / "hf")])
        conversions: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        limits: dict[str, list[dict[str, Any]]] = {"copy": [], "transformers": [], "imports": [imports]}
        for _ in range(1 if quick else 2):
            limits["copy"].append({"seconds": _copy(source, root / "copy")})
            for workers, runs in conversions.items():
                runs.append(_convert(direction, source, root / "made", workers))
            limits["transformers"].append(
                _json_of([sys.executable, "-c", TRANSFORMERS, str(root / "hf"), str(root / "saved")])
            )
        for workers, runs in conversions.items():
            metrics = _metrics({"conversion": runs, **limits}, written, bound)
            yield Point({"gigabytes": round(written / 1e9, 2), "workers": workers}, metrics)


def shard_and_tensor(directory: Path) -> int:
    """Return the size of a model's largest file plus that of its largest tensor, in bytes."""
    paths = list(directory.glob("*.safetensors"))
    files = [SafetensorsFile(path) for path in paths]
    names = [(file, name) for file in files for name in file.keys()]  # noqa: SIM118 - no dict
    sizes = [torch.Size(file.shape(name)).numel() * file.dtype(name).itemsize for file, name in names]
    return max(path.stat().st_size for path in paths) + max(sizes)


def save_llama(directory: Path, size: int) -> int:
    """Save a Llama of about ``size`` bytes with random weights, laid out as a downloaded model is. Return the
    exact number of bytes of its weights."""
    from transformers import LlamaConfig

    query, key = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    layer = {
        "input_layernorm": (WIDTH,),
        "self_attn.q_proj": (query, WIDTH),
        "self_attn.k_proj": (key, WIDTH),
        "self_attn.v_proj": (key, WIDTH),
        "self_attn.o_proj": (WIDTH, query),
        "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    a_layer = sum(2 * torch.Size(shape).numel() for shape in layer.values())
    # Embedding and output layer take at most half of the bytes.
    vocabulary = min(VOCABULARY, size // (8 * WIDTH))
    layers = max(1, round((size - 4 * vocabulary * WIDTH) / a_layer))
    shapes = {
        "model.embed_tokens.weight": (vocabulary, WIDTH),
        "lm_head.weight": (vocabulary, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    shapes |= {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(layers)
        for name, shape in layer.items()
    }
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        vocab_size=vocabulary,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, Tensor]] = [{}]
    total = 0
    weight_map = {}
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD_BYTES:
            _save_shard(directory, len(shards), shards[-1])
            shards[-1] = {}
            shards.append({})
        shards[-1][name] = torch.randn(shape, generator=generator).bfloat16()
        weight_map[name] = _shard_name(len(shards))
        total += shards[-1][name].nbytes
    _save_shard(directory, len(shards), shards[-1])
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def _shard_name(number: int) -> str:
    return f"model-part-{number}.safetensors"


def _save_shard(directory: Path, number: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / _shard_name(number), metadata={"format": "pt"})


def _copy(source: Path, target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()

    def copy() -> None:
        for path in sorted(path for path in source.iterdir() if path.is_file()):
            # Open the files unbuffered: the limit is one copy of the bytes, without a second one inside
            # Python.
            with (
                path.open("rb", buffering=0) as reader,
                (target / path.name).open("wb", buffering=0) as writer,
            ):
                while data := reader.read(BLOCK):
                    writer.write(data)
                os.fsync(writer.fileno())

    return seconds_of(copy)


def _convert(action: str, source: Path, target: Path, workers: int) -> dict[str, Any]:
    argv = [
        sys.executable,
        "-m",
        "converters",
        action,
        str(source),
        str(target),
        "--overwrite",
        "--json",
        "--workers",
        str(workers),
    ]
    return _json_of([*argv, *(["--max-shard-size", str(SHARD_BYTES)] if action == "export" else [])])


def _json_of(argv: list[str]) -> dict[str, Any]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[:4])} failed with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _metrics(measured: dict[str, list[dict[str, Any]]], size: int, bound: int) -> dict[str, Metric]:
    seconds = {
        name: [float(one["seconds"]) for one in runs] for name, runs in measured.items() if name != "imports"
    }
    metrics = {
        f"{name}_speed": Metric.of("GB/s", [size / 1e9 / one for one in each])
        for name, each in seconds.items()
    }
    metrics["against_copy"] = Metric.ratio(
        "the speed of a plain copy", seconds["copy"], seconds["conversion"]
    )
    metrics["against_transformers"] = Metric.ratio(
        "the speed of transformers", seconds["transformers"], seconds["conversion"]
    )
    peaks = {
        name: [float(one["peak_memory"]) for one in measured[name]]
        for name in ("conversion", "transformers", "imports")
    }
    metrics |= {
        f"{name}_peak_memory": Metric.of("MiB", [one / 2**20 for one in each]) for name, each in peaks.items()
    }
    shard = "one shard and the largest tensor"
    metrics["peak_memory_against_shard"] = Metric.ratio(
        shard, peaks["conversion"], [bound] * len(peaks["conversion"])
    )
    beyond = [peak - peaks["imports"][0] for peak in peaks["conversion"]]
    metrics["peak_memory_beyond_imports_against_shard"] = Metric.ratio(shard, beyond, [bound] * len(beyond))
    return metrics
