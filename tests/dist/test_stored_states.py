"""Optimizer states below float32 on the backends: runs that were saved go on to the bit, other layouts read
them, copies of a weight stay copies."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.algorithms.loss_functions import NLLLoss
from megarl.models.engine import host_adam, state_formats
from megarl.models.engine.host_adam import HostAdam
from megarl.models.megatron import schedule
from megarl.parity.pool import WorkerPool
from megarl.patched import patched
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.peft_jobs import with_adapters
from tests.dist.test_megatron_checkpoint import BATCHES, load_and_train, train_and_save
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled, slow

LOWEST: dict[str, Any] = {"exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit"}
STATES: dict[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "8bit": LOWEST,
    "8bit-mean": {"exp_avg_dtype": "8bit"},
    "8bit-square": {"exp_avg_sq_dtype": "8bit"},
    "no-master": {"master_dtype": "bfloat16", **LOWEST},
    "bf16-weights": {"master_dtype": "bfloat16"},
    "8bit-host": {**LOWEST, "optimizer_offload_fraction": 0.4},
    "host": {"optimizer_offload_fraction": 0.6},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "lora": (2, {"tp": 2, "adapters": True}),
    "tp2": (2, {"tp": 2, "sp": True, "multiple": 2}),
    "pp2": (2, {"pp": 2, "first": 1, "last": 2}),
    "dp2": (2, {}),
    "dp2-many-buckets": (2, {"overlap": True, "bucket_size": 5000}),
    "tp2-many-buckets": (2, {"tp": 2, "sp": True, "multiple": 2, "overlap": True, "bucket_size": 5000}),
}


def megatron(model: Path, states: dict[str, Any], **changes: Any) -> dict[str, Any]:
    adapters = changes.pop("adapters", False)
    config = policy_config(model, **{"precision": "bfloat16", **changes})
    config["megatron_cfg"]["optimizer"] |= states
    return with_adapters(config) if adapters else config


@newest_megatron
@sampled("values")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_megatron_resumes_to_the_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str, states: str, precision: str
) -> None:
    world, changes = LAYOUTS[layout]
    chosen = {
        key: value
        for key, value in STATES[states].items()
        if precision == "bfloat16" or key != "master_dtype"
    }
    config = megatron(tiny_models["qwen3"], chosen, precision=precision, **changes)
    undisturbed = pool.run(world, train_and_save, config, tmp_path)[0]
    resumed = pool.run(world, load_and_train, config, tmp_path, False)[0]
    assert resumed["measured"] == undisturbed["measured"] and undisturbed["measured"][0][1] > 0
    for name, tensor in undisturbed["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


def trained(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Exported weights after some steps, the last gradient's norm, this rank's own parameters, and how many
    of them step."""
    worker = jobs.build(config, init_reference_model=False)
    for batch in BATCHES[:steps]:
        result = worker.train(
            data=jobs.my_share(worker, batch, config["train_global_batch_size"]), loss_fn=NLLLoss()
        )
    worker.backend.sync_parameters()
    own = {
        name: (parameter.detach().clone(), is_divided(parameter))
        for name, parameter in worker.backend.parameters()
    }
    found = {"weights": jobs.full_weights(worker), "norm": float(result["grad_norm"]), "own": own}
    worker.backend.close()
    return found


