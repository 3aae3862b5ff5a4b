"""The Triton kernels of the gated delta rule: in Triton's interpreter they pass the tests of the PyTorch
code; compiled for three devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.interpreted import NEEDS_TRITON, interpreted

pytestmark = NEEDS_TRITON


@pytest.mark.parametrize("path", ["tests/unit/test_gated_delta.py", "tests/dist/test_gated_delta.py"])
def test_the_tests_of_the_pytorch_code_hold_for_the_kernels(path: str) -> None:
    """Against the recurrence token by token in float64: packed, of odd ends, and shared over 2, 4 and 8
    ranks. With a kernel whose sign is wrong they fail."""
    interpreted("pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", path)


@pytest.mark.parametrize("capability", [80, 90, 100], ids=["A100", "H100", "B200"])
def test_the_kernels_compile(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For devices that are not here, down to their machine code, at the widths of Qwen3.5; what a program
    shares fits into 99 KiB, which each of them has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megarl.models.engine import gated_delta_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    of_each = ("reads", "written", "keeps")
    tensors = {
        kernels._forward: ("solved", *of_each, "initial", "before", "corrections", "final"),
        kernels._backward: (*of_each, "of_before", "of_corrections", "of_final", "after", "total"),
    }
    for kernel, names in tensors.items():
        constants: dict[str, Any] = kernels._blocks(64, 128)
        stages = constants.pop("num_stages")
        if "initial" in names:
            constants["has_initial"] = True
        kinds = {name: "*fp32" for name in names}
        kinds |= dict.fromkeys(("first_chunks", "chunks_of_run"), "*i32")
        kinds |= dict.fromkeys(("heads", "size", "keys", "values"), "i32")
        kinds |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, kinds, constexprs=constants)
        made = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_stages": stages, "num_warps": 4}
        )
        assert made.asm["cubin"] and made.metadata.shared <= 99 * 1024
