"""Checkpoints that are signed: whatever somebody without the key changes in one, it is passed over by name,
and so do the converters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.command import build_parser
from converters.command import run as run_command
from converters.errors import ConversionError
from converters.files.signature import read_key, require_signed, signature_of
from megarl.checkpoint.background import seal
from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.manifest import MANIFEST_NAME, read_signing_key, verify, write_manifest
from megarl.checkpoint.node_memory import OwnMemory
from megarl.errors import ConfigError
from megarl.watch.run_state import read_run_state
from tests.unit.converters_tiny import save_tiny
from tests.unit.runs import make_run

KEY = "d8" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key", KEY)


def write_key(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def manager(directory: Path, key_file: Path | None, **changes: Any) -> CheckpointManager:
    return CheckpointManager(
        {
            "checkpoint_dir": directory,
            "signing_key_file": None if key_file is None else str(key_file),
            **changes,
        }
    )


def save(target: CheckpointManager, step: int) -> Path:
    path = target.init_tmp_checkpoint(step, {"step": step, "sampler": {}}, {"seed": 1})
    for name in ("weights", "optimizer"):
        (path / "policy" / name).mkdir(parents=True)
        (path / "policy" / name / "__0_0.distcp").write_bytes(bytes(range(50)) * step)
    (path / "policy" / "weights" / ".metadata").write_bytes(b"index")
    return target.finalize_checkpoint(path)


def rewritten(root: Path, **changes: Any) -> None:
    """A manifest that fits the files that are there, as anybody can write one, with its signature kept where
    that is not changed."""
    kept = json.loads((root / MANIFEST_NAME).read_text())["signature"]
    manifest = {**write_manifest(root), "signature": kept, **changes}
    (root / MANIFEST_NAME).write_text(
        json.dumps({name: value for name, value in manifest.items() if value is not None})
    )


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_file(root: Path) -> None:
    (root / "policy" / "weights" / "hf").mkdir()
    (root / "policy" / "weights" / "hf" / "config.json").write_text("{}")


def of_another_key(root: Path) -> None:
    manifest = json.loads((root / MANIFEST_NAME).read_text())
    rewritten(root, signature=signature_of(manifest, b"another key, of 32 bytes or more"))


def moved_files(root: Path) -> None:
    one, other = root / "policy" / "weights" / "__0_0.distcp", root / "policy" / "optimizer" / "__0_0.distcp"
    one.write_bytes(b"x" * one.stat().st_size)
    rewritten(root)
    shutil.copy(one, other)
    rewritten(root)


def linked(root: Path) -> None:
    path = root / "policy" / "weights" / "__0_0.distcp"
    path.rename(root.parent / "elsewhere")
    path.symlink_to(root.parent / "elsewhere")


TAMPERED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no signature": (lambda root: rewritten(root, signature=None), "is not signed"),
    "empty signature": (lambda root: rewritten(root, signature=""), "not by the key"),
    "a number for it": (lambda root: rewritten(root, signature=7), "not by the key"),
    "letters outside of ASCII": (lambda root: rewritten(root, signature="hmac-sha256:ä"), "not by the key"),
    "signature of another key": (of_another_key, "not by the key"),
    "another digit": (lambda root: flipped_signature(root), "not by the key"),
    "weights, manifest rewritten": (
        lambda root: (flipped(root / "policy/weights/__0_0.distcp"), rewritten(root)),
        "not by the key",
    ),
    "index, manifest rewritten": (
        lambda root: (flipped(root / "policy/weights/.metadata"), rewritten(root)),
        "not by the key",
    ),
    "where training stood": (
        lambda root: (flipped(root / "training_info.json"), rewritten(root)),
        "not by the key",
    ),
    "configuration": (lambda root: (flipped(root / "config.yaml"), rewritten(root)), "not by the key"),
    "a file removed, manifest rewritten": (
        lambda root: ((root / "config.yaml").unlink(), rewritten(root)),
        "not by the key",
    ),
    "a file added, manifest rewritten": (lambda root: (other_file(root), rewritten(root)), "not by the key"),
    "a file added": (other_file, "which is signed"),
    "files exchanged": (moved_files, "not by the key"),
    "weights alone": (lambda root: flipped(root / "policy/weights/__0_0.distcp"), "is damaged"),
    "a file removed": (lambda root: (root / "policy/weights/.metadata").unlink(), "cannot be read"),
    "a link in its place": (linked, "symbolic link"),
    "no manifest": (lambda root: (root / MANIFEST_NAME).unlink(), "is missing"),
}


def flipped_signature(root: Path) -> None:
    signature = json.loads((root / MANIFEST_NAME).read_text())["signature"]
    rewritten(root, signature=signature[:-1] + ("0" if signature[-1] != "0" else "1"))


@pytest.mark.parametrize("tampered", TAMPERED)
def test_what_somebody_without_the_key_changes_is_named_and_an_earlier_one_taken(
    tampered: str, tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "checkpoints"
    writer = manager(directory, key_file)
    earlier, root = save(writer, 1), save(writer, 2)
    assert (
        verify(root, key=KEY.encode()) == []
        and manager(directory, key_file).get_latest_checkpoint_path() == root
    )
    tamper, said = TAMPERED[tampered]
    tamper(root)
    problems = verify(root, key=KEY.encode())
    assert problems and said in "; ".join(problems), problems
    assert manager(directory, key_file).latest_and_damaged() == (earlier, {root: problems})
    assert said in caplog.text
    # what is read by a conversion is refused alike; of the whole checkpoint, and of the weights alone
    for weights in (root / "policy" / "weights", root):
        with pytest.raises(ConversionError):
            require_signed(weights, KEY.encode(), whole=True)
    require_signed(earlier / "policy" / "weights", KEY.encode(), whole=True)


def test_without_a_key_nothing_changes(tmp_path: Path, key_file: Path) -> None:
    plain, signed = (
        save(manager(tmp_path / "plain", None), 1),
        save(manager(tmp_path / "signed", key_file), 1),
    )
    with_it, without = (json.loads((each / MANIFEST_NAME).read_text()) for each in (signed, plain))
    assert with_it.pop("signature").startswith("hmac-sha256:") and with_it == without
    assert manager(tmp_path / "signed", None).get_latest_checkpoint_path() == signed
    assert manager(tmp_path / "plain", key_file).get_latest_checkpoint_path() is None


def test_the_signature_is_that_of_openssl(tmp_path: Path, key_file: Path) -> None:
    """Computed from the file by another program."""
    root = save(manager(tmp_path / "checkpoints", key_file), 3)
    manifest = json.loads((root / MANIFEST_NAME).read_text())
    signed = json.dumps(
        {name: manifest[name] for name in ("algorithm", "files", "version")},
        sort_keys=True,
        separators=(",", ":"),
    )
    done = subprocess.run(
        ["openssl", "dgst", "-sha256", "-hmac", KEY],
        input=b"megarl checkpoint manifest\n" + signed.encode(),
        capture_output=True,
        check=True,
    )
    assert manifest["signature"] == f"hmac-sha256:{done.stdout.decode().split()[-1]}"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: write_key(path, KEY, 0o640), "mode 0640.*chmod 600"),
        (lambda path: write_key(path, KEY, 0o604), "mode 0604"),
        (lambda path: write_key(path, KEY, 0o700), "mode 0700"),
        (lambda path: write_key(path, "k" * 31), "has 31 bytes, 32 to 4096"),
        (lambda path: write_key(path, "k" * 4097), "has 4097 bytes"),
        (lambda path: write_key(path, "  "), "has 0 bytes"),
        (lambda path: path.mkdir(mode=0o600), "is no file|Is a directory"),
        (lambda path: os.mkfifo(path, 0o600), "is no file"),
        (lambda path: None, "No such file"),
    ],
)
def test_a_key_that_others_may_read_or_that_is_none_is_refused(
    make: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    make(tmp_path / "key")
    with pytest.raises(ConfigError, match=rf"checkpointing\.signing_key_file = .*({said})"):
        read_signing_key(str(tmp_path / "key"))
    with pytest.raises(ConfigError):
        manager(tmp_path / "checkpoints", tmp_path / "key")
    assert read_signing_key(None) is None


def test_blanks_around_a_key_do_not_count(tmp_path: Path) -> None:
    assert (
        read_key(write_key(tmp_path / "key", f"  {KEY} \n"))
        == KEY.encode()
        == read_key(write_key(tmp_path / "key", KEY, 0o400))
    )


def test_pruning_counts_signed_checkpoints_alone(tmp_path: Path, key_file: Path) -> None:
    """What somebody else has put there is no reason to delete one's own."""
    directory = tmp_path / "checkpoints"
    own = save(manager(directory, key_file), 1)
    save(manager(directory, None), 9)
    again = manager(directory, key_file, keep_top_k=1)
    again.remove_old_checkpoints()
    assert own.is_dir() and again.get_latest_checkpoint_path() == own
    # one that would take its place goes, and not the other way
    shutil.copytree(directory / "step_9", directory / "step_1_replacement")
    assert again._settle_replacement(1) == own and verify(own, key=KEY.encode()) == []


