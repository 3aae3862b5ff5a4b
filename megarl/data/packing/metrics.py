"""Metrics of packing quality, per call and aggregated."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megarl.data.packing.fitting import load_of

logger = logging.getLogger(__name__)


class PackingMetrics:
    """Collects statistics of packings.

    Keys of the statistics of one packing:
        num_sequences, num_bins: counts.
        total_sequence_length, total_bin_capacity, total_waste: tokens.
        average_utilization: tokens divided by capacity, 0 to 1; waste_ratio: 1 minus that.
        bin_balance: 1 - (fullest bin - emptiest bin) / capacity; 1 if all bins are equally full.
        theoretical_min_bins: total length divided by the capacity of a bin, rounded up.
        bin_efficiency: theoretical_min_bins divided by num_bins, 0 to 1.

    For an empty packing all values are 0, except that efficiency and balance are 1.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def reset(self) -> None:
        """Clear the collected statistics."""
        self.history.clear()

    def update(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]], bin_capacity: int
    ) -> dict[str, float]:
        """Compute, store and return the statistics of one packing."""
        stats = self.calculate_stats_only(sequence_lengths, bins, bin_capacity)
        self.history.append(stats)
        return stats

    def calculate_stats_only(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]], bin_capacity: int
    ) -> dict[str, float]:
        """Return the statistics of one packing without storing them.

        Args:
            sequence_lengths: lengths in tokens.
            bins: lists of indices into ``sequence_lengths``.
            bin_capacity: maximum tokens per bin.
        """
        loads = [load_of(members, sequence_lengths) for members in bins]
        total = sum(loads)
        room = len(bins) * bin_capacity
        least_bins = -(-total // bin_capacity) if bin_capacity > 0 else 0
        return {
            "num_sequences": len(sequence_lengths),
            "num_bins": len(bins),
            "total_sequence_length": total,
            "total_bin_capacity": room,
            "total_waste": room - total,
            "average_utilization": total / room if room else 0.0,
            "waste_ratio": 1.0 - total / room if room else 0.0,
            "bin_balance": 1.0 - (max(loads) - min(loads)) / bin_capacity if room else 1.0,
            "theoretical_min_bins": least_bins,
            "bin_efficiency": least_bins / len(bins) if bins else 1.0,
        }

    def get_aggregated_stats(self) -> dict[str, float]:
        """Aggregate all stored statistics: counts and tokens are summed, ratios computed from the sums, and
        ``bin_balance`` averaged. ``num_packings`` is the number of packings.

        Returns:
            The statistics; empty if no packing was stored.
        """
        if not self.history:
            return {}
        summed_keys = (
            "num_sequences",
            "num_bins",
            "total_sequence_length",
            "total_bin_capacity",
            "total_waste",
            "theoretical_min_bins",
        )
        stats: dict[str, float] = dict.fromkeys(summed_keys, 0)
        for entry in self.history:
            for key in summed_keys:
                stats[key] += entry[key]
        room, bins = stats["total_bin_capacity"], stats["num_bins"]
        stats["average_utilization"] = stats["total_sequence_length"] / room if room else 0.0
        stats["waste_ratio"] = 1.0 - stats["average_utilization"] if room else 0.0
        stats["bin_balance"] = sum(entry["bin_balance"] for entry in self.history) / len(self.history)
        stats["bin_efficiency"] = stats["theoretical_min_bins"] / bins if bins else 1.0
        stats["num_packings"] = len(self.history)
        return stats

    def print_aggregated_stats(self) -> None:
        """Log the aggregated statistics at level INFO, one per line."""
        stats = self.get_aggregated_stats()
        if not stats:
            logger.info("packing: nothing packed yet")
        for key, value in stats.items():
            logger.info("packing: %s = %.6g", key, value)
