"""Consoles of whole runs from the command to the third step, as a person sees them on a terminal and in a
pipe.

Their lines, with ``#`` in place of numbers and ``DIR`` of the test's directory, are those in
``tests/data/consoles``.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.small_recipes import make_small_model, small
from tests.system.whole_runs import LONGEST_WAIT_S, ON_TORCH, ROOT, Material, make_material, write_config
from tests.tiers import sampled

RECORDS = ROOT / "tests" / "data" / "consoles"
RUNS = ["grpo", "sft", "grpo-dtensor", "sft-fsdp1", "dpo"]
LONGEST_SILENCE_S = 10.0
"""A line comes every five seconds. This is no measure of speed: it holds however long a start takes."""


@dataclass
class Recording:
    """What a run wrote to standard output and standard error, and the longest time without a byte of
    either."""

    text: str = ""
    errors: str = ""
    silence_s: float = 0.0
    before_first_s: float = 0.0
    code: int = -1
    lines: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"), teach=False)


def configuration(name: str, directory: Path, material: Material) -> Path:
    path = directory / "run.yaml"
    if name == "dpo":
        config = small(
            "dpo-ultrafeedback-qwen2.5-1.5b-megatron",
            make_small_model(directory / "model", "qwen2"),
            directory,
        )
        config["dpo"]["max_num_steps"] = 3
        config["logger"]["tensorboard_enabled"] = False
        path.write_text(yaml.safe_dump(dict(config)))
        return path
    algorithm, _, backend = name.partition("-")
    base = write_config(directory / "base.yaml", algorithm, material)
    path.write_text(yaml.safe_dump({"defaults": str(base), **ON_TORCH.get(backend, {})}))
    return path


def record(config: Path, on_terminal: bool) -> Recording:
    command = [sys.executable, "-m", "megarl", "train", str(config), f"run_dir={config.parent / 'run'}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
        "TERM": "xterm-256color",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    errors, their_errors = os.pipe()
    begun = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=their_errors, env=environment
    )
    os.close(theirs)
    os.close(their_errors)
    found, last = Recording(), begun
    written: dict[int, bytes] = {ours: b"", errors: b""}
    with selectors.DefaultSelector() as selector:
        for descriptor in written:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < begun + LONGEST_WAIT_S:
            for key, _ in selector.select(1.0):
                piece = b""
                # the end of a terminal is an error
                with contextlib.suppress(OSError):
                    piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fd)
                    continue
                now = time.monotonic()
                found.before_first_s = found.before_first_s or now - begun
                found.silence_s, last = max(found.silence_s, now - last), now
                written[key.fd] += piece
    found.code = process.wait(60)
    for descriptor in written:
        os.close(descriptor)
    found.text, found.errors = written[ours].decode(), written[errors].decode()
    found.lines = lines_of(found.text, config.parent)
    return found


def lines_of(text: str, directory: Path) -> list[str]:
    """The lines of a console that stay, without signs of life, which depend on the machine's speed."""
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace(str(directory), "DIR")
    shown = re.sub(r"/\S*/([\w-]+\.jsonl)", r"\1", shown)
    lines = []
    for line in shown.replace("\r\n", "\n").split("\n"):
        # what a live line leaves behind is before the last return of the carriage
        kept = line.rpartition("\r")[2].rstrip()
        kept = re.sub(r"-?\b\d[\d,.]*(e[+-]?\d+)?[kMG]?", "#", kept)
        kept = re.sub(r"# [KM]iB", "# MiB", kept)
        # throughput depends on the machine, and a live line has a spinner or a bar
        if kept and not re.search(r" \.\.\. #|^[⠀-⣿]|━|^throughput|^mean of", kept):
            # Phases of a step are listed by their length; where all are too short to be shown, the throughput
            # follows at once.
            lines.append(
                re.sub(r"\s+", " ", re.split(r"  \(|  +# tok|  ETA", kept)[0]).replace("#m #s", "#s")
            )
    return lines


@sampled(1, name="grpo")
@pytest.mark.parametrize("on_terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("name", RUNS)
def test_consoles(name: str, on_terminal: bool, tmp_path: Path, material: Material) -> None:
    found = record(configuration(name, tmp_path, material), on_terminal)
    print(f"{name}: first output after {found.before_first_s:.2f} s, longest silence {found.silence_s:.1f} s")
    assert found.code == 0, found.text[-2000:] + found.errors[-2000:]
    assert found.silence_s < LONGEST_SILENCE_S
    assert "FutureWarning" not in found.text + found.errors
    path = RECORDS / f"{name}.txt"
    if os.environ.get("MEGARL_RECORD_CONSOLES"):
        path.write_text("\n".join(found.lines) + "\n")
    recorded = path.read_text().splitlines()
    if not on_terminal:
        assert found.lines == recorded
        assert "\x1b" not in found.text
        return
    missing = [line for line in recorded if line not in found.lines]
    assert not missing, found.lines
    # phases were seen live, and the cursor was given back
    assert ("policy built on" in found.text and "generation" in found.text) or "sft" in name or name == "dpo"
    assert found.text.rfind("\x1b[?25h") > found.text.rfind("\x1b[?25l") > 0
