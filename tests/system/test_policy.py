"""Policy over real Ray actors: the contract's methods, errors on the driver, checkpoints, export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.algorithms.train_results import step_metrics
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.errors import BatchError, StateError
from megarl.models.policy.lm_policy import Policy
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.session import WeightReceiver, payload_for
from tests.dist import nonfinite_jobs, reference
from tests.dist.batches import make_batch
from tests.models import VOCABULARY, make_tiny, policy_config
from tests.tiers import slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("policy") / "qwen2", "qwen2", tied=True)


@pytest.fixture(scope="module")
def policy(local_ray: int, model: Path) -> Iterator[Policy]:
    """TP2 x DP2 on Ray. Twenty seconds, for Ray and four workers that import Megatron; every test of this
    file uses it."""
    cluster = RayVirtualCluster([4], use_gpus=False, name="policy")
    policy = Policy(cluster, policy_config(model, tp=2), None, seed=3)
    yield policy
    assert policy.shutdown()
    cluster.shutdown()


def test_logprobs_keep_the_order_of_uneven_batches(policy: Policy, model: Path) -> None:
    loaded = reference.load(model)
    for rows in (1, 3, 7):
        batch = make_batch(rows, 11, seed=rows)
        policy.prepare_for_lp_inference()
        measured = policy.get_logprobs(BatchedDataDict(batch))["logprobs"]
        torch.testing.assert_close(measured, reference.logprobs(loaded, batch), atol=1e-5, rtol=0)
        shown = policy.get_logprobs(BatchedDataDict(batch), skip_masked=True)["logprobs"]
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        torch.testing.assert_close(shown, measured * mask, atol=1e-5, rtol=0)
        assert not shown[mask == 0].any()


def test_training_reports_the_true_loss_and_leaves_the_reference_alone(
    policy: Policy, model: Path, tmp_path: Path
) -> None:
    batch = BatchedDataDict(make_batch(16, 12, seed=1))
    policy.prepare_for_lp_inference()
    before = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    policy.prepare_for_training()
    evaluated = policy.train(batch, NLLLoss(), eval_mode=True)
    assert evaluated["grad_norm"] is None
    trained = policy.train(batch, NLLLoss())
    assert trained["loss"].shape == (2,)
    assert trained["loss"][0] == evaluated["loss"][0]
    reference_policy = reference.ReferenceTrainer(reference.load(model), policy.cfg)
    first = {key: value[:8] for key, value in batch.items()}
    expected, _ = reference_policy.step(first, NLLLoss())
    assert float(trained["loss"][0]) == pytest.approx(expected, rel=1e-5)
    assert len(trained["all_mb_metrics"]["loss"]) == 8
    assert sum(trained["all_mb_metrics"]["loss"]) == pytest.approx(float(trained["loss"].mean()), rel=1e-5)
    policy.prepare_for_lp_inference()
    assert not torch.equal(policy.get_logprobs(batch)["logprobs"], before)
    assert torch.equal(policy.get_reference_policy_logprobs(batch)["reference_logprobs"], before)


def test_memory_is_that_of_the_fullest_worker(policy: Policy) -> None:
    processes = [int(identity.rpartition("-")[2]) for identity in policy._results("report_device_id")]
    resident = [psutil.Process(process).memory_info().rss for process in processes]
    assert len(set(processes)) == 4
    figures = policy.memory_figures()
    assert figures["memory_gib"] == pytest.approx(max(resident) / 2**30, rel=0.1)
    assert figures["memory_gib"] <= figures["peak_memory_gib"] < 16


def test_preparations_and_memory_travel_with_training(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message to each worker where there were three; alone on its devices, see the next test."""
    started: list[tuple[str, list[str]]] = []
    start = policy.worker_group._start
    monkeypatch.setattr(
        policy.worker_group,
        "_start",
        lambda method, calls, before: started.append((method, list(before))) or start(method, calls, before),
    )
    batch = BatchedDataDict(make_batch(8, 12, seed=3))
    policy.offload_after_refit()
    started.clear()
    policy.prepare_for_training()
    policy.train(batch, NLLLoss())
    figures = policy.memory_figures()
    assert started == [("train", ["prepare_for_training"])]
    assert 0 < figures["memory_gib"] <= figures["peak_memory_gib"] < 16
    policy.prepare_for_lp_inference()
    assert policy.memory_figures().keys() == figures.keys()
    assert started[1:] == [("get_gpu_info", ["prepare_for_lp_inference"])], (
        "memory after a preparation is asked for anew"
    )
    policy.train(batch, NLLLoss(), eval_mode=True)
    policy.memory_figures()
    assert [method for method, _ in started[2:]] == ["train", "get_gpu_info"]