def is_divided(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


@newest_megatron
@sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduced", [True, False], ids=["float32-gradients", "bf16-gradients"])
def test_the_first_clipped_step_is_that_of_float32(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, reduced: bool
) -> None:
    """Moments are rounded when they are stored, after the step that they are made for."""
    world, changes = LAYOUTS[layout]
    found = []
    for states in (STATES["bf16"], {}):
        config = megatron(tiny_models["qwen3"], states, clip=0.05, **changes)
        config["megatron_cfg"]["distributed_data_parallel_config"]["grad_reduce_in_fp32"] = reduced
        found.append(pool.run(world, trained, config, 1)[0])
    low, full = found
    assert full["norm"] > 0.1 and abs(low["norm"] - full["norm"]) < 1e-5 * full["norm"]
    # a factor in the last bit of float32 may round a weight of bfloat16 otherwise
    different = sum(int((low["weights"][name] != tensor).sum()) for name, tensor in full["weights"].items())
    assert different <= 1e-3 * sum(tensor.numel() for tensor in full["weights"].values())


@newest_megatron
@sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [0.07, 0.5, 1.0])
@pytest.mark.parametrize("states", ["float32", "bf16", "8bit"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_states_in_host_memory_are_stepped_to_the_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, share: float, states: str, precision: str
) -> None:
    """Whatever share of them is there, also where a shard is cut; of float32 the other optimizer is
    Megatron-Core's with our Adam."""
    world, changes = LAYOUTS[layout]
    check_host_memory(pool, tiny_models["qwen3"], states, share, world, precision=precision, **changes)


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_tied_embedding_is_stepped_in_host_memory_to_the_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], overlap: bool
) -> None:
    """Its gradient is summed up over the stages after the backward pass."""
    changes = {"pp": 2, "first": 1, "last": 2, "overlap": overlap, "precision": "bfloat16"}
    check_host_memory(pool, tiny_models["qwen3-tied"], "float32", 1.0, 2, **changes)


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_experts_are_stepped_in_host_memory_to_the_bit(
    pool: WorkerPool, model_of: Callable[[str], Path], overlap: bool
) -> None:
    """They have an optimizer of their own, whose weights are gathered by themselves."""
    check_host_memory(pool, model_of("qwen3_moe"), "float32", 1.0, 2, ep=2, overlap=overlap)


def check_host_memory(
    pool: WorkerPool, model: Path, states: str, share: float, world: int, **changes: Any
) -> None:
    one, other = (
        with_early_gradients(megatron(model, {**STATES.get(states, {}), **in_host}, clip=0.05, **changes))
        for in_host in ({}, {"optimizer_offload_fraction": share})
    )
    one, other = (pool.run(world, trained, config, 4)[0] for config in (one, other))
    assert one["norm"] == other["norm"]
    for name, tensor in one["weights"].items():
        assert torch.equal(other["weights"][name], tensor), name


