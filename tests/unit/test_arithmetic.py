"""How a CUDA device is told to add up, and what a process group learns of its device. No GPU is needed to set
switches, and none was seen to obey them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.distributed import rendezvous
from megarl.distributed.device import DeviceRuntime
from megarl.errors import ConfigError
from megarl.models.engine import worker as engine_worker
from megarl.models.generation import sampling
from megarl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from megarl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from megarl.models.policy.megatron_policy_worker import MegatronPolicyWorker

CUDA, CPU = DeviceRuntime(torch.device("cuda", 1), "nccl"), DeviceRuntime(torch.device("cpu"), "gloo")
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO")


def switches() -> dict[str, Any]:
    products = torch.backends.cuda.matmul
    return {
        "bfloat16 sums": products.allow_bf16_reduced_precision_reduction,
        "float16 sums": products.allow_fp16_reduced_precision_reduction,
        "TF32": (products.allow_tf32, torch.backends.cudnn.allow_tf32),
        "attention": (
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
    }


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Without variables that decide; torch's switches are put back."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    before, products = switches(), torch.backends.cuda.matmul
    yield before
    products.allow_bf16_reduced_precision_reduction = before["bfloat16 sums"]
    products.allow_fp16_reduced_precision_reduction = before["float16 sums"]
    products.allow_tf32, torch.backends.cudnn.allow_tf32 = before["TF32"]
    torch.backends.cuda.enable_mem_efficient_sdp(before["attention"][0])
    torch.backends.cuda.enable_cudnn_sdp(before["attention"][1])
    torch.use_deterministic_algorithms(before["deterministic"])
    torch.utils.deterministic.fill_uninitialized_memory = before["filled"]


def test_products_of_16_bits_are_added_up_in_float32(restored: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    CUDA.set_arithmetic()
    plain = {"bfloat16 sums": False, "float16 sums": False, "TF32": (False, False)}
    assert switches() == {**restored, **plain}


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_cpu_nothing_is_set(deterministic: bool, restored: dict[str, Any]) -> None:
    CPU.set_arithmetic(deterministic=deterministic)
    assert switches() == restored


def test_deterministic_sets_what_torch_and_the_libraries_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    CUDA.set_arithmetic(deterministic=True)
    found = switches()
    assert (
        found["deterministic"]
        and found["attention"] == (False, False)
        and not found["filled"]
        and not found["bfloat16 sums"]
    )
    assert [os.environ[name] for name in VARIABLES] == [":16:8", "0", "Ring"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
        ("NCCL_ALGO", "Tree,Ring"),
    ],
)
def test_a_variable_that_says_the_opposite_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"policy\.deterministic = True.*{name} = {value}"):
        CUDA.set_arithmetic(deterministic=True)


class _Begun(Exception): ...


@pytest.mark.parametrize("kind", [MegatronPolicyWorker, DTensorPolicyWorker, FSDP1PolicyWorker])
@pytest.mark.parametrize("wanted", [False, True])
def test_the_key_reaches_the_device(kind: type, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each backend: first of all, and before the ranks meet."""

    class Runtime:
        backend, device = "nccl", torch.device("cuda", 1)

        def activate(self) -> None:
            happened.append("activated")

        def set_arithmetic(self, *, deterministic: bool) -> None:
            happened.append(deterministic)

    def meet(backend: str, *, device: torch.device) -> None:
        happened.append((backend, device))
        raise _Begun

    happened: list[Any] = []
    monkeypatch.setattr(engine_worker, "runtime", Runtime)
    monkeypatch.setattr(engine_worker, "complete_policy", lambda config: config)
    monkeypatch.setattr(engine_worker, "init_process_group", meet)
    monkeypatch.setattr(engine_worker.dist, "is_initialized", lambda: False)
    with pytest.raises(_Begun):
        kind({"deterministic": wanted}, tokenizer=None)
    assert happened == ["activated", wanted, ("nccl", torch.device("cuda", 1))]


@pytest.mark.parametrize(
    ("device", "bound"),
    [(CUDA.device, CUDA.device), (CPU.device, None), (None, None)],
    ids=["cuda", "cpu", "none"],
)
@pytest.mark.parametrize("over_ray", [False, True])
def test_a_group_is_bound_to_a_cuda_device(
    device: torch.device | None, bound: torch.device | None, over_ray: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: seen.append(options))
    endpoint = rendezvous.Endpoint("127.0.0.1", 1, "token") if over_ray else None
    monkeypatch.setattr(rendezvous._rendezvous, "endpoint", endpoint)
    if over_ray:
        monkeypatch.setattr(rendezvous, "_connect", lambda *arguments: dist.HashStore())
        monkeypatch.setattr(rendezvous, "check_membership", lambda *arguments: None)
        monkeypatch.setattr(rendezvous, "_keep_gloo_on_loopback", lambda address: None)
    monkeypatch.setattr(rendezvous._rendezvous, "store", None)
    monkeypatch.setattr(rendezvous._rendezvous, "generation", 0)
    rendezvous.init_process_group("nccl", device=device)
    assert [options["device_id"] for options in seen] == [bound]


@pytest.mark.parametrize("columns", [1, 5, 511, 512, 513, 1500])
def test_sums_by_products_are_the_running_sums(columns: int) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    values = torch.rand(3, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values[1, ::2] = 0.0
    values[2] = 0.0
    sums = sampling.sum_in_blocks(values)
    torch.testing.assert_close(sums, values.cumsum(dim=-1), rtol=1e-13, atol=0)
    assert (sums.diff(dim=-1) >= 0).all()
    assert torch.equal(sampling.running_sum(values), values.cumsum(dim=-1))
