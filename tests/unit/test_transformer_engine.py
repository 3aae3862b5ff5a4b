"""Transformer Engine is used where it works and not where its files are. It needs a GPU: here are packages
that stand for it, and a GPU is pretended. No layer of the real one has been run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.distributed.device import DeviceRuntime
from megarl.errors import ConfigError
from megarl.models.megatron import specs
from megarl.models.megatron import transformer_engine as subject
from tests.tiers import newest_megatron, slow

pytestmark = newest_megatron
META = "raise RuntimeError('Found empty meta package installed.\\nInstall a framework extension')"
LINKER = "raise OSError('libtransformer_engine.so: undefined symbol: _ZN3c10')"
ABSENT = "raise ImportError('libcudnn.so.9: cannot open shared object file')"
WORKS = """
import torch
class LayerNormLinear(torch.nn.Linear):
    def __init__(self, wide, out, params_dtype, device):
        super().__init__(wide, out, dtype=params_dtype, device=device)
"""
FAILS = """
class LayerNormLinear:
    def __init__(self, *arguments, **options):
        raise RuntimeError('no kernel image is available for execution on the device')
"""
Write = Callable[[str, str], Path]


def write_package(directory: Path, package: str, pytorch: str) -> Path:
    """A package with the metadata of an installed one; code of the package itself and of its half for
    torch."""
    (directory / "transformer_engine" / "pytorch").mkdir(parents=True)
    (directory / "transformer_engine" / "__init__.py").write_text(package)
    (directory / "transformer_engine" / "pytorch" / "__init__.py").write_text(pytorch)
    metadata = directory / "transformer_engine-2.20.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    return directory


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Installs a package, in a process that would compute on a GPU; small layers are tried on the CPU."""
    before = {
        name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"
    }
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(subject, "will_use_cuda", lambda: True)
    monkeypatch.setattr(subject, "runtime", lambda: DeviceRuntime(torch.device("cpu"), "gloo"))
    monkeypatch.syspath_prepend(tmp_path)

    def install(package: str, pytorch: str) -> Path:
        write_package(tmp_path, package, pytorch)
        importlib.invalidate_caches()
        return tmp_path

    subject.find.cache_clear()
    subject.try_it.cache_clear()
    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules.update(before)
    subject.find.cache_clear()
    subject.try_it.cache_clear()


def uses_it(wanted: Any, precision: str = "float32", *, has_experts: bool = False) -> bool:
    policy = {"precision": precision, "megatron_cfg": {"transformer_engine": wanted}}
    return subject.uses_transformer_engine(policy, has_experts=has_experts)


@pytest.mark.parametrize(
    ("package", "pytorch", "reason"),
    [
        (META, "", "it cannot be imported (RuntimeError: Found empty meta package installed.)"),
        ("", LINKER, "it cannot be imported (OSError: libtransformer_engine.so: undefined symbol: _ZN3c10)"),
        ("", ABSENT, "it cannot be imported (ImportError: libcudnn.so.9: cannot open shared object file)"),
        ("", "raise AssertionError", "it cannot be imported (AssertionError: no message)"),
        (
            "",
            FAILS,
            (
                "a small layer of it fails on this device (RuntimeError: no kernel image is available for "
                "execution on the device)"
            ),
        ),
    ],
    ids=["meta package alone", "another torch", "no cuDNN", "no message", "another device"],
)
def test_one_that_does_not_work_is_left_out_or_refused(
    package: str, pytorch: str, reason: str, installed: Write, caplog: pytest.LogCaptureFixture
) -> None:
    installed(package, pytorch)
    assert subject.try_it() == subject.Finding(reason, is_fault=True)
    assert not uses_it("auto")
    assert reason in caplog.text and "megarl doctor" in caplog.text
    with pytest.raises(ConfigError) as refused:
        uses_it(True)
    assert (
        f"{subject.KEY} = True" in str(refused.value)
        and reason in str(refused.value)
        and "megarl doctor" in str(refused.value)
    )


def test_one_that_is_not_wanted_is_not_tried(installed: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers may end the process, which is why somebody does not want it."""
    installed("", FAILS)
    assert not uses_it(False)
    monkeypatch.setattr(specs, "_layers_of_chunk", lambda config, chunk, stage: [0])
    specs.decoder_spec(
        TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, normalization="RMSNorm"),
        None,
        fused=False,
    )
    assert subject.try_it.cache_info().misses == 0


def test_what_cannot_be_imported_is_hidden_from_later_imports(installed: Write) -> None:
    """Half of it was imported; whoever asks afterwards, as Megatron-Core does, is told that there is none."""
    installed("kept = 1", LINKER)
    assert subject.find().is_fault
    assert [name for name in sys.modules if name.startswith("transformer_engine.")] == []
    with pytest.raises(ModuleNotFoundError):
        import transformer_engine.pytorch  # noqa: F401
    assert importlib.util.find_spec("transformer_engine") is None


def test_one_that_works_is_taken_unless_it_is_not_wanted(installed: Write) -> None:
    installed("", WORKS)
    state = torch.get_rng_state()
    assert subject.try_it() == subject.Finding()
    assert torch.equal(torch.get_rng_state(), state)
    assert [uses_it(wanted) for wanted in ("auto", True, False)] == [True, True, False]


def test_a_dense_model_in_bfloat16_takes_it_where_it_is_asked_for(installed: Write) -> None:
    """Measured on an H200, such models train faster by the portable layers."""
    installed("", WORKS)
    assert [uses_it(wanted, "bfloat16") for wanted in ("auto", True)] == [False, True]
    assert uses_it("auto", "bfloat16", has_experts=True) and uses_it("auto", "float16")


def test_on_a_cpu_it_is_neither_imported_nor_a_fault(
    installed: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed("raise SystemExit('imported')", "")
    monkeypatch.setattr(subject, "will_use_cuda", lambda: False)
    assert not uses_it("auto") and caplog.text == ""
    with pytest.raises(ConfigError, match="computes on a CPU"):
        uses_it(True)


@pytest.mark.usefixtures("installed")
def test_without_it_nothing_is_said_unless_it_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is installed")
    assert not uses_it("auto") and caplog.text == ""
    with pytest.raises(ConfigError, match="not installed"):
        uses_it(True)


_WHOLE = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
import megarl.models.megatron.backend
from megarl.models.megatron import specs, transformer_engine
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.transformer.transformer_config import TransformerConfig

specs._layers_of_chunk = lambda config, chunk, stage: [0, 1]
config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, normalization="RMSNorm")
policy = {"precision": "float32", "megatron_cfg": {"transformer_engine": "auto"}}
fused = transformer_engine.uses_transformer_engine(policy, has_experts=False)
block = specs.decoder_spec(config, None, fused=fused)
print(transformer_engine.find().reason)
print(HAVE_TE, USING_PYTORCH_OPTIMIZER, fused, block.layer_norm.__name__, len(block.layer_specs))
"""


@slow
def test_megatron_takes_the_portable_layers_beside_the_meta_package(tmp_path: Path) -> None:
    """On its own Megatron-Core ends the worker there: it takes an ImportError for the absence of the package,
    and no other error."""
    site = write_package(tmp_path, META, "")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{Path(__file__).parents[2]}",
        "MEGARL_DEVICE": "cuda",
    }
    done = subprocess.run(
        [sys.executable, "-c", _WHOLE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reason, found = done.stdout.splitlines()[-2:]
    assert "Found empty meta package" in reason
    assert found.split() == ["False", "True", "False", "PortableRMSNorm", "2"]
