"""The memory of nodes on a real Ray, of one node: what its actor's process writes becomes a whole checkpoint,
and whoever dies is named."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from megarl.checkpoint.background import memory_of, take_memory
from megarl.checkpoint.manifest import verify
from megarl.distributed.ray_nodes import alive_nodes
from megarl.errors import CheckpointError
from megarl.run.memory_of_nodes import MemoryOfNodes
from tests.node_writers import LONGEST_S, await_end, writer_of, writers
from tests.tiers import slow


@pytest.fixture(scope="module")
def node(local_ray: int) -> str:
    return str(ray.get_runtime_context().get_node_id())


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def memory(node: str, checkpoint_dir: Path) -> Iterator[MemoryOfNodes]:
    """After a launch that was killed. There is no room for more than the memory has."""
    left = take_memory(checkpoint_dir, 1, "of an earlier Ray")
    found = MemoryOfNodes(checkpoint_dir, {"actor": [node, node], "critic": [node, node]})
    assert not found.take(shutil.disk_usage("/dev/shm").total)
    assert not memory_of(checkpoint_dir, node).exists() and writers(checkpoint_dir) == []
    assert found.take(1000)
    assert left is not None and not left.exists()
    found.free()
    yield found
    found.close()
    assert writers(checkpoint_dir) == []


@pytest.fixture
def target(checkpoint_dir: Path) -> Iterator[Path]:
    path = checkpoint_dir / "tmp_step_1"
    path.mkdir()
    (path / "training_info.json").write_text("{}")
    yield path
    shutil.rmtree(path)


def fill(memory: MemoryOfNodes, node: str, checkpoint_dir: Path) -> Path:
    """Have ranks of two roles write."""
    place = memory_of(checkpoint_dir, node)
    for role, name in (("actor", "policy"), ("critic", "critic")):
        directories = memory.directories(role)
        assert directories == [place, place]
        (place / name / "weights").mkdir(parents=True)
        for rank, directory in enumerate(directories):
            (directory / name / "weights" / f"__{rank}").write_bytes(bytes(rank + 7))
    return place


@slow
def test_what_ranks_leave_becomes_a_whole_checkpoint(
    memory: MemoryOfNodes, node: str, checkpoint_dir: Path, target: Path
) -> None:
    assert memory.take(1000)
    place = fill(memory, node, checkpoint_dir)
    write = memory.write(target)
    assert 0 < write.wait(LONGEST_S) < LONGEST_S and write.has_ended()
    assert verify(target) == [] and not place.exists()
    found = {path.relative_to(target).as_posix(): path.stat().st_size for path in target.rglob("__*")}
    assert found == {f"{role}/weights/__{rank}": rank + 7 for role in ("policy", "critic") for rank in (0, 1)}


@slow
def test_a_process_that_is_killed_is_named_with_its_node(
    memory: MemoryOfNodes, node: str, checkpoint_dir: Path, target: Path
) -> None:
    assert memory.take(1000)
    place = fill(memory, node, checkpoint_dir)
    writer = writer_of(checkpoint_dir, node)
    writer.suspend()
    write = memory.write(target)
    assert not write.has_ended()
    writer.kill()
    [name] = [each.name for each in alive_nodes()]
    with pytest.raises(
        CheckpointError,
        match=f"could not be written by node {name}: its writer process was killed",
    ):
        write.wait(LONGEST_S)
    assert write.has_ended() and not place.exists()


@slow
def test_what_takes_too_long_is_ended(
    memory: MemoryOfNodes, node: str, checkpoint_dir: Path, target: Path
) -> None:
    assert memory.take(1000)
    place = fill(memory, node, checkpoint_dir)
    writer = writer_of(checkpoint_dir, node)
    writer.suspend()
    with pytest.raises(CheckpointError, match=r"was not written within 0\.1 s by node"):
        memory.write(target).wait(0.1)
    await_end(writer)
    assert not place.exists()


@slow
def test_an_actor_that_dies_takes_its_memory_along_and_comes_again(
    memory: MemoryOfNodes, node: str, checkpoint_dir: Path, target: Path
) -> None:
    assert memory.take(1000)
    place = fill(memory, node, checkpoint_dir)
    writer = writer_of(checkpoint_dir, node)
    writer.suspend()
    write = memory.write(target)
    [actor] = memory._actors.values()
    ray.kill(actor, no_restart=False)
    writer.resume()
    with pytest.raises(CheckpointError, match="its process there died"):
        write.wait(LONGEST_S)
    await_end(writer)
    assert not place.exists()
    pause = threading.Event()
    # meanwhile there is no room
    while not memory.take(1000):
        pause.wait(0.1)
    fill(memory, node, checkpoint_dir)
    memory.write(target).wait(LONGEST_S)
    assert verify(target) == []
