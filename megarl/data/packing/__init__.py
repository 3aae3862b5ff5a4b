"""Packing of sequences into token-bounded bins. Pure Python: importing it loads neither torch nor Ray."""

from __future__ import annotations

from megarl.data.packing.algorithms import (
    DEFAULT_PACKING_ALGORITHM,
    BestFitDecreasingPacker,
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
)
from megarl.data.packing.balance import deal_bins, sequence_cost
from megarl.data.packing.fitting import martello_toth_lower_bound
from megarl.data.packing.metrics import PackingMetrics

__all__ = [
    "DEFAULT_PACKING_ALGORITHM",
    "BestFitDecreasingPacker",
    "ConcatenativePacker",
    "FirstFitDecreasingPacker",
    "FirstFitPacker",
    "FirstFitShufflePacker",
    "ModifiedFirstFitDecreasingPacker",
    "PackingAlgorithm",
    "PackingMetrics",
    "SequencePacker",
    "deal_bins",
    "get_packer",
    "martello_toth_lower_bound",
    "sequence_cost",
]