def test_a_checkpoint_that_is_written_beside_the_steps_is_signed(tmp_path: Path, key_file: Path) -> None:
    directory = tmp_path / "checkpoints"
    writer = manager(directory, key_file)
    path = writer.init_tmp_checkpoint(4, {"step": 4, "sampler": {}})
    memory = OwnMemory(directory)
    assert memory.take(1000)
    (memory.directories("actor") / "weights").write_bytes(b"weights")
    memory.write(path).wait(60.0)
    final = writer.finalize_checkpoint(path, is_sealed=True)
    assert verify(final, key=KEY.encode()) == [] and verify(final, key=b"k" * 32) != []


def test_status_says_which_one_a_resume_would_take(tmp_path: Path, key_file: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(
        config.replace("checkpointing:\n", f"checkpointing:\n  signing_key_file: {key_file}\n")
    )
    own = save(manager(run_dir / "checkpoints", key_file), 1)
    save(manager(run_dir / "checkpoints", None), 2)
    state = read_run_state(run_dir).checkpoint
    assert state is not None and state.path == str(own)
    # who may not read the key cannot tell
    key_file.unlink()
    state = read_run_state(run_dir).checkpoint
    assert state is not None and state.step == 2


def converted(arguments: list[str]) -> int:
    return run_command(build_parser().parse_args(arguments))


def test_converters_take_the_key(tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real checkpoint as a trainer has it: weights and config below the directory with the manifest."""
    model = tmp_path / "model"
    save_tiny(model, "llama")
    root = tmp_path / "step_1"
    assert converted(["import", str(model), str(root / "policy" / "weights")]) == 0
    (root / "policy" / "optimizer").mkdir()
    (root / "policy" / "optimizer" / "state").write_bytes(b"state")
    seal(root)
    key = ["--signing-key", str(key_file)]
    with pytest.raises(ConversionError, match="is not signed"):
        converted(["export", str(root), str(tmp_path / "out"), *key])
    manifest = json.loads((root / MANIFEST_NAME).read_text())
    (root / MANIFEST_NAME).write_text(
        json.dumps({**manifest, "signature": signature_of(manifest, KEY.encode())})
    )
    # the optimizer's state is not read by it
    flipped(root / "policy" / "optimizer" / "state")
    assert converted(["export", str(root), str(tmp_path / "out"), *key]) == 0
    assert converted(["verify", str(root), str(model), *key]) == 0 == converted(["inspect", str(root), *key])
    with pytest.raises(ConversionError, match="only Megatron checkpoints are signed"):
        converted(["inspect", str(model), *key])
    with pytest.raises(ConversionError, match="has mode 0644"):
        converted(["inspect", str(root), "--signing-key", str(write_key(tmp_path / "open", KEY, 0o644))])
    with pytest.raises(ConversionError, match="not by the key"):
        converted(["inspect", str(root), "--signing-key", str(write_key(tmp_path / "other", "e7" * 32))])
    shard = next((root / "policy" / "weights").glob("*.distcp"))
    flipped(shard)
    for command in (
        ["export", str(root), str(tmp_path / "again")],
        ["verify", str(model), str(root)],
        ["plan", str(root)],
    ):
        with pytest.raises(ConversionError, match=rf"{shard.name} has other bytes"):
            converted([*command, *key])
    assert not (tmp_path / "again").exists()
    # without the key it is as it was
    assert converted(["inspect", str(root)]) == 0


def test_an_older_one_under_the_name_of_a_newer_one_is_no_rollback(tmp_path: Path, key_file: Path) -> None:
    """Its signature is right: it covers the step, and the name has to agree with that."""
    writer = manager(tmp_path, key_file)
    newest = save(writer, 3)
    shutil.copytree(save(writer, 2), tmp_path / "step_9")
    assert verify(tmp_path / "step_9", key=read_signing_key(str(key_file))) == []
    latest, damaged = manager(tmp_path, key_file).latest_and_damaged()
    assert latest == newest and list(damaged) == [tmp_path / "step_9"]
