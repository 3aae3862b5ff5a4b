"""Triton's kernels on a CPU: in a process of its own, since one that interprets them cannot compile."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from megarl import env
from megarl.parity.paths import KERNELS
from tests.tiers import ROOT, slow

NEEDS_TRITON = [
    slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="no Triton here: bash launch/test.sh --part kernels installs it",
    ),
]


def interpreted(*module: str) -> str:
    """Return what a Python module prints while Triton's interpreter runs all kernels of the engine."""
    ran = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env={**env.snapshot(), **dict.fromkeys(KERNELS, "1"), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
