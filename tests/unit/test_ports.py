"""Ports for a meeting later on are none that the kernel hands out meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megarl.distributed import virtual_cluster

HOST = "127.0.0.1"


@pytest.fixture
def kernels_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which ports the kernel hands out."""
    path = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(virtual_cluster, "_KERNELS_RANGE", path)
    return path


def test_a_port_is_outside_of_what_the_kernel_hands_out(kernels_range: Path) -> None:
    kernels_range.write_text("20002\t60999\n")
    assert {virtual_cluster.free_port(HOST) for _ in range(50)} == {20000, 20001}


def test_a_port_is_of_those_to_choose_from(kernels_range: Path) -> None:
    kernels_range.write_text("7003\t60999\n")
    assert {virtual_cluster.free_port(HOST, range(7001, 7010)) for _ in range(50)} == {7001, 7002}


def test_a_port_that_is_taken_is_passed_over(kernels_range: Path) -> None:
    kernels_range.write_text("20002\t60999\n")
    with socket.socket() as taken:
        taken.bind((HOST, 20001))
        assert {virtual_cluster.free_port(HOST) for _ in range(20)} == {20000}


@pytest.mark.parametrize("content", ["1024 65535", "", "32768 sixty thousand"])
def test_the_kernel_gives_one_where_it_has_all_or_says_nothing(kernels_range: Path, content: str) -> None:
    kernels_range.write_text(content)
    port = virtual_cluster.free_port(HOST)
    with socket.socket() as probe:
        probe.bind((HOST, port))


def test_a_foreign_address_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        virtual_cluster.free_port("198.51.100.7")
