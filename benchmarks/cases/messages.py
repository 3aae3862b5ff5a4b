"""Messages and bytes of a refit, counted at 8 to 1,024 ranks: what the driver sends and receives, and what
each rank does by itself. For mixtures of experts, this includes experts that are sharded over the ranks of
policy and engine.

The driver's own code runs over groups of fake workers, which reply as real ones but start no processes. The
weights have the shapes of real models and take no memory. The baseline is a refit whose handles the driver
carries, group by group. Counts are the same on every machine, and the case fails if a refit takes more calls
than ``CALLS``.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.point import Metric, Point

if TYPE_CHECKING:
    from converters.model_config.architecture import Architecture
    from megarl.models.generation.engine_group import EngineGroup
    from megarl.models.policy.lm_policy import Policy
    from megarl.weight_sync.manifest import Manifest
    from megarl.weight_sync.plan import TensorInfo
    from megarl.weight_sync.slices import Slice

CALLS = 2
"""Calls that transfer the weights: one of the policy's ranks and one of the engines."""
RANKS, QUICK_RANKS = (8, 64, 256, 1024), (8, 1024)
DEFAULT_SLOT_BYTES = 2**29
VERSION = 3
# This is torch's description of a buffer in device memory, with realistic lengths.
_DEVICE = {
    "nbytes": 2**30,
    "storage_handle": bytes(66),
    "storage_size_bytes": 2**30,
    "storage_offset_bytes": 0,
    "tensor_offset": 0,
    "ref_counter_handle": b"/torch_123456_1234567890_123",
    "ref_counter_offset": 9999,
    "event_handle": bytes(64),
    "event_sync_required": True,
}
_MEMORY = {
    "host": f"{'0' * 36}/pid:[4026531836]",
    "process": 1234567,
    "descriptor": 123,
    "nbytes": 4096,
    "token": "0" * 32,
}
_MAILBOX = {
    "host": _MEMORY["host"],
    "process": 1234567,
    "on_gpu": True,
    "engine_rank": None,
    "name": "0" * 5,
    "token": "0" * 32,
}
# These entries belong to a group whose handle travels through the driver.
_CARRIED = {"round": 0, "mailbox": _MAILBOX}


VOCABULARY_MULTIPLE = 64
"""The multiple to which vLLM pads a vocabulary before it shards it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A model and its layout on the ranks.

    Attributes:
        tensor: tensor-parallel ranks of the policy.
        engine: ranks of an engine.
        sizes: sizes of the model, as its config class takes them.
        config: name of its config class in transformers.
        expert: expert-parallel ranks of the policy; each expert is whole.
        divided: the engine is expert-parallel too, with whole experts, instead of sharding each of them.
    """

    tensor: int
    engine: int
    sizes: Mapping[str, Any]
    config: str = "LlamaConfig"
    expert: int = 1
    divided: bool = False

    @property
    def mixture(self) -> int:
        """Experts per layer; 0 for a dense model."""
        return int(self.sizes.get("num_experts", self.sizes.get("n_routed_experts", 0)))


