"""Who writes a checkpoint: every data-parallel rank its share, and what is on disk is what the main replicas
would have written."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.checkpoint.boxes import Box, intersection
from converters.torch_dist.reader import _overlapping
from megarl.checkpoint.restricted import METADATA_FILE, read_plain_index
from megarl.parity.pool import WorkerPool
from tests.dist import save_jobs
from tests.dist.batches import make_batch
from tests.dist.layouts import CONFIG
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled

BATCH = make_batch(rows=12, length=9, seed=0)
UNEVEN = {"first": 1, "last": 2}
HALF = {"precision": "bfloat16"}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "alone": ("qwen2-tied", 1, {}),
    "dp2": ("qwen2", 2, {}),
    "dp2-half": ("qwen2-tied", 2, HALF),
    "dp2-plain": ("qwen2-tied", 2, {"distributed_optimizer": False}),
    "dp2-plain-half": ("llama", 2, {"distributed_optimizer": False, **HALF}),
    "dp2-buckets": ("qwen2-tied", 2, {"overlap": True, "bucket_size": 3001, **HALF}),
    "dp3": ("qwen3", 3, HALF),
    "dp4": ("llama", 4, HALF),
    "dp4-plain": ("qwen3-tied", 4, {"distributed_optimizer": False}),
    "cp2": ("qwen2", 2, {"cp": 2, "multiple": 4}),
    "tp2-dp2": ("qwen2", 4, {"tp": 2, "sp": True, "multiple": 2, **HALF}),
    "tp2-dp2-plain": ("qwen3", 4, {"tp": 2, "distributed_optimizer": False}),
    "pp2-dp2-tied": ("qwen2-tied", 4, {"pp": 2, **UNEVEN, **HALF}),
    "pp2-dp2-tied-buckets": ("qwen3-tied", 4, {"pp": 2, **UNEVEN, "overlap": True, "bucket_size": 5000}),
    "vpp2-dp2": ("qwen3-tied-four", 4, {"pp": 2, "vpp": 2}),
    "ep2": ("qwen3_moe", 2, {"ep": 2}),
    "ep2-dp4": ("qwen3_moe", 4, {"ep": 2, **HALF}),
    "ep2-dp4-plain": ("qwen3_moe", 4, {"ep": 2, "distributed_optimizer": False}),
    "etp2": ("qwen3_moe", 2, {"etp": 2}),
    "tp2-etp1": ("qwen3_moe", 2, {"tp": 2, "sp": True, "multiple": 2}),
    "tp2-ep2-dp2": ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2, "multiple": 2, **HALF}),
}
NEWEST = ("dp2-half", "dp4-plain", "pp2-dp2-tied-buckets", "tp2-etp1", "tp2-ep2-dp2")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mixture") / "qwen3_moe", "qwen3_moe", tied=False, seed=5)


def evenly(directory: Path, group: tuple[int, ...]) -> bool:
    """Whether no rank of a group wrote more than its share and a tensor."""
    bytes_of = save_jobs.written(directory)
    shares = [bytes_of[rank] for rank in group]
    return max(shares) <= sum(shares) / len(group) + save_jobs.largest_piece(directory)


@newest_megatron(layout=NEWEST)
@sampled(2, layout=["pp2-dp2-tied-buckets"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_out_what_the_first_one_would_write(
    pool: WorkerPool, tiny_models: dict[str, Path], mixture: Path, tmp_path: Path, layout: str
) -> None:
    family, world, changes = LAYOUTS[layout]
    config = policy_config(
        mixture if family == "qwen3_moe" else tiny_models[family], **{"gbs": 12, "mbs": 1, **changes}
    )
    groups = set(pool.run(world, save_jobs.save_both_ways, config, BATCH, tmp_path))
    for part in save_jobs.PARTS:
        new, old = tmp_path / "new" / part, tmp_path / "old" / part
        assert save_jobs.differences(new, old) == []
        for group in groups:
            assert evenly(new, group), (group, save_jobs.written(new))
        assert world == 1 or not all(evenly(old, group) for group in groups), (
            "who writes too much is not seen"
        )
    # an older checkpoint loads, and who has loaded it writes the same bytes as who wrote it
    pool.run(world, save_jobs.load_and_save, config, tmp_path / "old", tmp_path / "again")
    assert save_jobs.files_of(tmp_path / "again") == save_jobs.files_of(tmp_path / "new")


@newest_megatron(part=["optimizer"])
@sampled(1)
@pytest.mark.parametrize("part", save_jobs.PARTS)
@pytest.mark.parametrize("failing", [1, 2])
def test_a_disk_that_fails_at_a_later_rank(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, failing: int, part: str
) -> None:
    """All ranks hear of it, nothing is left, and the next save is whole."""
    config = policy_config(tiny_models["qwen2-tied"], gbs=12, mbs=1)
    for said, *left in pool.run(3, save_jobs.save_where_a_disk_fails, config, BATCH, tmp_path, failing, part):
        assert (
            said.startswith("CheckpointError: ")
            and "Input/output error" in said
            and f"RANK {failing}" in said
        ), said
        assert left == list(save_jobs.PARTS[: save_jobs.PARTS.index(part)])
    pool.run(3, save_jobs.load_and_save, config, tmp_path / "again", tmp_path / "more")
    assert save_jobs.files_of(tmp_path / "more") == save_jobs.files_of(tmp_path / "again")


TORCH: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dtensor-dp2": ("dtensor", 2, {}),
    "dtensor-dp3": ("dtensor", 3, {}),
    "dtensor-tp2": ("dtensor", 2, {"tp": 2}),
    "dtensor-tp2-sp-dp2": ("dtensor", 4, {"tp": 2, "sp": True, "multiple": 2}),
    "dtensor-cp2": ("dtensor", 2, {"cp": 2, "multiple": 4}),
    "fsdp1-dp2": ("fsdp1", 2, {}),
    "fsdp1-dp3": ("fsdp1", 3, {}),
}


@sampled(1)
@pytest.mark.parametrize("layout", TORCH)
def test_ranks_of_the_torch_backends_share_out_a_save(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    backend, world, changes = TORCH[layout]
    pool.run(
        world,
        save_jobs.save_once,
        CONFIG[backend](tiny_models["qwen2"], gbs=12, mbs=1, **changes),
        BATCH,
        tmp_path,
    )
    for part in save_jobs.PARTS:
        assert evenly(tmp_path / part, tuple(range(world))), save_jobs.written(tmp_path / part)


@newest_megatron(backend=["megatron"])
@sampled(1, backend=["megatron"])
@pytest.mark.parametrize("backend", CONFIG)
def test_what_ranks_of_two_nodes_stage_is_together_what_they_write_to_one_disk(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    pool.run(
        3,
        save_jobs.save_apart,
        CONFIG[backend](tiny_models["qwen2-tied"], gbs=12, mbs=1),
        BATCH,
        tmp_path,
        "aba",
    )
    second = tmp_path / "second"
    whole, both = (
        {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (second / "whole", second / "both")
    )
    # the index has the path and a random number in it
    indices = {name for name in whole if name.endswith(METADATA_FILE)}
    assert len(indices) == 2 and whole.keys() == both.keys()
    assert {name for name in whole if whole[name] != both[name]} <= indices
    for part in save_jobs.PARTS:
        one, other = (read_plain_index(second / root / part) for root in ("whole", "both"))
        assert (one.state_dict_metadata, one.storage_data) == (other.state_dict_metadata, other.storage_data)


BOXES = st.integers(0, 3).flatmap(
    lambda axes: st.lists(
        st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda it: (it[0], sum(it)))] * axes),
        max_size=7,
    )
)


@given(BOXES)
def test_boxes_that_overlap_are_those_that_have_an_element_in_common(boxes: list[Box]) -> None:
    common = [pair for pair in itertools.combinations(sorted(boxes), 2) if intersection(*pair) is not None]
    assert sorted(_overlapping(boxes)) == sorted(common)
