"""Packing statistics, against sums done by hand."""

from __future__ import annotations

import logging

import pytest

from megarl.data.packing import PackingMetrics, get_packer

KEYS = {
    "num_sequences",
    "num_bins",
    "total_sequence_length",
    "total_bin_capacity",
    "total_waste",
    "average_utilization",
    "waste_ratio",
    "bin_balance",
    "theoretical_min_bins",
    "bin_efficiency",
}


def test_statistics_of_one_packing() -> None:
    stats = PackingMetrics().calculate_stats_only([7, 2, 3, 4], [[0, 1], [2], [3]], bin_capacity=10)
    assert set(stats) == KEYS
    assert stats["num_sequences"] == 4 and stats["num_bins"] == 3
    assert (
        stats["total_sequence_length"] == 16
        and stats["total_bin_capacity"] == 30
        and stats["total_waste"] == 14
    )
    assert stats["average_utilization"] == pytest.approx(16 / 30) and stats["waste_ratio"] == pytest.approx(
        14 / 30
    )
    assert stats["bin_balance"] == pytest.approx(1 - (9 - 3) / 10)
    assert stats["theoretical_min_bins"] == 2 and stats["bin_efficiency"] == pytest.approx(2 / 3)


def test_aggregation_recomputes_ratios_from_sums() -> None:
    metrics = PackingMetrics()
    assert metrics.get_aggregated_stats() == {}
    metrics.update([10], [[0]], 10)
    metrics.update([1, 1, 1], [[0], [1], [2]], 10)
    stats = metrics.get_aggregated_stats()
    assert set(stats) == KEYS | {"num_packings"}
    assert stats["num_packings"] == 2 and stats["num_bins"] == 4 and stats["total_waste"] == 27
    assert stats["average_utilization"] == pytest.approx(13 / 40)
    assert stats["bin_efficiency"] == pytest.approx(2 / 4)
    metrics.reset()
    assert metrics.get_aggregated_stats() == {}


def test_empty_packing() -> None:
    stats = PackingMetrics().calculate_stats_only([], [], 10)
    assert set(stats) == KEYS
    assert stats["num_bins"] == 0 and stats["average_utilization"] == 0.0 and stats["bin_efficiency"] == 1.0


def test_packer_collects_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    packer = get_packer("best_fit_decreasing", 10, collect_metrics=True)
    bins = packer.pack([6, 4, 5])
    packer.pack([1])
    assert packer.metrics is not None
    assert packer.get_aggregated_metrics()["num_sequences"] == 4
    assert packer.compute_metrics([6, 4, 5], bins)["num_bins"] == 2
    assert packer.get_aggregated_metrics()["num_packings"] == 2
    with caplog.at_level(logging.INFO, logger="megarl"):
        packer.metrics.print_aggregated_stats()
    assert "num_sequences = 4" in caplog.text
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}
    assert get_packer("best_fit_decreasing", 10).get_aggregated_metrics() == {}