_30B_A3B = {
    "vocab_size": 151_936,
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
_671B = {
    "vocab_size": 129_280,
    "hidden_size": 7_168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2_048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
LAYOUTS = {
    "7B": Layout(
        2,
        1,
        {
            "vocab_size": 152_064,
            "hidden_size": 3_584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "70B": Layout(
        8,
        8,
        {
            "vocab_size": 128_256,
            "hidden_size": 8_192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "30B-A3B, divided alike": Layout(4, 4, _30B_A3B, "Qwen3MoeConfig", expert=4, divided=True),
    "30B-A3B, engine cut": Layout(1, 4, _30B_A3B, "Qwen3MoeConfig", expert=8),
    "671B, divided alike": Layout(1, 8, _671B, "DeepseekV3Config", expert=8, divided=True),
}


def architecture_of(layout: Layout) -> Architecture:
    """Return the architecture of a layout's model."""
    import transformers

    from converters.families.read import read_architecture

    return read_architecture(getattr(transformers, layout.config)(**layout.sizes, tie_word_embeddings=False))


def manifest_of(layout: Layout) -> Manifest:
    """Return the manifest of a model's weights in bfloat16, without allocating them."""
    import torch

    from converters.mapping.rules import hf_tensors
    from megarl.weight_sync.manifest import Manifest

    return Manifest.from_description(
        {part.name: (part.shape, torch.bfloat16) for part in hf_tensors(architecture_of(layout))}
    )


def wanted_of(layout: Layout, manifest: Manifest) -> tuple[dict[str, Slice], ...]:
    """Return the slices that each rank of an engine reads; see ``slices_read``."""
    experts = layout.mixture * layout.divided
    return (
        slices_read(manifest, layout.sizes["num_key_value_heads"], layout.engine, experts)
        if layout.engine > 1
        else ({},)
    )


def slices_read(
    manifest: Manifest, key_heads: int, ranks: int, experts: int = 0
) -> tuple[dict[str, Slice], ...]:
    """Return the slices of a model that each rank of a vLLM engine reads. They are those that
    ``tests/system/test_vllm.py`` observes in vLLM's loaders.

    Args:
        manifest: the weights.
        key_heads: key-value heads; if there are fewer than ranks, some ranks read the same heads.
        ranks: tensor-parallel ranks of the engine.
        experts: experts per layer if they are distributed over these ranks; 0 if each expert is sharded.
    """
    return tuple(
        {
            tensor.name: where
            for tensor in manifest.tensors
            if (where := _slice_read(tensor, key_heads, rank, ranks, experts)) is not None
        }
        for rank in range(ranks)
    )


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _slice_read(tensor: TensorInfo, key_heads: int, rank: int, ranks: int, experts: int) -> Slice | None:
    from megarl.weight_sync.slices import Slice

    module = tensor.name.split(".")[-2]
    rows = tensor.shape[0]
    expert = _EXPERT.search(tensor.name)
    if expert is not None and experts:
        # If the experts do not divide evenly, the first ranks have one more.
        first, more = rank * (experts // ranks) + min(rank, experts % ranks), rank < experts % ranks
        return None if first <= int(expert[1]) < first + experts // ranks + more else Slice(0, 0, 0)
    if module in ("k_proj", "v_proj"):
        alike = max(ranks // key_heads, 1)
        rank, ranks = rank // alike, ranks // alike
    if module in ("embed_tokens", "lm_head"):
        share = -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // ranks
        start, stop = min(rank * share, rows), min((rank + 1) * share, rows)
        # A rank that has only padding reads nothing.
        found = Slice(0, start, stop - start) if stop > start else Slice(0, 0, 0)
    elif module in (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "w1",
        "w3",
        "q_b_proj",
        "kv_b_proj",
    ):
        found = Slice(0, rank * rows // ranks, rows // ranks)
    elif module in ("o_proj", "down_proj", "w2") and tensor.name.endswith("weight"):
        found = Slice(1, rank * tensor.shape[1] // ranks, tensor.shape[1] // ranks)
    else:
        found = None
    return None if found is None or found.length == tensor.shape[found.dim] else found


@dataclass(frozen=True, slots=True)
class Moved:
    """Weights that a refit moves to one rank of the policy, and to the engine's rank on the same device.

    Attributes:
        gathered: bytes that the rank gets from other ranks of its stage.
        gathered_whole: the same if engines read full tensors.
        handed: manifest of the weights that the rank hands over.
    """

    gathered: int
    gathered_whole: int
    handed: Manifest


def moved(manifest: Manifest, layout: Layout, wanted: Sequence[Mapping[str, Slice]]) -> Moved:
    """Return the weights that move for the first rank of the policy, if each rank has an engine rank on its
    device that reads ``wanted``. The code of the refit itself decides how far shards travel."""
    from converters.mapping.layouts import padded_vocab_size
    from converters.mapping.rule import expert_index, is_expert
    from converters.mapping.rules import all_rules
    from megarl.models.megatron.weight_stream import Beside, Reach, layouts_of, reach_of
    from megarl.weight_sync.slices import Slice

    architecture = architecture_of(layout)
    padded = padded_vocab_size(architecture.vocab_size, layout.tensor)
    shapes = {tensor.name: tensor for tensor in manifest.tensors}
    # Further ranks only repeat the positions of these.
    ranks = range(math.lcm(layout.tensor, layout.expert, layout.engine))
    everybody = {
        Beside(rank % layout.tensor, 0, rank % layout.expert, rank % layout.engine) for rank in ranks
    }
    gathered = whole = 0
    for rule in all_rules(architecture):
        of_expert = is_expert(rule.megatron_name)
        cut = 1 if of_expert else layout.tensor
        share = architecture.mixture.num_experts // layout.expert if architecture.mixture is not None else 1
        owner = expert_index(rule.megatron_name) // share if of_expert else 0
        reach = (
            reach_of(rule, owner, layouts_of(rule, cut, padded, architecture), wanted, everybody)
            if any(wanted)
            else Reach.ALL
        )
        holders = cut * (layout.expert if of_expert else 1)
        sources = {Reach.OWN: 1, Reach.TENSOR: cut, Reach.ALL: holders}[reach]
        nbytes = sum(shapes[part.name].nbytes for part in rule.parts)
        # A rank already has one of the equal shards.
        gathered += nbytes * (sources - 1) // sources
        whole += nbytes * (holders - 1) // holders
    names = {name for slices in wanted for name in slices}
    slices = {name: wanted[0].get(name, Slice.all_of(shapes[name].shape)) for name in names}
    return Moved(gathered, whole, manifest.sliced(slices))


def experts_kept(manifest: Manifest) -> int:
    """Return the bytes of the experts in the largest layer. An engine's rank keeps them until all of them
    have arrived."""
    layers: Counter[str] = Counter()
    for tensor in manifest.tensors:
        layer, found, _ = tensor.name.partition(".experts.")
        layers[layer] += tensor.nbytes if found else 0
    return max(layers.values())


def weights_loaded(manifest: Manifest) -> int:
    """Return the number of weights that an engine's rank hands to vLLM's loaders. The experts of a layer
    count as three stacks."""
    names = [tensor.name for tensor in manifest.tensors]
    return len({_EXPERT.sub(".experts.", name) for name in names})


def _nothing(worker: int, **options: Any) -> None:
    return None


@dataclass
class Workers:
    """A group of fake workers, as the driver sees it. They only reply, and all traffic is counted.

    Attributes:
        count: number of workers.
        answers: function that computes the reply of each method, called with a worker's number and the
            arguments.
        calls: number of calls of each method.
        sent: bytes that left the driver; an object that goes to all workers is stored once.
        heard: bytes of all replies.
    """

    count: int
    answers: Mapping[str, Any]
    calls: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    heard: int = 0

    def run_all_workers_single_data(
        self, method: str, run_rank_0_only_axes: Sequence[str] = (), **options: Any
    ) -> list[Any]:
        """Call a method of all workers, each of which is the only node of its engine."""
        self.calls[method] += 1
        for value in options.values():
            plain = value is None or isinstance(value, bool | int | float | str)
            self.sent += len(pickle.dumps(value)) * (self.count if plain else 1)
        answer = self.answers.get(method, _nothing)
        return [functools.partial(answer, worker, **options) for worker in range(self.count)]

    def run_single_worker_single_data(self, method: str, worker: int, **options: Any) -> Any:
        """Call a method of one worker."""
        self.calls[method] += 1
        self.sent += len(pickle.dumps(options))
        return functools.partial(self.answers.get(method, _nothing), worker, **options)

    def get_all_worker_results(self, futures: list[Any]) -> list[Any]:
        """Compute and return the replies of the workers."""
        answers = [future() for future in futures]
        self.heard += sum(len(pickle.dumps(one)) for one in answers)
        return answers

    def shutdown(self, **options: Any) -> bool:
        """Do nothing, as no process runs, and return True."""
        return True

    def reset(self) -> None:
        """Set all counts to zero."""
        self.calls.clear()
        self.sent = self.heard = 0


def payload(manifest: Manifest, first: int, count: int) -> dict[str, Any]:
    """Return the mailbox message for a group of weights in device memory."""
    buffer = {"memory": _MEMORY, "slot_bytes": 2**29, "device": _DEVICE}
    group = {"index": 1, "first": first, "count": count, "checksum": None}
    return {"buffer": buffer, "manifest": manifest.digest, "version": VERSION, **group}


def room(manifest: Manifest) -> int:
    """Return the size of a group in bytes, if no size is configured."""
    return max(DEFAULT_SLOT_BYTES, manifest.largest[1])


def device(rank: int) -> str:
    """Return a GPU identity for a rank."""
    return f"GPU-{rank:036d}"


def _sent(rank: int, names: list[str]) -> list[str] | str:
    from megarl.weight_sync.slices import names_digest

    return names_digest(names) if rank else names


def driver_of(
    manifest: Manifest,
    ranks: int,
    engines: int,
    engine_ranks: int,
    slices: Sequence[Mapping[str, Slice]] = (),
) -> tuple[Policy, EngineGroup]:
    """Return a policy and engines as the driver has them, on fake workers. The ranks of an engine read
    ``slices``, all of which the policy's ranks send."""
    from megarl.models.generation.engine_group import EngineGroup, EngineWorkers
    from megarl.models.policy.lm_policy import Policy
    from megarl.weight_sync.slices import slices_digest

    # Do not call the constructor, which starts workers.
    policy = object.__new__(Policy)
    slices = slices or ({},) * engine_ranks
    digests = [slices_digest(own) for own in slices]
    policy.worker_group = Workers(  # type: ignore[assignment]
        ranks,
        {
            "prepare_refit_info": lambda rank, first_rank_only=False: (
                manifest.description() if not (first_rank_only and rank) else {}
            ),
            "mailbox": lambda rank: {device(rank): _MAILBOX},
            "send_slices": lambda rank, wanted, first_rank_only: _sent(
                rank, [] if wanted is None else list(slices[0])
            ),
            "begin_refit": lambda rank: room(manifest),
            "get_part_ipc_handles": lambda rank, first, count: {
                device(rank): payload(manifest, first, count) | _CARRIED
            },
        },
    )
    played = Workers(
        engines,
        {
            "slices_read": lambda engine, as_digest=False: [
                (device(engine * engine_ranks + rank), digests[rank] if as_digest else slices[rank])
                for rank in range(engine_ranks)
            ],
            **{
                name: lambda engine, **options: VERSION
                for name in ("update_from_policy", "update_from_broadcast", "update_from_handles")
            },
        },
    )
    workers = EngineWorkers(lambda: played, engines, engine_ranks, nodes=1, init_timeout_s=60.0)  # type: ignore[arg-type, return-value]
    generation = EngineGroup(
        workers, {"colocated": {"enabled": True}}, vocab_size=0, longest=0, longest_key=""
    )
    generation._connected = True
    generation.prepare_refit_info(policy.prepare_refit_info() or {})
    return policy, generation


LIFE = ("offload_before_refit", "offload_after_refit", "prepare_for_generation")
"""Calls that move memory rather than weights."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Messages and bytes of one refit at the driver.

    Attributes:
        calls: calls that transfer weights, each of all ranks of the policy or all engines.
        others: calls that free memory for the weights.
        messages: messages to single workers by ``calls``.
        nbytes: bytes sent and received.
    """

    calls: int
    others: int
    messages: int
    nbytes: int


def counted(policy: Policy, generation: EngineGroup, way: str) -> Counted:
    """Run one refit, and return its counts. ``way`` is ``hand over``, ``handles`` or ``broadcast``."""
    from megarl.algorithms.refit import refit_policy_generation

    groups: list[Any] = [policy.worker_group, generation.worker_group]
    # The driver asks the workers for the manifest once, so read it before the counts are reset.
    _ = policy._manifest
    for group in groups:
        group.reset()
    if way == "handles":
        policy.offload_before_refit()
        generation.prepare_for_generation(tags=["weights"])
        for names in policy.prepare_weights_for_ipc():
            generation.update_weights_from_ipc_handles(policy.get_weights_ipc_handles(names))
        policy.offload_after_refit()
        generation.prepare_for_generation(tags=["kv_cache"])
    else:
        # Fix the random number, because the size of a message depends on it.
        with mock.patch("secrets.randbits", return_value=2**61):
            refit_policy_generation(policy, generation, colocated_inference=way == "hand over")
    if generation.version != VERSION:
        raise RuntimeError(
            f"a refit by {way} left the engines at version {generation.version}, not {VERSION}"
        )
    calls = [{name: number for name, number in group.calls.items() if name not in LIFE} for group in groups]
    return Counted(
        sum(sum(found.values()) for found in calls),
        sum(sum(group.calls.values()) for group in groups) - sum(sum(found.values()) for found in calls),
        sum(group.count * sum(found.values()) for group, found in zip(groups, calls, strict=True)),
        sum(group.sent + group.heard for group in groups),
    )


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each model and number of ranks. Mixtures have many weights, and counting them takes
    minutes: they are counted only at the largest number of ranks, and a quick run counts only the first
    mixture."""
    dense = [name for name, layout in LAYOUTS.items() if not layout.mixture]
    mixtures = [name for name, layout in LAYOUTS.items() if layout.mixture]
    for name in [*dense, *(mixtures[:1] if quick else mixtures)]:
        layout = LAYOUTS[name]
        manifest = manifest_of(layout)
        for ranks in RANKS[-1:] if layout.mixture else QUICK_RANKS if quick else RANKS:
            yield _point(name, layout, manifest, ranks)


def _point(name: str, layout: Layout, manifest: Manifest, ranks: int) -> Point:
    from megarl.weight_sync.mailbox import without_bytes

    wanted = wanted_of(layout, manifest)
    policy, generation = driver_of(manifest, ranks, ranks // layout.engine, layout.engine, wanted)
    first = counted(policy, generation, "hand over")
    found = {way: counted(policy, generation, way) for way in ("hand over", "broadcast", "handles")}
    ours, apart, carried = found["hand over"], found["broadcast"], found["handles"]
    if max(ours.calls, apart.calls) > CALLS:
        raise RuntimeError(
            f"{ours.calls} calls a refit on the policy's devices, {apart.calls} on others: at most {CALLS} "
            "are allowed"
        )
    found_moved = moved(manifest, layout, wanted)
    handed = found_moved.handed
    groups = list(handed.groups(room(handed)))
    posted = sum(
        len(json.dumps(without_bytes(payload(handed, group.first, group.count)))) for group in groups
    )
    metrics = {
        "calls": Metric.of("calls of all ranks or all engines by which weights go", [ours.calls]),
        "calls_apart": Metric.of("such calls of a refit of engines apart", [apart.calls]),
        "calls_by_handles": Metric.of("such calls where the driver carries handles", [carried.calls]),
        "calls_of_memory": Metric.of("calls that make room for weights", [ours.others]),
        "messages": Metric.of("messages to single workers by which weights go", [ours.messages]),
        "messages_by_handles": Metric.of(
            "such messages where the driver carries handles", [carried.messages]
        ),
        "driver_bytes": Metric.of("bytes to and from the driver", [ours.nbytes]),
        "driver_bytes_first": Metric.of("bytes to and from the driver at the first refit", [first.nbytes]),
        "driver_bytes_by_handles": Metric.of(
            "bytes to and from the driver that carries handles", [carried.nbytes]
        ),
        "groups": Metric.of("groups that a rank posts", [len(groups)]),
        "posted_bytes": Metric.of("bytes that a rank writes into its mailbox", [posted]),
        "sliced_weights": Metric.of("weights that a rank hands over as slices", [len(handed.slices)]),
        "gathered_bytes": Metric.of(
            "bytes of weights that a rank gets from other ranks", [found_moved.gathered]
        ),
        "gathered_bytes_whole": Metric.of(
            "such bytes where engines take whole weights", [found_moved.gathered_whole]
        ),
        "handed_bytes": Metric.of(
            "bytes of weights that a rank hands over on its device", [handed.total_bytes]
        ),
        "handed_bytes_whole": Metric.of(
            "such bytes where engines take whole weights", [manifest.total_bytes]
        ),
        "experts_kept": Metric.of(
            "bytes of a layer's experts that an engine's rank keeps until it has them", [experts_kept(handed)]
        ),
        "experts_kept_whole": Metric.of(
            "such bytes where engines take whole weights", [experts_kept(manifest)]
        ),
        "weights_loaded": Metric.of(
            "weights that an engine's rank hands to vLLM's loaders", [weights_loaded(manifest)]
        ),
        "weights": Metric.of("weights of the model", [len(manifest.tensors)]),
    }
    return Point({"model": name, "ranks": ranks, "engines": ranks // layout.engine}, metrics)
