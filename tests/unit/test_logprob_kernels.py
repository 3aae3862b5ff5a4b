"""The Triton kernels of the log-probabilities: interpreted, against float64; what they read and write;
compiled for three devices."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.interpreted import NEEDS_TRITON, interpreted
from tests.unit.logit_passes import BY_KERNELS, VARIANTS

pytestmark = NEEDS_TRITON
# half a unit in the last place of a gradient up to 2, which is handed back in the dtype of the logits;
# Triton's interpreter cuts bfloat16 off where a device rounds it
SPACING = {"torch.bfloat16": 2**-7, "torch.float16": 2**-11}


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads(interpreted("tests.unit.logprob_kernel_figures"))


def test_values_and_gradients_equal_float64(figures: Any) -> None:
    wrong = {
        name: found
        for name, found in figures["errors"].items()
        if not (
            found["value"] < 1e-5
            and found["gradient"] < 1e-5 + SPACING.get(name.removesuffix(", entropies"), 0.0)
        )
    }
    assert not wrong and len(figures["errors"]) > 40


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_pass_reads_the_logits_once(figures: Any, variant: str) -> None:
    """And some ten numbers a token and block."""
    assert figures["passes"][variant] == pytest.approx(BY_KERNELS, abs=0.005)


def test_rows_without_finite_logits_harm_no_other(figures: Any) -> None:
    assert figures["finite"] == [False, False, False, True]


@pytest.mark.parametrize("dtype", [*SPACING, "torch.float32"])
def test_large_weights_of_further_tokens_are_rounded_with_what_cancels_them(figures: Any, dtype: str) -> None:
    """A teacher's tokens that have nearly all of the policy's probability: 4,000 less 4,000 is 1."""
    assert figures["further"][dtype] < 1e-3 + SPACING.get(dtype, 0.0)


def test_targets_that_are_no_token_give_what_the_pytorch_code_gives(figures: Any) -> None:
    assert figures["ignored"] < 1e-6


def test_the_tests_of_the_pytorch_code_hold_for_the_kernels() -> None:
    chosen = "not (half_precision and dtype0)"  # whose gradient in bfloat16 the interpreter cuts off
    interpreted(
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
        "tests/unit/test_logprobs.py",
    )


def test_layouts_agree_where_the_kernels_compute() -> None:
    """Whole training steps, on one and more ranks, against the reference that ``megarl parity`` has."""
    interpreted("megarl", "parity", "--cases", "4", "--seed", "22")


@pytest.mark.parametrize("capability", [80, 90, 100], ids=["A100", "H100", "B200"])
def test_the_kernels_compile(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For devices that are not here, down to their machine code; numbers are rounded there, not cut off."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megarl.models.engine import logprob_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled(
        kernel: Any, dtype: str, pointers: dict[str, str], integers: tuple[str, ...], **constants: Any
    ) -> dict[str, Any]:
        signature = {
            "logits": f"*{dtype}",
            **pointers,
            **dict.fromkeys(integers, "i32"),
            "temperature": "fp32",
        }
        source = ASTSource(
            kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
        )
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"num_warps": 8}).asm

    for dtype, (is_scaled, is_bounded) in zip(
        ("bf16", "fp16", "fp32"), itertools.product((True, False), repeat=2), strict=False
    ):
        switches = {
            "is_scaled": is_scaled,
            "is_bounded": is_bounded,
            "with_entropies": is_bounded or not is_scaled,
        }
        constants = {**switches, "block": kernels.LARGEST_BLOCK}
        sums = dict.fromkeys(("bounds", "maxima", "totals", "target_logits", "moments"), "*fp32")
        pointers = {"targets": "*i64", **sums}
        forward = compiled(kernels._statistics, dtype, pointers, ("row_stride", "start", "own"), **constants)
        sums = dict.fromkeys(("bounds", "maxima", "scales", "target_weights", "slopes"), "*fp32")
        further = {"further": "*i64", "further_weights": "*fp32"}
        pointers = {"gradient": f"*{dtype}", "targets": "*i64", **sums, **further}
        integers = ("row_stride", "gradient_stride", "start", "own", "width", "further_count")
        backward = compiled(kernels._gradient, dtype, pointers, integers, **constants)
        assert forward["cubin"] and backward["cubin"]
        assert ["div.rn" in made["ptx"] for made in (forward, backward)] == [is_scaled] * 2
        assert dtype == "fp32" or f"cvt.rn.{dtype.replace('fp', 'f')}" in backward["ptx"]
