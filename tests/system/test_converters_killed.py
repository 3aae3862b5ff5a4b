"""Conversions as processes of their own: killed at random points and started again, and within a bound on
memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.cases.conversion import save_llama
from converters.families.read import read_architecture
from converters.mapping.rules import hf_tensors
from tests.tiers import sampled, slow

SIZE = 60_000_000
CAP_MIB = 640


def convert(argv: list[str], out: Path) -> None:
    """What ``python -m converters`` does; what it says goes into a file."""
    from converters.command import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*argv, "--json"])
    out.write_text(said.getvalue())
    raise SystemExit(code)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServerContext]:
    """Has torch in memory already: a process begins with its work, and not with ten seconds of imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["converters.command", "converters.importing", "converters.exporting", "benchmarks.cases.conversion"]
    )
    yield context


def start(server: ForkServerContext, out: Path, *argv: str) -> ForkServerProcess:
    process = server.Process(target=convert, args=(list(argv), out))
    process.start()
    return process


def done(process: ForkServerProcess, out: Path) -> dict[str, object]:
    process.join(timeout=300)
    assert process.exitcode == 0, out.read_text() if out.exists() else process.exitcode
    result: dict[str, object] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "hf"
    save_llama(directory, SIZE)
    return directory


@pytest.fixture(scope="module")
def imported(server: ForkServerContext, source: Path) -> tuple[Path, dict[str, object]]:
    """What an undisturbed run with six workers makes, and what it says."""
    out = source.parent / "said"
    return source.parent / "mcore", done(
        start(server, out, "import", str(source), str(source.parent / "mcore"), "--workers", "6"), out
    )


def written(directory: Path) -> int:
    return (
        sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
        if directory.is_dir()
        else 0
    )


def fingerprint(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_killed_at_random_points_and_run_again(
    server: ForkServerContext, source: Path, imported: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    generator, out, mcore = random.Random(seed), tmp_path / "said", imported[0]
    sizes = ("--max-shard-size", "50MB")
    done(start(server, out, "export", str(mcore), str(tmp_path / "back"), *sizes), out)
    for action, origin, expected, options in (
        ("import", source, mcore, ()),
        ("export", mcore, tmp_path / "back", sizes),
    ):
        target = tmp_path / f"{action}-again"
        killed = 0
        for _ in range(2):
            process = start(server, out, action, str(origin), str(target), *options)
            goal = generator.uniform(0.05, 0.9) * SIZE
            while written(tmp_path / f".{target.name}.partial") < goal and process.is_alive():
                time.sleep(0.002)
            process.kill()
            process.join()
            killed += (process.exitcode or 0) < 0
            if target.exists():
                break
        assert killed, "no run was killed before it ended"
        if not target.exists():
            done(start(server, out, action, str(origin), str(target), *options), out)
        assert fingerprint(target) == fingerprint(expected)
        assert not (tmp_path / f".{target.name}.partial").exists()


@sampled(1)
@pytest.mark.parametrize("action", ["import", "export"])
def test_memory_stays_within_its_bound(
    action: str,
    server: ForkServerContext,
    source: Path,
    imported: tuple[Path, dict[str, object]],
    tmp_path: Path,
) -> None:
    """Fewer workers run, and what the process reports at its end is within the bound."""
    mcore, unbounded = imported
    origin, out = source if action == "import" else mcore, tmp_path / "said"
    bound = ("--workers", "6", "--max-memory", f"{CAP_MIB}MiB")
    bounded = done(start(server, out, action, str(origin), str(tmp_path / "few"), *bound), out)
    assert int(str(bounded["workers"])) < int(str(unbounded["workers"])) == 6
    assert int(str(bounded["peak_memory"])) <= CAP_MIB * 2**20


@slow
@pytest.mark.parametrize("action", ["import", "export"])
def test_what_a_plan_says_of_memory_is_kept_where_tensors_are_narrowed(
    action: str, server: ForkServerContext, tmp_path: Path
) -> None:
    """A chunk of bfloat16 is made of twice its bytes in float32."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=8,
        vocab_size=50_000,
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "hf")
    tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in hf_tensors(read_architecture(config))}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    origin, out = tmp_path / "hf", tmp_path / "said"
    if action == "export":
        done(start(server, out, "import", str(origin), str(tmp_path / "mcore")), out)
        origin = tmp_path / "mcore"
    planned = done(start(server, out, "plan", str(origin), "--workers", "1", "--dtype", "bfloat16"), out)[
        "peak_memory"
    ]
    # a process differs from another by a few pages
    bound = int(str(planned)) + 2**23
    options = ("--workers", "1", "--dtype", "bfloat16", "--max-memory", str(bound))
    assert (
        int(
            str(
                done(start(server, out, action, str(origin), str(tmp_path / "out"), *options), out)[
                    "peak_memory"
                ]
            )
        )
        <= bound
    )
