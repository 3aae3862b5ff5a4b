"""Recording of functions: what is run when, and the plain way where a function cannot be recorded."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from megarl.models.engine import graphs
from megarl.models.engine.graphs import Graphs, graphs_on
from tests.recording import TapeCapture


def test_each_key_and_shape_warms_up_is_recorded_and_then_replayed() -> None:
    """Python is not run again, and what the function wrote is written by each replay."""
    capture, calls, total = TapeCapture(), [], torch.zeros(3)

    def add(values: Tensor) -> Tensor:
        calls.append(len(values))
        total[: len(values)].add_(values)
        return total[: len(values)] * 2

    recorder = Graphs(capture)
    assert recorder.run("add", add, torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    before = total.clone()
    recorder.run("add", add, torch.ones(3))
    # the tape runs a function to see what it does, a graph does not: only what comes after it counts
    total.copy_(before)
    for step in range(1, 4):
        assert recorder.run("add", add, torch.full((3,), 10.0)).tolist() == [2 * (1.0 + 10 * step)] * 3
    python_calls = len(calls)
    assert recorder.run("add", add, torch.ones(2)).tolist() == [64.0, 64.0]
    assert len(calls) == python_calls + 1 and (capture.recorded, capture.replayed) == (1, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda values: values * values.sum().item(),
        lambda values: values * values.tolist()[0],
        lambda values: values[values > 0] * 1,
    ],
    ids=["item", "tolist", "shape"],
)
def test_what_reads_the_device_is_run_as_it_is(
    function: graphs.Function, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_failures", [])
    recorder = Graphs(TapeCapture())
    values = torch.arange(1.0, 4.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            torch.testing.assert_close(
                recorder.run("read", function, values), function(values), atol=0, rtol=0
            )
    assert recorder.capture is None
    assert caplog.text.count("decoding without CUDA graphs") == 1
    # nor does the next call of generation try
    later = graphs_on(torch.device("cuda", 0))
    assert later.capture is None and later.few_sizes and recorder.few_sizes


def test_nothing_is_recorded_on_a_cpu_or_where_it_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_logged", set())
    assert graphs_on(torch.device("cpu"), "of no interest here").capture is None
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert graphs_on(torch.device("cuda", 0), "its cache grows").capture is None
    assert caplog.text.count("its cache grows") == 1 and "no interest" not in caplog.text