def with_early_gradients(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the default of the overlap, with which gradients come during the backward
    pass."""
    overlap = config["megatron_cfg"]["distributed_data_parallel_config"]
    overlap["overlap_grad_reduce"] = overlap["overlap_grad_reduce"] or None
    return config


def in_host_memory(models: Mapping[str, Path], layout: str) -> tuple[int, Any]:
    """Ranks and policy configuration of a layout whose states are all in host memory."""
    world, changes = LAYOUTS[layout]
    states = {"optimizer_offload_fraction": 1.0}
    return world, with_early_gradients(megatron(models["qwen3"], states, **changes))


class Gate:
    """It is closed from a step's start until somebody waits for the thread, in which no slice is stepped
    meanwhile. So nothing here depends on time, and a reader that does not wait leaves it closed."""

    def __init__(self) -> None:
        self.event, self.passed = threading.Event(), 0
        self.event.set()
        step, start, finish = host_adam.step_slice, HostAdam.start, HostAdam.finish

        def gated(*arguments: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.event.wait(60), "nobody waits for the step"
                self.passed += 1
            step(*arguments)

        def closing(*arguments: Any) -> None:
            self.event.clear()
            start(*arguments)

        def opening(adam: HostAdam) -> None:
            self.event.set()
            finish(adam)

        self.patches = (
            (host_adam, "step_slice", gated),
            (HostAdam, "start", closing),
            (HostAdam, "finish", opening),
        )


def open_at_calls(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Which calls after a step have waited for its rest in host memory, whether the step's call returned with
    the earlier weights, and at each gather of the weights whether it came after the wait."""
    worker, gate = jobs.build(config), Gate()
    share = jobs.my_share(worker, BATCHES[0], config["train_global_batch_size"])
    scored = jobs.dealt(worker, BATCHES[0], "logprob").shards[worker.backend.groups.data_rank]
    worker.prepare_refit_info()
    worker.save_checkpoint(str(directory / "first"), str(directory / "optimizer"))
    paths = [str(directory / name) for name in ("first", "optimizer")]

    def evaluate() -> None:
        worker.train(data=share, loss_fn=NLLLoss(), eval_mode=True)

    calls: dict[str, Callable[[], Any]] = {
        "another step": lambda: worker.train(data=share, loss_fn=NLLLoss()),
        "evaluation": evaluate,
        "log-probabilities": lambda: worker.get_logprobs(data=scored),
        "reference": lambda: worker.get_reference_policy_logprobs(data=scored),
        "export": lambda: jobs.full_weights(worker),
        "stage": lambda: list(worker.backend.export_stage()),
        "checkpoint": lambda: worker.save_checkpoint(str(directory / "second")),
        "load": lambda: worker.load_checkpoint(*paths),
        "noise": worker._add_noise_to_weights,
        "parameters leave": worker.offload_after_refit,
        "gradients leave": worker.offload_before_refit,
        "refit is prepared": worker.prepare_refit_info,
        "engine shares the device": worker.prepare_for_generation,
        "figures": worker.get_gpu_info,
    }
    waited, returned_early, gathers = {}, [], []
    buckets = type(worker.backend.chunks[0].bucket_groups[0])
    gather = buckets.start_param_sync

    def gathered(*arguments: Any, **options: Any) -> None:
        gathers.append(gate.event.is_set())
        gather(*arguments, **options)

    with patched(*gate.patches, (buckets, "start_param_sync", gathered)):
        for name, call in calls.items():
            worker.prepare_for_training()
            before = jobs.full_weights(worker)
            own = [parameter.clone() for _, parameter in worker.backend.parameters()]
            gate.passed = 0
            worker.train(data=share, loss_fn=NLLLoss())
            matrices = [
                torch.equal(parameter, earlier)
                for (_, parameter), earlier in zip(worker.backend.parameters(), own, strict=True)
                if parameter.ndim == 2
            ]
            returned_early.append(all(matrices) and not gate.passed and not gate.event.is_set())
            call()
            waited[name] = gate.passed > 0
            worker.prepare_for_training()
            after = jobs.full_weights(worker)
            changed = any(not torch.equal(after[key], tensor) for key, tensor in before.items())
            assert changed or name == "load", name
    worker.backend.close()
    return {"waited": waited, "returned_early": returned_early, "gathers": gathers}


@newest_megatron
@pytest.mark.parametrize("layout", ["one", "dp2", "dp2-many-buckets"])
def test_steps_in_host_memory_go_on_until_the_weights_are_read(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    world, config = in_host_memory(tiny_models, layout)
    for found in pool.run(world, open_at_calls, config, tmp_path):
        assert all(found["returned_early"]), found["returned_early"]
        assert found["gathers"] and all(found["gathers"]), found["gathers"]
        goes_on = {"gradients leave", "refit is prepared", "engine shares the device", "figures"}
        assert {name for name, waited in found["waited"].items() if not waited} == goes_on


def calls_after_a_failed_step(config: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """What some calls raise after a step that fails in the thread of the last rank."""
    worker, step, found = jobs.build(config, init_reference_model=False), host_adam.step_slice, {}
    share = jobs.my_share(worker, BATCHES[0], config["train_global_batch_size"])
    worker.prepare_refit_info()
    fails = worker.backend.groups.data_rank == worker.backend.groups.data_size - 1

    def failing(*arguments: Any) -> None:
        if fails and threading.current_thread() is not threading.main_thread():
            raise MemoryError("in the thread")
        step(*arguments)

    with patched((host_adam, "step_slice", failing)):
        worker.train(data=share, loss_fn=NLLLoss())
        for name, call in {
            "refit": lambda: worker.hand_over_weights(0, 0),
            "evaluation": lambda: worker.train(data=share, loss_fn=NLLLoss(), eval_mode=True),
            "another step": lambda: worker.train(data=share, loss_fn=NLLLoss()),
            "checkpoint": lambda: worker.save_checkpoint(str(directory / "weights")),
        }.items():
            try:
                call()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    worker.backend.close()
    return found


@newest_megatron
@pytest.mark.parametrize("layout", ["one", "dp2", "dp2-many-buckets"])
def test_half_a_step_is_never_read(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    world, config = in_host_memory(tiny_models, layout)
    *others, last = pool.run(world, calls_after_a_failed_step, config, tmp_path)
    calls = ("refit", "evaluation", "another step", "checkpoint")
    # it is not a micro-batch's lack of memory, by which no weight would be changed
    assert last == dict.fromkeys(calls, "MemoryError: in the thread")
    for found in others:
        assert found.keys() == set(calls)
        assert all("StateError: another rank" in text for text in found.values()), found
    assert not list(tmp_path.iterdir())


@newest_megatron
@sampled(2)
@pytest.mark.parametrize(("layout", "states"), [("tp2", "no-master"), ("pp2", "bf16"), ("pp2", "no-master")])
def test_copies_of_a_weight_stay_copies(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, states: str
) -> None:
    """What tensor-parallel ranks have in full, and the embedding that the last stage has a copy of."""
    world, changes = LAYOUTS[layout]
    chosen = {key: "bfloat16" if layout == "pp2" else value for key, value in STATES[states].items()}
    one, other = pool.run(world, trained, megatron(tiny_models["qwen3-tied"], chosen, **changes), 4)
    if layout == "pp2":
        first, last = (
            one["own"]["embedding.word_embeddings.weight"][0],
            other["own"]["output_layer.weight"][0],
        )
        assert torch.equal(first, last)
        return
    whole = [name for name, (_, divided) in one["own"].items() if not divided]
    assert len(whole) > 10
    for name in whole:
        assert torch.equal(one["own"][name][0], other["own"][name][0]), name


def copied_gradients(config: Mapping[str, Any]) -> list[list[str]]:
    """What happens in each of three steps, in its order: the begin of a copy of a gradient to host memory,
    the end of the backward pass, and the step, with how many of its gradients had come before."""
    worker = jobs.build(config, init_reference_model=False)
    events: list[str] = []

    def logged(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            shards = arguments[1] if name == "step" else []
            early = f" {sum(shard.is_early for shard, _ in shards)} of {len(shards)}" if shards else ""
            events.append(name + early)
            return function(*arguments, **options)

        return call

    found = []
    with patched(
        (HostAdam, "copy_early", logged("copy", HostAdam.copy_early)),
        (HostAdam, "start", logged("step", HostAdam.start)),
        (schedule, "finalize_model_grads", logged("end", schedule.finalize_model_grads)),
    ):
        for batch in BATCHES[:3]:
            share = jobs.my_share(worker, batch, config["train_global_batch_size"])
            worker.train(data=share, loss_fn=NLLLoss())
            found.append([*events])
            events.clear()
    worker.backend.close()
    return found


@newest_megatron
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_states_in_host_memory_come_while_backward_goes_on(
    pool: WorkerPool, tiny_models: dict[str, Path], world: int
) -> None:
    """Bucket by bucket; Megatron-Core's first pass learns what is in them."""
    config = megatron(tiny_models["qwen3"], STATES["host"], bucket_size=5000)
    config["megatron_cfg"]["distributed_data_parallel_config"]["overlap_grad_reduce"] = None
    for steps in pool.run(world, copied_gradients, config):
        for events in steps[1:]:
            assert events.count("end") == 1 and events.index("end") > 2, events
            copies = events.count("copy")
            assert set(events[: events.index("end")]) == {"copy"}
            early, count = (int(word) for word in events[-1].split()[1::2])
            assert early == copies < count, "norms come with the step"


def copies_after_a_load(config: Mapping[str, Any], directory: Path) -> bool:
    """Whether the optimizer's copies are the weights, after weights alone were loaded into a worker that has
    trained."""
    worker = jobs.build(config, init_reference_model=False)
    worker.save_checkpoint(str(directory / "weights"))
    worker.train(data=jobs.my_share(worker, BATCHES[0], config["train_global_batch_size"]), loss_fn=NLLLoss())
    worker.load_checkpoint(str(directory / "weights"))
    adams = [inner.optimizer for inner in worker.backend.optimizer.chained_optimizers]
    shards = [(adam, shard) for adam in adams for group in adam.param_groups for shard in group["params"]]
    same = all(
        torch.equal(adam.read_state(shard, "param").to(shard.dtype), shard.detach()) for adam, shard in shards
    )
    worker.backend.close()
    return same and len(shards) > 10


@newest_megatron
def test_copies_follow_weights_that_are_loaded(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    assert pool.run(
        1, copies_after_a_load, megatron(tiny_models["qwen3"], STATES["8bit-host"]), tmp_path
    ) == [True]


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("states", ["8bit", "no-master", "8bit-to-float32", "float32-to-8bit-host", "host"])
def test_another_layout_and_another_format_read_the_state(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, states: str
) -> None:
    """Runs go on, apart by what a rounding of the moments makes of three steps."""
    before, _, after = states.partition("-to-")
    formats = {**STATES, "float32": {}}
    first, then = formats[before], formats[after or before]
    undisturbed = pool.run(2, train_and_save, megatron(tiny_models["llama"], first, tp=2), tmp_path)[0]
    resumed = pool.run(2, load_and_train, megatron(tiny_models["llama"], then), tmp_path, False)[0]
    for (loss, norm, rate), (expected_loss, expected_norm, expected_rate) in zip(
        resumed["measured"], undisturbed["measured"], strict=True
    ):
        assert (
            abs(loss - expected_loss) < 0.01 * expected_loss
            and abs(norm - expected_norm) < 0.1 * expected_norm
        )
        assert rate == expected_rate


def torch_config(
    model: Path, changes: dict[str, Any] | None, states: dict[str, Any], **others: Any
) -> dict[str, Any]:
    """DTensor with ``changes``; without, FSDP1."""
    others |= {"precision": "bfloat16"} if "master_dtype" in states else {}
    changes = None if changes is None else dict(changes)
    adapters = changes is not None and changes.pop("adapters", False)
    config = fsdp1_config(model, **others) if changes is None else dtensor_config(model, **changes, **others)
    kwargs = {
        key: value for key, value in config["optimizer"]["kwargs"].items() if key not in ("foreach", "fused")
    }
    config["optimizer"] |= {"kwargs": kwargs, **states}
    return with_adapters(config) if adapters else config


@sampled("values")
@pytest.mark.parametrize("states", ["bf16", "8bit", "8bit-mean", "8bit-square", "no-master", "bf16-weights"])
@pytest.mark.parametrize(
    ("world", "changes"),
    [(1, {}), (2, {}), (2, {"tp": 2}), (1, {"adapters": True}), (2, None), (1, None)],
    ids=["one", "dp2", "tp2", "lora", "fsdp1", "fsdp1-one"],
)
def test_torch_backends_resume_to_the_bit(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    world: int,
    changes: dict[str, Any] | None,
    states: str,
) -> None:
    model = tiny_models["qwen3-tied"]
    config = torch_config(model, changes, STATES[states])
    undisturbed = pool.run(world, train_and_save, config, tmp_path)[0]
    resumed = pool.run(world, load_and_train, config, tmp_path, False)[0]
    assert resumed["measured"] == undisturbed["measured"] and undisturbed["measured"][0][1] > 0
    for name, tensor in undisturbed["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


TORCH_LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "dtensor": (1, {}),
    "dtensor-dp2": (2, {}),
    "dtensor-tp2": (2, {"tp": 2, "sp": True}),
    "fsdp1": (1, None),
    "fsdp1-two": (2, None),
}


@pytest.fixture(scope="module")
def model_of_bf16(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose weights are numbers of bfloat16."""
    directory = tmp_path_factory.mktemp("bf16") / "qwen3"
    shutil.copytree(tiny_models["qwen3"], directory)
    (file,) = directory.glob("*.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return directory


@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_bf16_weights_take_the_step_of_float32_rounded_at_random(
    pool: WorkerPool, model_of_bf16: Path, layout: str
) -> None:
    """Gradients of several micro-batches add up in float32; and after a step each weight is one of the two
    numbers of bfloat16 around that of float32 weights, so that the errors cancel out."""
    world, changes = TORCH_LAYOUTS[layout]
    low, full = (
        pool.run(world, trained, torch_config(model_of_bf16, changes, states, precision="bfloat16"), 1)[0]
        for states in (STATES["bf16-weights"], {})
    )
    assert full["norm"] > 0.1 and abs(low["norm"] - full["norm"]) < 1e-4 * full["norm"]
    exact, found = (
        torch.cat([parameter.flatten() for parameter, _ in run["own"].values()]) for run in (full, low)
    )
    assert exact.dtype is torch.float32 and found.dtype is torch.bfloat16
    exponents = exact.frexp().exponent - 8
    errors = (found.float() - exact) / torch.ldexp(torch.ones_like(exact), exponents)
    # of a gradient near zero Adam's first step has only the sign
    assert float((errors.abs() > 1).float().mean()) < 1e-3
    assert float((errors.abs() > 0.5).float().mean()) > 0.1, (
        "the nearest number would be half a step away at most"
    )
    assert abs(float(errors.mean())) < 5 * float(errors.std()) / len(errors) ** 0.5


TRAINED_STEPS, ROUNDINGS = 200, 8


def last_losses(config: Mapping[str, Any], seeds: list[int | None]) -> list[float]:
    """Mean loss of the last 20 of 200 steps over a few batches, with the roundings of each seed; without one
    to the nearest."""
    batches = [make_batch(rows=4, length=12, seed=seed) for seed in range(4)]
    found, write = [], state_formats.BFloat16.write
    for seed in seeds:
        worker, losses = jobs.build(config, init_reference_model=False, seed=seed or 0), []
        with pytest.MonkeyPatch.context() as patch:
            if seed is None:
                patch.setattr(
                    state_formats.BFloat16, "write", lambda *arguments: write(*arguments[:-1], None)
                )
            for step in range(TRAINED_STEPS):
                share = jobs.my_share(worker, batches[step % 4], config["train_global_batch_size"])
                losses.append(float(worker.train(data=share, loss_fn=NLLLoss())["global_loss"]))
        found.append(sum(losses[-20:]) / 20)
        worker.backend.close()
    return found


@slow
@pytest.mark.parametrize("layout", ["dtensor", "fsdp1"])
def test_200_steps_of_bf16_weights_lead_to_where_float32_leads(
    pool: WorkerPool, model_of_bf16: Path, layout: str
) -> None:
    """Float32's loss lies among those of eight roundings, within twice their spread, which is small; rounded
    to the nearest they lie elsewhere."""
    world, changes = TORCH_LAYOUTS[layout]
    options = {"precision": "bfloat16", "gbs": 4, "lr": 2e-4}
    configs = [
        torch_config(model_of_bf16, changes, states, **options) for states in (STATES["bf16-weights"], {})
    ]
    *found, nearest = pool.run(world, last_losses, configs[0], [*range(ROUNDINGS), None])[0]
    (expected,) = pool.run(world, last_losses, configs[1], [0])[0]
    losses = torch.tensor(found, dtype=torch.float64)
    spread, mean = float(losses.std()), float(losses.mean())
    assert 0 < spread < 0.1 * expected, (spread, expected)
    assert abs(mean - expected) < 2 * spread, (found, expected)
    assert abs(nearest - expected) > 4 * spread, (nearest, found, expected)
