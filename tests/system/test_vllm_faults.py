"""Real vLLM engines that run out of memory, or are killed: what they serve then, and what they leave
behind."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import psutil
import pytest

from megarl.algorithms.refit import Refit
from megarl.errors import RefitError, WorkerError
from megarl.models.generation.vllm.generation import VllmGeneration
from tests.memory_limit import no_more_memory_than
from tests.system.vllm_engines import (
    PROMPTS,
    dense_model,
    engines,
    greedy_answers,
    policy_of,
    processes_of,
    resident_bytes,
    rows_of,
)
from tests.tiers import slow

pytestmark = [
    slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize(
    ("shared", "ranks"),
    [(True, 1), (False, 1), (True, 2)],
    ids=["colocated", "apart", "colocated-two-ranks"],
)
def test_an_engine_out_of_memory_serves_nothing_and_takes_the_next_refit(
    local_ray: int, tmp_path: Path, shared: bool, ranks: int
) -> None:
    """It runs out of it wherever it takes some: for the copy of a weight, for a layer, for what its kernel
    packs."""
    path = dense_model(
        tmp_path / "wide", intermediate_size=65_536, num_hidden_layers=2, initializer_range=0.05
    )
    weight = 128 * 65_536 * 4
    # every tensor is asked of the kernel, and given back to it
    generation = engines(
        path, "wide", colocated=shared, places=ranks, tensor_parallel=ranks, MALLOC_MMAP_THRESHOLD_="65536"
    )
    policy = policy_of("megatron-tp1", path, refit_buffer_size_gb=0.25)
    refit = Refit(policy, generation, colocated=shared)
    refit.bring_up_to_date()
    expected = greedy_answers(path)
    assert rows_of(generation.generate(PROMPTS, greedy=True)) == expected
    [actor] = processes_of(generation.worker_group)
    engine = (
        [actor] if ranks == 1 else [child.pid for child in psutil.Process(actor).children(recursive=True)]
    )
    resident = [resident_bytes(process) for process in engine]
    failures = []
    # what is asked for comes in multiples of this; half of one is left for small things, over which vLLM's
    # libraries break off
    step = weight // ranks
    for room in range(step // 2, 10 * weight, step):
        refit.stale = True
        policy.prepare_for_lp_inference()
        try:
            with no_more_memory_than(room, engine):
                refit.bring_up_to_date()
            break
        except RefitError as error:
            failures.append(str(error))
        with pytest.raises(RefitError, match=r"no complete weights|the engine is out of memory"):
            generation.generate(PROMPTS, greedy=True)
        policy.prepare_for_lp_inference()
        refit.bring_up_to_date()
        assert rows_of(generation.generate(PROMPTS, greedy=True)) == expected
    else:
        pytest.fail("there is never enough memory")
    print(*failures, sep="\n\n")
    assert generation.version == 0 and rows_of(generation.generate(PROMPTS, greedy=True)) == expected
    assert len(failures) > 2 and all("the engine is out of memory: " in failure for failure in failures)
    grown = [resident_bytes(process) - before for process, before in zip(engine, resident, strict=True)]
    assert max(grown) < weight / 2, grown
    assert generation.shutdown() and policy.shutdown()


@pytest.mark.parametrize("killed", ["core", "rank", "actor"])
def test_an_engine_of_two_ranks_leaves_nothing_behind_however_it_ends(
    local_ray: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, killed: str
) -> None:
    """Killed, and shut down after it was started anew."""
    # the path of a socket has at most 107 bytes
    sockets = tmp_path.parent / killed
    sockets.mkdir()
    before = files()
    path = dense_model(tmp_path / "model", intermediate_size=112, num_hidden_layers=2, initializer_range=0.2)
    generation = engines(
        path, f"{killed}-killed", colocated=True, places=2, tensor_parallel=2, VLLM_RPC_BASE_PATH=str(sockets)
    )
    policy = policy_of("megatron-tp1", path)
    refit = Refit(policy, generation, colocated=True)
    refit.bring_up_to_date()
    expected = greedy_answers(path)
    assert rows_of(generation.generate(PROMPTS, greedy=True)) == expected
    family = family_of(generation)
    assert all(shares_memory(family[name]) for name in ("core", "rank", "other rank"))
    assert files() == before

    os.kill(family[killed].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"VllmGeneration\.restart\(policy\)"):
        generation.generate(PROMPTS, greedy=True)
    generation.restart(policy)
    assert not alive(family)
    # an actor that lives ends a dead engine without a complaint
    assert ("clean-up" in caplog.text) == (killed == "actor")
    refit.stale = True
    policy.prepare_for_lp_inference()
    refit.bring_up_to_date()
    assert rows_of(generation.generate(PROMPTS, greedy=True)) == expected

    family = family_of(generation)
    assert generation.shutdown() and policy.shutdown()
    assert not alive(family)
    assert files() == before
    # an actor that is killed cannot remove its own
    assert len(list(sockets.iterdir())) == (1 if killed == "actor" else 0)


def family_of(generation: VllmGeneration) -> dict[str, psutil.Process]:
    """The processes of one engine of two ranks."""
    [actor] = map(psutil.Process, processes_of(generation.worker_group))
    [core] = [child for child in actor.children() if child.name().startswith("VLLM::EngineCor")]
    rank, other = core.children()
    return {"actor": actor, "core": core, "rank": rank, "other rank": other}


def files() -> set[Path]:
    """That vLLM's processes share memory by."""
    return {path for kind in ("psm_*", "vllm_*") for path in SHARED_MEMORY.glob(kind)}


def shares_memory(process: psutil.Process) -> bool:
    """With others, by what was a file once."""
    return any(mapped.path.startswith(f"{SHARED_MEMORY}/psm_") for mapped in process.memory_maps())


def alive(family: dict[str, psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended, soon."""
    return psutil.wait_procs(list(family.values()), timeout=30)[1]
