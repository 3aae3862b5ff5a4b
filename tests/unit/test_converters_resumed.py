"""Taking up unfinished work: by several workers, and not without a word where something else is asked for
now."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters import exporting, importing
from converters.checkpoint.source import open_source
from converters.checkpoint.work import ConversionResult, RunOptions
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.importing import import_model, plan_import
from converters.opening import open_any, open_megatron
from converters.verify import verify
from tests.unit.converters_tiny import save_tiny


class Killed(BaseException):
    pass


def die(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_SMALLEST_FILE", 8_000)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", "qwen3")
    return tmp_path / "hf"


def bring_in(
    source: Path, target: Path, progress: io.StringIO | None = None, **plan_options: Any
) -> ConversionResult:
    return import_model(
        plan_import(open_source(source), **plan_options), target, RunOptions(progress=progress)
    )


def bring_out(
    source: Path, target: Path, progress: io.StringIO | None = None, **plan_options: Any
) -> ConversionResult:
    return export_model(
        plan_export(open_megatron(source), **plan_options), target, RunOptions(progress=progress)
    )


def kill(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """At the very end of its work."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(importing, "finish_checkpoint", die)
        patch.setattr(exporting, "_write_rest", die)
        run()


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def another_epsilon(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))


@pytest.mark.parametrize(
    ("options", "change", "changed"),
    [
        ({"dtype": torch.bfloat16}, None, ["--dtype"]),
        ({"vocab_multiple": 64}, None, ["--vocab-multiple"]),
        ({}, another_epsilon, ["config.json"]),
        (
            {},
            lambda hf: touch(hf / "model.safetensors"),
            ["the weights of the source (name, size or time of change of a file)"],
        ),
    ],
)
def test_an_import_that_starts_anew_says_why(
    options: dict[str, Any],
    change: Callable[[Path], None] | None,
    changed: list[str],
    hf: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    kill(monkeypatch, lambda: bring_in(hf, tmp_path / "out"))
    if change is not None:
        change(hf)
    said = io.StringIO()
    outcome = bring_in(hf, tmp_path / "out", said, **options)
    assert outcome.resumed == 0 and outcome.notes["started_anew_because_of"] == changed
    assert (
        f"an unfinished run is not resumed, because these have changed: {', '.join(changed)}\n"
        in said.getvalue()
    )
    assert "started_anew" not in (tmp_path / "out" / "conversion.json").read_text()
    assert verify(open_any(tmp_path / "out")) == []


def test_an_export_that_starts_anew_says_why(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_in(hf, tmp_path / "mcore")
    kill(monkeypatch, lambda: bring_out(tmp_path / "mcore", tmp_path / "out"))
    outcome = bring_out(tmp_path / "mcore", tmp_path / "out", dtype=torch.float16)
    assert outcome.notes["started_anew_because_of"] == ["--dtype"] and outcome.resumed == 0
    kill(monkeypatch, lambda: bring_out(tmp_path / "mcore", tmp_path / "again"))
    outcome = bring_out(tmp_path / "mcore", tmp_path / "again", max_shard_bytes=50_000)
    assert outcome.notes["started_anew_because_of"] == ["--max-shard-size"]


@pytest.mark.parametrize("direction", ["import", "export"])
def test_what_decides_nothing_starts_nothing_anew(
    direction: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of change of a config, and the config of a tokenizer."""
    bring_in(hf, tmp_path / "mcore")
    places = {"import": hf, "export": tmp_path / "mcore" / "huggingface"}
    run = {
        "import": lambda target: bring_in(hf, tmp_path / target),
        "export": lambda target: bring_out(tmp_path / "mcore", tmp_path / target),
    }[direction]
    kill(monkeypatch, lambda: run("out"))
    touch(places[direction] / "config.json")
    (places[direction] / "tokenizer_config.json").write_text("{}")
    outcome = run("out")
    assert outcome.resumed == outcome.size and "started_anew_because_of" not in outcome.notes
    assert any(path.name == "tokenizer_config.json" for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_config_that_changes_meanwhile_is_not_copied(direction: str, hf: Path, tmp_path: Path) -> None:
    bring_in(hf, tmp_path / "mcore")
    if direction == "import":
        plan = plan_import(open_source(hf))
        another_epsilon(hf)
        with pytest.raises(
            ConversionError, match=r"config\.json was changed while the weights were converted"
        ):
            import_model(plan, tmp_path / "out")
    else:
        checkpoint = plan_export(open_megatron(tmp_path / "mcore"))
        another_epsilon(tmp_path / "mcore" / "huggingface")
        with pytest.raises(
            ConversionError, match=r"config\.json was changed while the weights were converted"
        ):
            export_model(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("direction", ["import", "export"])
def test_work_goes_on_once_a_config_is_back(
    direction: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that changes after the last byte costs no finished work."""
    bring_in(hf, tmp_path / "mcore")
    module, name, place, run = {
        "import": (importing, "finish_checkpoint", hf, lambda: bring_in(hf, tmp_path / "out")),
        "export": (
            exporting,
            "index_of",
            tmp_path / "mcore" / "huggingface",
            lambda: bring_out(tmp_path / "mcore", tmp_path / "out"),
        ),
    }[direction]
    text, original = (place / "config.json").read_bytes(), getattr(module, name)

    def changed(*arguments: Any) -> Any:
        # the same content in other bytes: what was hashed is the file
        (place / "config.json").write_bytes(text + b" ")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, changed)
        with pytest.raises(
            ConversionError,
            match=r"(?s)config\.json was changed while .*restore the earlier file.*keeps .* GB of finished",
        ):
            run()
    assert not (tmp_path / "out").exists()
    (place / "config.json").write_bytes(text)
    outcome = run()
    assert outcome.resumed == outcome.size > 0


@pytest.mark.parametrize("direction", ["import", "export"])
def test_workers_share_the_check(
    direction: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces are under way at once, or the first waits in vain for the second."""
    bring_in(hf, tmp_path / "mcore")
    run = {
        "import": lambda: bring_in(hf, tmp_path / "out"),
        "export": lambda: bring_out(tmp_path / "mcore", tmp_path / "out"),
    }[direction]
    kill(monkeypatch, run)
    both, met = threading.Barrier(2, timeout=30), threading.Event()
    module, name = {"import": (importing, "read_item"), "export": (exporting, "read_box")}[direction]
    original = getattr(module, name)

    def together(*arguments: Any) -> Tensor:
        if not met.is_set():
            both.wait()
            met.set()
        result: Tensor = original(*arguments)
        return result

    monkeypatch.setattr(module, name, together)
    outcome = run()
    assert isinstance(outcome, ConversionResult) and outcome.resumed == outcome.size and met.is_set()