def test_preparations_are_over_at_once_where_others_share_the_devices(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.worker_group.cluster, "max_colocated_worker_groups", 2)
    started: list[str] = []
    start = policy.worker_group._start
    monkeypatch.setattr(
        policy.worker_group, "_start", lambda method, *rest: started.append(method) or start(method, *rest)
    )
    policy.prepare_for_lp_inference()
    policy.prepare_for_training()
    assert policy.prepare_for_generation()
    assert started == ["prepare_for_lp_inference", "prepare_for_training", "prepare_for_generation"]


def test_checkpoint_round_trip_on_live_workers(policy: Policy, tmp_path: Path) -> None:
    batch = BatchedDataDict(make_batch(8, 12, seed=2))
    policy.prepare_for_training()
    policy.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    continued = [policy.train(batch, NLLLoss()) for _ in range(3)]
    policy.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    again = [policy.train(batch, NLLLoss()) for _ in range(3)]
    assert [float(step["loss"]) for step in again] == [float(step["loss"]) for step in continued]
    assert [float(step["grad_norm"]) for step in again] == [float(step["grad_norm"]) for step in continued]


def test_another_process_reads_the_weights_of_each_step(policy: Policy) -> None:
    receiver = WeightReceiver(
        Manifest.from_description(policy.prepare_refit_info() or {}), torch.device("cpu")
    )
    before: dict[str, torch.Tensor] = {}
    for _ in range(2):
        policy.prepare_for_training()
        policy.train(BatchedDataDict(make_batch(8, 12, seed=2)), NLLLoss())
        policy.offload_before_refit()
        received = {}
        for keys in policy.prepare_weights_for_ipc(1):
            with receiver.group(payload_for(policy.get_weights_ipc_handles(keys), "CPU-here")) as weights:
                received.update({name: tensor.clone() for name, tensor in weights})
        version = receiver.version
        policy.offload_after_refit()
        assert set(received) == set(policy.prepare_info_for_collective() or {})
        assert all(
            not torch.equal(tensor, received[name])
            for name, tensor in before.items()
            if name.endswith("proj.weight")
        )
        before = received
    assert version is not None and version >= 2
    receiver.close()
    policy.prepare_for_lp_inference()


def test_export_is_what_the_policy_computes(policy: Policy, tmp_path: Path) -> None:
    batch = BatchedDataDict(make_batch(5, 12, seed=4))
    policy.prepare_for_lp_inference()
    policy.export_hf(tmp_path / "hf")
    expected = policy.get_logprobs(batch)["logprobs"]
    torch.testing.assert_close(
        reference.logprobs(reference.load(tmp_path / "hf"), batch), expected, atol=1e-5, rtol=0
    )


