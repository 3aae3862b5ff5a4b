"""The pool of gloo workers that all distributed tests share; it is the fuzzer's."""

from __future__ import annotations

from megarl.parity.pool import WorkerPool

__all__ = ["WorkerPool"]
