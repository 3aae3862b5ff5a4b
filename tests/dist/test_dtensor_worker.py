"""DTensorPolicyWorker: what must change nothing, precisions, checkpoints, export, generation, the names of the contract."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import dtensor_jobs, fsdp1_jobs, jobs, reference, worker_jobs
from tests.dist.batches import make_batch
from tests.dist.contract import parameters_of
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import differences, fsdp1_config
from tests.dist.test_dtensor_parity import LAYOUTS
from tests.dist.test_fsdp1_worker import LetterTokenizer, check_rows
from tests.dist.test_megatron_generation import likely_stop, prompts, transformers_greedy
from tests.models import policy_config
from tests.tiers import sampled, slow

BATCHES = [make_batch(rows=12, length=12, seed=seed) for seed in range(4)]
SAVED_AFTER = 2


SOME = ["dp2", "tp2-sp", "cp2"]
# four ranks take many times as long as two
FOUR_RANKS = [pytest.param("cp2-tp2-sp", marks=slow)]
ANY = [pytest.param(name, marks=slow) if world > 2 else name for name, (world, _) in LAYOUTS.items()]
# method -> parameters of the contract (spec/001), in order, without self
METHODS = {
    "create_context_parallel_ctx": ["cp_mesh", "cp_buffers", "cp_seq_dims", "cp_no_restore_buffers", "cp_rotate_method"],
    "train_context": ["cp_context"],
    "init_collective": ["ip", "port", "world_size"],
    "is_alive": [],
    "reset_peak_memory_stats": [],
    "get_gpu_info": [],
    "train": ["data", "loss_fn", "eval_mode", "gbs", "mbs"],
    "get_logprobs": ["data", "micro_batch_size"],
    "use_reference_model": [],
    "get_reference_policy_logprobs": ["data", "micro_batch_size"],
    "_add_noise_to_weights": [],
    "return_state_dict": [],
    "report_device_id": [],
    "prepare_weights_for_ipc": [],
    "get_weights_ipc_handles": ["keys"],
    "prepare_info_for_collective": [],
    "broadcast_weights_for_collective": [],
    "prepare_for_lp_inference": [],
    "prepare_for_training": ["args", "kwargs"],
    "offload_before_refit": [],
    "offload_after_refit": [],
    "move_to_device": ["model", "device"],
    "move_buffer_to_device": ["model", "device"],
    "move_to_cuda": ["model"],
    "move_to_cpu": ["model"],
    "save_checkpoint": ["weights_path", "optimizer_path", "tokenizer_path"],
    "load_checkpoint": ["weights_path", "optimizer_path"],
    "shutdown": [],
    "start_gpu_profiling": [],
    "stop_gpu_profiling": [],
}


def test_every_name_of_the_contract_has_its_signature() -> None:
    from megarl.models.policy import dtensor_policy_worker as room

    for name, expected in METHODS.items():
        assert parameters_of(getattr(room.DTensorPolicyWorker, name)) == expected, name
    constructor = list(inspect.signature(room.DTensorPolicyWorker).parameters)
    assert constructor[:6] == ["config", "tokenizer", "weights_path", "optimizer_path", "init_optimizer", "init_reference_model"]
    assert list(inspect.signature(room.unshard_fsdp2_model).parameters) == ["model"]
    assert list(inspect.signature(room.get_cpu_state_dict).parameters) == ["state_generator", "pin_memory"]


# what changes nothing


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["dp2", "cp2", *FOUR_RANKS])
def test_evaluation_changes_no_bit(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen2-tied"], precision=precision, gbs=12, **changes)
    for result in pool.run(world, dtensor_jobs.run, "evaluate_between", config, make_batch(12, 11, seed=4)):
        assert {name: changed for name, changed in result["changed"].items() if changed} == {}
        assert result["evaluated"]["grad_norm"] is None
        assert torch.equal(result["evaluated"]["global_loss"], result["trained"]["global_loss"])


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [*SOME, *FOUR_RANKS])
def test_reference_policy(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen2-tied"], precision=precision, gbs=12, **changes)
    for facts in pool.run(world, dtensor_jobs.run, "reference_swap", config, make_batch(12, 10, seed=2)):
        assert torch.equal(facts["reference"], facts["first"])
        assert not torch.equal(facts["own"], facts["reference"])
        assert torch.equal(facts["own"], facts["own again"])
        assert facts["changed"] == [] and facts["trained otherwise"] == []


@sampled(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layout", ["dp1", "tp2", "cp2", *FOUR_RANKS])
def test_logprobs_equal_those_inside_the_loss_to_the_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, recompute: bool
) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["llama"], temperature=0.8, recompute=recompute, mbs=2, gbs=8, **changes)
    pairs = [pair for result in pool.run(world, dtensor_jobs.logprobs_in_loss, config, make_batch(8, 13, seed=6), 2) for pair in result]
    assert pairs
    for inside, outside in pairs:
        assert torch.equal(inside, outside)


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["tp2", "tp2-dp2", *FOUR_RANKS])
def test_replicas_agree_to_the_bit(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str) -> None:
    """Norms, which all tensor-parallel ranks have as a whole, stay one parameter; and pieces cover every parameter."""
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen3-tied"], precision=precision, gbs=12, **changes)
    assert pool.run(world, dtensor_jobs.replicas_agree, config, BATCHES[:3]) == [[]] * world


@sampled(1)
@pytest.mark.parametrize("masked", ["one rank", "all"])
@pytest.mark.parametrize("layout", ["dp2", "tp2-dp2"])
def test_batches_without_valid_tokens(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, masked: str) -> None:
    world, changes = LAYOUTS[layout]
    batch = make_batch(rows=12, length=12, seed=1)
    batch["sample_mask"] = torch.cat([torch.zeros(6), torch.ones(6) if masked == "one rank" else torch.zeros(6)])
    shared = {"gbs": 12, "weight_decay": 0.0}
    alone = pool.run(1, dtensor_jobs.run, "train", dtensor_config(tiny_models["llama"], **shared), [batch], NLLLoss())[0]
    many = pool.run(world, dtensor_jobs.run, "train", dtensor_config(tiny_models["llama"], **shared, **changes), [batch], NLLLoss())[0]
    torch.testing.assert_close(many["losses"], alone["losses"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(many["norms"], alone["norms"], atol=1e-6, rtol=1e-5)
    if masked == "all":
        assert many["norms"] == [0.0] and many["losses"] == [0.0]


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp", pytest.param("cp2-tp2-sp", marks=slow)])
def test_a_pass_that_was_broken_off_leaves_no_trace(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen3-tied"], gbs=12, **changes)
    assert pool.run(world, dtensor_jobs.train_after_an_error, config, make_batch(12, 11, seed=4)) == [[]] * world


# precisions


@sampled(1)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [*SOME, *FOUR_RANKS])
def test_half_precision_follows_float32(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str) -> None:
    world, changes = LAYOUTS[layout]
    batches = [make_batch(8, 12, seed=seed % 2) for seed in range(6)]
    shared = {"lr": 3e-3, "scheduler": None}
    exact = pool.run(1, dtensor_jobs.run, "train", dtensor_config(tiny_models["qwen2-tied"], **shared), batches, NLLLoss())[0]
    config = dtensor_config(tiny_models["qwen2-tied"], precision=precision, **shared, **changes)
    bound = {"bfloat16": 0.03, "float16": 0.005}[precision]
    for result in pool.run(world, dtensor_jobs.run, "train", config, batches, NLLLoss()):
        assert result["losses"] == pytest.approx(exact["losses"], rel=bound)
        assert result["losses"][4] < result["losses"][0] - 0.05
        assert result["norms"] == pytest.approx(exact["norms"], rel=4 * bound)
        assert all(tensor.dtype == getattr(torch, precision) for tensor in result["weights"].values())


def test_the_loss_scale_leaves_no_trace_in_the_gradients(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """Adam forgives a gradient that is 65536 times too large; SGD does not."""
    shared = {"clip": None, "torch_optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}}
    batches = [make_batch(8, 12, seed=seed) for seed in range(2)]
    exact = pool.run(1, dtensor_jobs.run, "train", dtensor_config(tiny_models["qwen3"], **shared), batches, NLLLoss())[0]
    half = dtensor_config(tiny_models["qwen3"], precision="float16", tp=2, **shared)
    for result in pool.run(2, dtensor_jobs.run, "train", half, batches, NLLLoss()):
        assert result["losses"] == pytest.approx(exact["losses"], rel=0.005)
        for name, tensor in result["weights"].items():
            assert (tensor.float() - exact["weights"][name]).norm() < 0.002 * exact["weights"][name].norm(), name


@sampled(1)
@pytest.mark.parametrize("layout", ["dp2", "tp2-dp2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen3"], precision="float16", **changes)
    poisoned = make_batch(8, 12, seed=3)
    poisoned["sample_mask"][7] = 2.0
    batches = [make_batch(8, 12, seed=1), poisoned, make_batch(8, 12, seed=2)]
    for facts in pool.run(world, dtensor_jobs.overflow, config, batches, worker_jobs.OverflowingLoss()):
        assert [fact["skipped"] for fact in facts] == [0.0, 1.0, 0.0]
        assert [fact["moved"] for fact in facts] == [True, False, True]
        assert [fact["scale"] for fact in facts] == [2.0**16, 2.0**15, 2.0**15]


# checkpoints


@sampled(1)
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ANY)
def test_resume_is_exact(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str, precision: str, live: bool) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen2-tied"], precision=precision, gbs=12, **changes)
    undisturbed = pool.run(world, dtensor_jobs.run, "train_and_save", config, BATCHES, SAVED_AFTER, tmp_path)
    resumed = pool.run(world, dtensor_jobs.run, "load_and_train", config, BATCHES[SAVED_AFTER:], tmp_path, live)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["measured"] == before["measured"]
        assert differences(after["snapshot"], before["snapshot"]) == []
        assert differences(after["weights"], before["weights"]) == []


@slow
@pytest.mark.parametrize("written", ["open", "plain"])
@pytest.mark.parametrize("layout", ["fsdp1", "dp2", "tp2-sp", "tp2-dp2"])
def test_an_open_kernel_goes_on_as_the_checkpoint_was_written(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str, written: str
) -> None:
    """To the bit, whether the checkpoint is of the fused kernel or of an older version, which ran the plain one."""
    world, changes = LAYOUTS.get(layout, (3, {}))
    make = fsdp1_config if layout == "fsdp1" else dtensor_config
    plain = make(tiny_models["qwen2-tied"], gbs=12, **changes)
    open_kernel = copy.deepcopy(plain)
    for key in ("foreach", "fused"):
        del open_kernel["optimizer"]["kwargs"][key]

    def run(job: str, *arguments: Any) -> list[Any]:
        return pool.run(world, *((getattr(fsdp1_jobs, job),) if layout == "fsdp1" else (dtensor_jobs.run, job)), *arguments)

    undisturbed = run("train_and_save", open_kernel if written == "open" else plain, BATCHES, SAVED_AFTER, tmp_path)
    resumed = run("load_and_train", open_kernel, BATCHES[SAVED_AFTER:], tmp_path, False)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["measured"] == before["measured"]
        assert differences(after["weights"], before["weights"]) == []
        assert after["snapshot"]["group 0 fused"] is (written == "open")


@sampled(1)
@pytest.mark.parametrize(
    ("layout", "new"),
    [
        ("tp2-dp2", "dp1"),
        ("dp1", "tp2-sp"),
        ("cp2", "tp2"),
        pytest.param("dp2", "cp2-tp2-sp", marks=slow),
        pytest.param("cp2-tp2-sp", "tp2", marks=slow),
    ],
)
def test_any_layout_reads_any_other(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str, new: str) -> None:
    (world, changes), (new_world, new_changes) = LAYOUTS[layout], LAYOUTS[new]
    before = dtensor_config(tiny_models["qwen2-tied"], gbs=12, **changes)
    after = dtensor_config(tiny_models["qwen2-tied"], gbs=12, **new_changes)
    undisturbed = pool.run(world, dtensor_jobs.run, "train_and_save", before, BATCHES, SAVED_AFTER, tmp_path)[0]
    resumed = pool.run(new_world, dtensor_jobs.run, "load_and_train", after, BATCHES[SAVED_AFTER:], tmp_path, False)[0]
    check_continuation(undisturbed, resumed)


@slow
def test_fsdp1_and_dtensor_read_each_other(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_models["llama"]
    divided, whole = dtensor_config(model, gbs=12, tp=2), fsdp1_config(model, gbs=12)
    undisturbed = pool.run(4, dtensor_jobs.run, "train_and_save", divided, BATCHES, SAVED_AFTER, tmp_path / "dtensor")[0]
    check_continuation(undisturbed, pool.run(2, fsdp1_jobs.load_and_train, whole, BATCHES[SAVED_AFTER:], tmp_path / "dtensor", False)[0])
    undisturbed = pool.run(3, fsdp1_jobs.train_and_save, whole, BATCHES, SAVED_AFTER, tmp_path / "fsdp1")[0]
    resumed = pool.run(4, dtensor_jobs.run, "load_and_train", divided, BATCHES[SAVED_AFTER:], tmp_path / "fsdp1", False)[0]
    check_continuation(undisturbed, resumed)


def check_continuation(undisturbed: dict[str, Any], resumed: dict[str, Any]) -> None:
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        assert (resumed["weights"][name] - tensor).norm() < 1e-5 * tensor.norm(), name


# export and loading


@sampled(1)
@pytest.mark.parametrize("layout", ANY)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_export_is_exact(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, family: str, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    stored = reference.load(tiny_models[family]).state_dict()
    results = pool.run(world, dtensor_jobs.run, "export", dtensor_config(tiny_models[family], **changes), str(tmp_path / "hf"))
    exported = reference.load(tmp_path / "hf").state_dict()
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name], tensor), name
    names = [list(result) for result in results]
    assert all(order == names[0] for order in names)
    assert ("lm_head.weight" in names[0]) == (family == "llama")


EXPORTED: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp3": (3, {}),
    "tp2": (2, {"tp": 2}),
    "dp2-tp2": (4, {"tp": 2}),
    "cp2-tp2": (4, {"cp": 2, "tp": 2}),
}


@sampled(2)
@pytest.mark.parametrize(("world", "changes"), EXPORTED.values(), ids=EXPORTED)
@pytest.mark.parametrize(("family", "precision"), [("qwen2-tied", "bfloat16"), ("llama", "float32")])
def test_exports_in_buckets_are_the_parameters_one_by_one(
    pool: WorkerPool, tiny_models: dict[str, Path], family: str, precision: str, world: int, changes: dict[str, int]
) -> None:
    """Rows that three ranks share unevenly, a padded vocabulary, blocks that are cut both ways; in many buckets and in one."""
    config = dtensor_config(tiny_models[family], precision=precision, gbs=12, **changes)
    for nbytes, most in ((20_000, None), (2**26, 1)):
        for result in pool.run(world, dtensor_jobs.export_in_buckets, config, nbytes):
            assert result["wrong"] == result["left"] == []
            # rows of the padded vocabulary and ends of uneven runs; were norms sent by all who have them, it would be more
            assert sum(result["gathers"]) - result["elements"] < (800 if world == 3 else 250)
            if world == 1:
                assert result["gathers"] == []
            elif most is not None:
                assert len(result["gathers"]) == most
            else:
                assert 2 < len(result["gathers"]) < result["parameters"]


def test_every_rank_reads_its_own_slices_alone(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    results = pool.run(4, dtensor_jobs.bytes_read, dtensor_config(tiny_models["llama"], tp=2))
    (total,) = {whole for _, whole in results}
    replicated = sum(tensor.numel() for tensor in reference.load(tiny_models["llama"]).parameters() if tensor.ndim == 1)
    assert sum(read for read, _ in results) == total + replicated  # two tensor-parallel ranks each read the norms


# generation


@sampled(1)
@pytest.mark.parametrize("layout", ANY)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3"])
def test_greedy_equals_transformers(pool: WorkerPool, tiny_models: dict[str, Path], family: str, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    batch = prompts()
    stop = likely_stop(tiny_models[family], batch)
    expected = transformers_greedy(tiny_models[family], batch, 8, [stop])
    config = dtensor_config(tiny_models[family], temperature=0.7, generation={"stop_token_ids": [stop]}, **changes)
    for rows in pool.run(world, dtensor_jobs.run, "generate", config, batch, True):
        assert [row["ids"] for row in rows] == expected
        check_rows(rows)


@sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampling_equals_megatron(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, sizes = LAYOUTS[layout]
    changes = {"temperature": 1.3, "generation": {"stop_token_ids": [2], "top_k": 20, "top_p": 0.9}}
    batch = prompts()
    megatron = pool.run(1, jobs.generate, policy_config(tiny_models["qwen3"], **changes), batch, False)[0]["rows"]
    config = dtensor_config(tiny_models["qwen3"], **changes, **sizes)
    for rows in pool.run(world, dtensor_jobs.run, "generate", config, batch, False, LetterTokenizer()):
        assert [row["ids"] for row in rows] == [row["ids"] for row in megatron]
        check_rows(rows)


@pytest.mark.parametrize("layout", ["dp1", "tp2", "cp2"])
def test_recorded_steps_give_the_same_answers(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    """As CUDA graphs run them; on one rank, no step reads a number from the device."""
    world, sizes = LAYOUTS[layout]
    options = {"temperature": 1.3, "generation": {"stop_token_ids": list(range(2, 100, 9)), "max_new_tokens": 20}}
    [plain] = pool.run(1, jobs.generate, policy_config(tiny_models["qwen3"], **options), prompts(11), False)
    config = dtensor_config(tiny_models["qwen3"], **options, **sizes)
    for rows, counts in pool.run(world, dtensor_jobs.run, "generate_recorded", config, prompts(11), False):
        assert [row["ids"] for row in rows] == [row["ids"] for row in plain["rows"]]
        check_rows(rows)
        recorded, replayed = counts
        assert replayed > recorded > 1


@sampled(1)
@pytest.mark.parametrize(("layout", "precision"), [("dp2", "bfloat16"), ("tp2-sp", "bfloat16"), ("dp2", "float32")])
def test_the_model_that_generates_is_the_trained_one(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str) -> None:
    """Its rotary frequencies too: rounded to bfloat16 they turn far positions elsewhere than in training."""
    world, changes = LAYOUTS[layout]
    config = dtensor_config(tiny_models["qwen2-tied"], precision=precision, gbs=12, **changes)
    for wrong in pool.run(world, dtensor_jobs.generates_with_what_it_trains, config, prompts(), BATCHES[:2]):
        assert wrong == []


# the rest of the contract


@sampled(1)
@pytest.mark.parametrize(("layout", "rotate"), [("cp2", None), ("cp2", "alltoall"), ("cp2-tp2-sp", "allgather")])
def test_a_callers_own_loop_under_context_parallelism(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, rotate: str | None
) -> None:
    world, changes = LAYOUTS[layout]
    batch = make_batch(3, 16, seed=0)
    with torch.no_grad():
        expected = reference.load(tiny_models["qwen3"])(input_ids=batch["input_ids"]).logits
    results = pool.run(world, dtensor_jobs.own_loop, dtensor_config(tiny_models["qwen3"], **changes), batch, rotate)
    tensor = changes.get("tp", 1)
    for rank, result in enumerate(results):
        columns = slice(rank % tensor * 51, None) if tensor == 2 else slice(None)
        wanted = expected[:, :, columns][:, :, : result["logits"].shape[-1]]
        torch.testing.assert_close(result["logits"][:, :, : wanted.shape[-1]], wanted, atol=1e-5, rtol=1e-4)
        assert result["restored"]
        assert [error.split(":")[0] for error in result["errors"]] == ["BatchError", "BatchError", "ConfigError"]


@sampled(1)
@pytest.mark.parametrize("layout", SOME)
def test_names_of_the_contract(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    for rank, answers in enumerate(
        pool.run(world, dtensor_jobs.names_of_the_contract, dtensor_config(tiny_models["qwen2-tied"], **changes))
    ):
        assert answers["repr"] == f"DTensorPolicyWorker[rank={rank}]"
        assert answers["info"]["world_size"] == world
        assert (
            answers["divided again"]
            and answers["own memory"]
            and answers["same model"]
            and answers["other model"]
            and answers["weights stay"]
        )
        assert all(0.002 < spread < 0.03 for spread in answers["noise"].values()), answers["noise"]
        assert answers["pieces"]["model.norm.weight"] == (36 * changes.get("tp", 1) // world,)
        if layout == "dp2":
            assert answers["gathered"]["model.layers.0.mlp.up_proj.weight"] == (52, 36)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"tp": 4}, ["tensor_parallel_size = 4", "num_attention_heads = 6"]),
        ("llama", {"tp": 2, "cp": 3}, ["4 ranks", "6"]),
        ("llama", {"precision": "int8"}, ["policy.precision"]),
        ("llama", {"tp": 2, "plan": "tests.no_such_plan"}, ["custom_parallel_plan", "import path"]),
        ("llama", {"tp": 2, "plan": {"model.layers.*.mlp.gate": "colwise"}}, ["has no module model.layers.*.mlp.gate"]),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    pool: WorkerPool, tiny_models: dict[str, Path], family: str, changes: dict[str, Any], words: list[str]
) -> None:
    for message in pool.run(4, dtensor_jobs.run, "build_error", dtensor_config(tiny_models[family], **changes)):
        assert message.startswith("ConfigError") and all(word in message for word in words), message