def broken(change: dict[str, Any]) -> BatchedDataDict[Any]:
    return BatchedDataDict({**make_batch(8, 12, seed=1), **change})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BatchedDataDict({}), "input_ids, input_lengths, sample_mask.* must be present"),
        (broken({"token_mask": torch.ones(8, 5)}), "Dim 1 must be the sequence dim"),
        (broken({"sample_mask": torch.ones(7)}), "expected 8 rows"),
        (broken({"token_mask": torch.ones(8, 12)}), r"token_mask\[\d, \d+\] = 1 beyond input_lengths"),
        (broken({"input_ids": torch.full((8, 12), VOCABULARY)}), "token ids lie in"),
        (broken({"input_ids": torch.full((8, 12), -1)}), "token ids lie in"),
        (broken({"input_lengths": torch.full((8,), 13)}), "only 12 columns"),
        (broken({"input_lengths": torch.zeros(8, dtype=torch.int64)}), "at least 1 token"),
        (BatchedDataDict({key: value[:0] for key, value in make_batch().items()}), "batch is empty"),
        (BatchedDataDict(make_batch(9, 12)), "not a multiple of batch_size"),
        (BatchedDataDict(make_batch(8, 70)), "max_total_sequence_length = 64"),
    ],
)
def test_bad_batches_are_refused_on_the_driver(
    policy: Policy, data: BatchedDataDict[Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        policy.train(data, NLLLoss())


def test_training_while_offloaded_names_the_remedy(policy: Policy) -> None:
    policy.offload_after_refit()
    with pytest.raises(StateError, match=r"prepare_for_training"):
        policy.train(BatchedDataDict(make_batch()), NLLLoss())
    policy.prepare_for_training()
    assert policy.train(BatchedDataDict(make_batch()), NLLLoss())["loss"].isfinite().all()


def test_weights_are_not_sent_to_nobody(policy: Policy) -> None:
    policy.prepare_for_lp_inference()
    with pytest.raises(StateError, match=r"call init_collective\(\) first"):
        policy.worker_group.get_all_worker_results(policy.broadcast_weights_for_collective())
    with pytest.raises(StateError, match=r"call prepare_weights_for_ipc\(\) first"):
        policy.get_weights_ipc_handles(list(policy.prepare_refit_info() or {})[:1])


def test_a_batch_that_is_not_finite_is_named_by_its_rows(policy: Policy) -> None:
    batch = make_batch(8, 11, seed=5)
    batch["sample_mask"][5] = nonfinite_jobs.MARK
    policy.prepare_for_training()
    result = policy.train(BatchedDataDict(batch), nonfinite_jobs.PoisonedLoss("gradient"))
    (skipped,) = result["skipped"]
    assert (skipped["global_batch"], skipped["rows"]) == (0, [0, 8])
    assert {tuple(place["rows"]) for place in skipped["seen"]} == {(4, 5)}, (
        "rows of the whole batch, not of a replica"
    )
    assert {place["data_rank"] for place in skipped["seen"]} == {1}
    metrics = step_metrics(result, NLLLoss())
    assert metrics["skipped_steps"] == 1.0, "steps, not replicas"
    assert math.isnan(metrics["grad_norm"]) and math.isfinite(metrics["loss"])
    assert (
        step_metrics(policy.train(BatchedDataDict(make_batch(8, 11, seed=6)), NLLLoss()), NLLLoss())[
            "skipped_steps"
        ]
        == 0.0
    )


def test_a_tokenizer_that_is_not_there_is_missed_before_anything_is_written(
    policy: Policy, tmp_path: Path
) -> None:
    policy.prepare_for_training()
    with pytest.raises(StateError, match=r"built without a tokenizer; leave the path out"):
        policy.save_checkpoint(tmp_path / "weights", tokenizer_path=tmp_path / "tokenizer")
    assert not list(tmp_path.iterdir())


def test_a_policy_that_was_shut_down_says_so(policy: Policy, tmp_path: Path) -> None:
    """The last test of the module's policy."""
    assert policy.shutdown()
    batch: BatchedDataDict[Any] = BatchedDataDict(make_batch(8, 11, seed=5))
    calls: list[Callable[[], Any]] = [
        lambda: policy.save_checkpoint(tmp_path / "weights"),
        lambda: policy.load_checkpoint("nowhere"),
        lambda: policy.export_hf(tmp_path / "hf"),
        lambda: policy.train(batch, NLLLoss()),
        lambda: policy.get_logprobs(batch),
        policy.prepare_for_training,
    ]
    for call in calls:
        with pytest.raises(
            StateError, match=r"the workers of this group were shut down. Fix: make a new policy"
        ):
            call()
    assert policy.shutdown() and not list(tmp_path.iterdir())


@slow
@pytest.mark.parametrize("batching", ["dynamic", "packed"])
def test_batches_by_tokens_in_context_parallel_replicas(local_ray: int, model: Path, batching: str) -> None:
    """CP2 x DP2: any number of rows for log-probabilities, in their order; the loss of a training step is the
    true one."""
    cluster = RayVirtualCluster([4], use_gpus=False, name=f"policy-{batching}")
    config = policy_config(model, cp=2, multiple=4, batching=batching, max_length=20)
    policy = Policy(cluster, config, None, init_reference_model=False)
    try:
        loaded = reference.load(model)
        for rows in (1, 7):
            batch = make_batch(rows, 17, seed=rows)
            measured = policy.get_logprobs(BatchedDataDict(batch))["logprobs"]
            torch.testing.assert_close(measured, reference.logprobs(loaded, batch), atol=1e-5, rtol=0)
        batch = make_batch(8, 17, seed=1)
        expected, norm = reference.ReferenceTrainer(loaded, config).step(batch, NLLLoss())
        trained = policy.train(BatchedDataDict(batch), NLLLoss())
        assert float(trained["loss"]) == pytest.approx(expected, rel=1e-5)
        assert float(trained["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    finally:
        assert policy.shutdown()
        cluster.shutdown()
