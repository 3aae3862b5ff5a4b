"""Weights sent to an engine apart: see ``benchmarks.refit_broadcast``."""

from __future__ import annotations

from benchmarks.refit_broadcast import measure

__all__ = ["measure"]
