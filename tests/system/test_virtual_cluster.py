"""Reserving places in a real local Ray."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import ray

import megarl
from megarl import env
from megarl.distributed.node_choice import RayNode
from megarl.distributed.ray_runtime import forwarded_environment, init_ray, is_single_host
from megarl.distributed.virtual_cluster import (
    PY_EXECUTABLES,
    RayVirtualCluster,
    ResourceInsufficientError,
    _retry,
    check_places_together,
)
from megarl.errors import ClusterError, ConfigError, DeadlineError, StateError


def test_local_ray_listens_on_loopback_only_and_asks_for_a_token(local_ray: int) -> None:
    import psutil

    @ray.remote(num_cpus=0)
    def auth_mode() -> str | None:
        return os.environ.get("RAY_AUTH_MODE")

    assert ray.get(auth_mode.remote()) == "token"
    driver = psutil.Process()
    heard = {
        (process.name(), connection.laddr.ip)
        for process in [driver, *driver.children(recursive=True)]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(heard) > 2, heard
    open_to_others = {
        item for item in heard if not ipaddress.ip_address(item[1].removeprefix("::ffff:")).is_loopback
    }
    assert not open_to_others
    assert is_single_host()


ENTERS = """
import sys
from ray._raylet import GcsClient, get_authentication_mode
try:
    print("entered", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None) is not None)
except Exception as error:
    print("refused", type(error).__name__, error)
"""


@pytest.mark.parametrize("has", ["the token", "no token", "another token"])
def test_whoever_has_not_the_token_does_not_enter(local_ray: int, has: str) -> None:
    """From a process of the same machine, which reaches the loopback interface too."""
    variables = env.snapshot()
    if has != "the token":
        variables = {name: value for name, value in variables.items() if not name.startswith("RAY_AUTH_")} | {
            "RAY_AUTH_MODE": "disabled"
        }
    if has == "another token":
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    command = [sys.executable, "-c", ENTERS, ray.get_runtime_context().gcs_address]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert said.startswith("entered True" if has == "the token" else "refused"), said
    assert has == "the token" or "nauthenticated" in said or "UNAUTHENTICATED" in said or "token" in said, (
        said
    )


def test_init_ray_twice_keeps_the_first(local_ray: int) -> None:
    init_ray(num_cpus=local_ray + 1)
    assert ray.cluster_resources()["CPU"] == local_ray


def test_more_bundles_than_cores(local_ray: int) -> None:
    cluster = RayVirtualCluster([5, 0, 3], use_gpus=False, name="big")
    assert (cluster.world_size(), cluster.node_count()) == (8, 2)
    groups = cluster.get_placement_groups()
    assert [group.bundle_count for group in groups] == [5, 3]
    assert cluster.get_placement_groups() is groups
    address, port = cluster.get_master_address_and_port()
    assert ipaddress.ip_address(address).is_loopback
    assert 1024 <= port < 65536
    assert cluster.shutdown() and cluster.shutdown()
    with pytest.raises(StateError, match="was shut down"):
        cluster.get_placement_groups()


def test_unified_group_and_colocated_bundles(local_ray: int) -> None:
    cluster = RayVirtualCluster([2, 3], use_gpus=False, max_colocated_worker_groups=2)
    [group] = cluster._init_placement_groups(strategy="PACK", use_unified_pg=True)
    assert group.bundle_count == 5
    assert all(bundle["CPU"] == 2 for bundle in group.bundle_specs)
    cluster.shutdown()


def test_too_many_bundles_say_what_is_missing(local_ray: int) -> None:
    cluster = RayVirtualCluster(
        [local_ray // 2 + 1], use_gpus=False, max_colocated_worker_groups=2, name="huge"
    )
    with pytest.raises(
        ResourceInsufficientError,
        match=rf"'huge' needs {local_ray + 2} CPUs.*has {local_ray}\..*num_cpus={local_ray + 2}",
    ):
        cluster.get_placement_groups()
    assert issubclass(ResourceInsufficientError, ClusterError)


def test_no_gpu_is_refused_at_once(local_ray: int) -> None:
    if ray.cluster_resources().get("GPU", 0) >= 8:
        pytest.skip("this host has the GPUs")
    with pytest.raises(ResourceInsufficientError, match=r"8 GPUs.*use_gpus=False"):
        RayVirtualCluster([8]).get_placement_groups()


def test_places_in_use_pass_the_deadline_and_are_not_kept(local_ray: int) -> None:
    first = RayVirtualCluster([local_ray - 2], use_gpus=False)
    first.get_placement_groups()
    second = RayVirtualCluster([2, 3], use_gpus=False, name="late", ready_timeout_s=0.5)
    with pytest.raises(DeadlineError, match=r"'late'.*5 bundles.*free now"):
        second.get_placement_groups()
    first.shutdown()
    third = RayVirtualCluster([local_ray], use_gpus=False)
    assert third.get_placement_groups()[0].bundle_count == local_ray
    third.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bundle_ct_per_node_list": []}, "at least one bundle"),
        ({"bundle_ct_per_node_list": [0, 0]}, "at least one bundle"),
        ({"bundle_ct_per_node_list": [2, -1]}, ">= 0"),
        ({"bundle_ct_per_node_list": [3, 9]}, "num_gpus_per_node = 8"),
        (
            {"bundle_ct_per_node_list": [1], "max_colocated_worker_groups": 0},
            "max_colocated_worker_groups = 0",
        ),
        ({"bundle_ct_per_node_list": [1], "max_retries": 0}, "max_retries = 0"),
        ({"bundle_ct_per_node_list": [1], "placement_group_strategy": "TIGHT"}, "'TIGHT'.*SPREAD"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayVirtualCluster(**arguments)


@pytest.mark.parametrize(
    ("sizes", "enough"),
    [
        # training takes two ranks on each of two nodes, engines three on one
        ((2, 2, 3), True),
        ((5, 2), True),
        ((2, 2), False),
        ((2, 3), False),
        ((3, 3, 1), False),
        ((2, 1, 3), False),
        ((0, 2, 5), True),
    ],
)
def test_places_are_counted_for_training_and_engines_together(
    local_ray: int, sizes: tuple[int, ...], enough: bool
) -> None:
    nodes = [
        RayNode(f"n{index}", f"id-{index}", {"CPU": size}, {"CPU": size}) for index, size in enumerate(sizes)
    ]
    training, engines = (RayVirtualCluster(counts, use_gpus=False) for counts in ([2, 2], [3]))
    with nullcontext() if enough else pytest.raises(ResourceInsufficientError):
        left = engines.check_places(training.check_places(nodes))
        assert sum(node.total["CPU"] for node in left) == sum(sizes) - 7


def test_places_are_counted_on_the_only_node(local_ray: int) -> None:
    """What lies there all the time is not counted twice, and no rank has a node of its own."""
    training, engines, more = (RayVirtualCluster(counts, use_gpus=False) for counts in ([8, 8], [8], [9]))
    check_places_together([training, engines])
    with pytest.raises(ResourceInsufficientError, match=r"needs 9 CPUs .*the Ray cluster has 8"):
        check_places_together([training, more])


def test_cpu_nodes_may_hold_more_ranks_than_gpus_a_node() -> None:
    assert RayVirtualCluster([11], use_gpus=False).world_size() == 11


def test_retry_waits_twice_as_long_each_time() -> None:
    waits: list[float] = []
    answers = iter([ResourceInsufficientError("a"), ResourceInsufficientError("b"), None])

    def check() -> None:
        if (error := next(answers)) is not None:
            raise error

    _retry(check, 5, waits.append)
    assert waits == [1.0, 2.0]

    def never() -> None:
        raise ResourceInsufficientError("still too small")

    with pytest.raises(ResourceInsufficientError, match="still too small"):
        _retry(never, 4, waits.append)
    assert waits == [1.0, 2.0, 1.0, 2.0, 4.0]


def test_forwarded_environment_has_no_secrets_and_no_devices(tmp_path: Path) -> None:
    given = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": "/models",
        "HF_TOKEN": "hf_secret",
        "VLLM_API_KEY": "secret",
        "WANDB_API_KEY": "secret",
        "MEGARL_STORE_PASSWORD": "secret",
        "HF_PAT": "secret",
        "MEGARL_DB_PASS": "secret",
        "MEGARL_DB_PWD": "secret",
        "HF_HUB_COOKIE": "secret",
        "VLLM_APIKEY": "secret",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HOME": "/home/someone",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}/does/not/exist",
    }
    forwarded = forwarded_environment(given)
    path = forwarded.pop("PYTHONPATH").split(os.pathsep)
    assert set(forwarded) == {
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "HF_HOME",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    }
    assert path[0] == str(Path(megarl.__file__).resolve().parents[1])
    assert str(tmp_path.resolve()) in path
    assert "/does/not/exist" not in path


def test_executables_are_this_interpreter() -> None:
    assert Path(PY_EXECUTABLES.SYSTEM).exists()
