"""Rules on parallel sizes: division of ranks, layers, attention heads and experts, and dispatch of tokens to
experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from megarl.config.arithmetic import divisors_near, each_of, multiples_near, sequence_share
from megarl.config.layout import Layout, chunks_of_stages, layers_per_stage, pipeline_chunks
from megarl.config.rules.backends import DTENSOR, MEGATRON, backend_of
from megarl.config.rules.view import NotApplicableError, Rule, View
from megarl.errors import Violation

TENSOR = f"{MEGATRON}.tensor_model_parallel_size"
PIPELINE = f"{MEGATRON}.pipeline_model_parallel_size"
CONTEXT = f"{MEGATRON}.context_parallel_size"
EXCHANGE = f"{MEGATRON}.context_parallel_comm_type"
WITH_SINKS = frozenset({"gpt_oss"})
FIRST = f"{MEGATRON}.num_layers_in_first_pipeline_stage"
LAST = f"{MEGATRON}.num_layers_in_last_pipeline_stage"
VIRTUAL = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
GENERATION = "policy.generation"
FOR_TRAINING = "cluster.for_training"
"""Internal key that assigns all ranks of the cluster to training. It is set for a policy that a program
constructs itself, and for models other than the policy."""
WRITTEN = f"{MEGATRON}.pipeline_model_parallel_layout"


def tensor_key(view: View) -> str:
    """Return the dotted key of the tensor-parallel size; "" on FSDP1, which has none."""
    return {"megatron": TENSOR, "dtensor": f"{DTENSOR}.tensor_parallel_size"}.get(backend_of(view), "")


def sequence_parallel_key(view: View) -> str:
    """Return the dotted key of sequence parallelism; "" on FSDP1, which has none."""
    return {"megatron": f"{MEGATRON}.sequence_parallel", "dtensor": f"{DTENSOR}.sequence_parallel"}.get(
        backend_of(view), ""
    )


def axis_sizes(view: View) -> tuple[int, int, int]:
    """Return the (pipeline, context, tensor) parallel sizes of the policy."""
    backend = backend_of(view)
    if backend == "megatron":
        sizes = (view[PIPELINE], view[CONTEXT], view[TENSOR])
    elif backend == "dtensor":
        sizes = (1, view[f"{DTENSOR}.context_parallel_size"], view[f"{DTENSOR}.tensor_parallel_size"])
    else:
        sizes = (1, 1, 1)
    # Rules divide by these sizes. Values below 1 are reported by ``values_in_range``.
    view.require(min(sizes) >= 1)
    return sizes


def training_shape(view: View) -> tuple[int, int]:
    """Return (training nodes, training ranks per node), without nodes or ranks reserved for engines."""
    ranks, nodes = int(view["cluster.gpus_per_node"]), int(view["cluster.num_nodes"])
    own = generation_shape(view)
    if own is not None:
        ranks, nodes = (ranks - own[1], 1) if nodes == 1 else (ranks, nodes - own[0])
    view.require(ranks >= 1 and nodes >= 1)
    return nodes, ranks


def generation_shape(view: View) -> tuple[int, int] | None:
    """Return (nodes, ranks per node) reserved for engines; None if no devices are reserved for them."""
    if view.get(f"{GENERATION}.colocated.enabled", True) or view.has(FOR_TRAINING):
        return None
    ranks = view.get(f"{GENERATION}.colocated.resources.gpus_per_node")
    nodes = view.get(f"{GENERATION}.colocated.resources.num_nodes")
    if view["cluster.num_nodes"] == 1:
        view.require(ranks is not None)
        return 1, int(ranks)
    view.require(nodes is not None)
    return int(nodes), int(view["cluster.gpus_per_node"])


def engines_shape(view: View) -> tuple[int, int]:
    """Return (nodes, ranks per node) on which engines run: those reserved for them, else those of
    training."""
    return generation_shape(view) or training_shape(view)


def world_size(view: View) -> int:
    """Return the total number of training ranks."""
    nodes, ranks = training_shape(view)
    return nodes * ranks


def layout_of(view: View) -> Layout:
    """Return the layout of the training ranks.

    Raises:
        NotApplicableError: the number of ranks is not divisible by the product of the parallel sizes; the
            calling rule is then skipped.
    """
    pipeline, context, tensor = axis_sizes(view)
    world = world_size(view)
    if world % (pipeline * context * tensor):
        raise NotApplicableError("the ranks do not divide")
    return Layout(pipeline, world // (pipeline * context * tensor), context, tensor, training_shape(view)[1])


def ranks_divide(view: View) -> Iterator[Violation]:
    """Require that the number of training ranks is a multiple of pipeline x context x tensor parallel
    size."""
    pipeline, context, tensor = axis_sizes(view)
    world, copy = world_size(view), pipeline * context * tensor
    if world % copy == 0:
        return
    nodes, ranks = training_shape(view)
    left = "" if generation_shape(view) is None else ", without those of generation"
    shape = f"{world} ranks ({ranks} x {nodes} nodes{left})"
    fix = f"give a multiple of {copy} ranks, or make the parallel sizes smaller"
    bound = (
        f"{shape} must be a multiple of pipeline {pipeline} x context {context} x tensor {tensor} = {copy}"
    )
    # Smallest number of nodes that together hold a whole number of model copies.
    whole_copy = copy // math.gcd(copy, ranks)
    if not left and whole_copy > nodes:
        bound += f"; at least {whole_copy} nodes of {ranks} ranks are needed"
    yield Violation(
        "cluster.gpus_per_node",
        view["cluster.gpus_per_node"],
        bound,
        fix,
        tuple(_divisions(view, nodes, ranks)),
    )


def _divisions(view: View, nodes: int, ranks: int) -> Iterator[Mapping[str, object]]:
    """Yield changes with which the training ranks divide: of the ranks reserved for engines on a single
    node, then of the parallel sizes, then of the ranks per node."""
    pipeline, context, tensor = axis_sizes(view)
    copy, own, per_node = pipeline * context * tensor, generation_shape(view), view["cluster.gpus_per_node"]
    if own is not None and view["cluster.num_nodes"] == 1:
        left = (number for number in range(1, per_node) if (per_node - number) % copy == 0)
        nearest = sorted(left, key=lambda number: abs(number - own[1]))
        yield from each_of(f"{GENERATION}.colocated.resources.gpus_per_node", nearest)
    sizes = {tensor_key(view): tensor}
    if backend_of(view) == "megatron":
        sizes |= {PIPELINE: pipeline, CONTEXT: context}
    for key, size in sizes.items():
        yield from each_of(
            key,
            (
                number
                for number in divisors_near(nodes * ranks, size)
                if nodes * ranks % (copy // size * number) == 0
            ),
        )
    # Ranks reserved for engines on each node stay reserved.
    given = per_node - ranks
    yield from each_of(
        "cluster.gpus_per_node",
        (given + number for number in multiples_near(copy // math.gcd(copy, nodes), ranks)),
    )


def tensor_stays_inside_nodes(view: View) -> Iterator[Violation]:
    """Require that tensor-parallel groups do not straddle nodes: a group is on one node, or fills whole
    nodes."""
    nodes, per_node = training_shape(view)
    sizes = axis_sizes(view)
    tensor = sizes[-1]
    # ``ranks_divide`` reports ranks that do not divide.
    view.require(nodes > 1 and per_node * nodes % math.prod(sizes) == 0)
    if per_node % tensor and tensor % per_node:
        bound = f"groups of {tensor} neighbouring ranks would straddle nodes of {per_node} ranks"
        key, candidates = tensor_key(view), each_of(tensor_key(view), divisors_near(per_node, tensor))
        yield Violation(
            key, tensor, bound, f"write a divisor of {per_node}, or use nodes of another size", candidates
        )


def sequence_length_divides(view: View) -> Iterator[Violation]:
    """Require that padded sequences divide evenly over tensor- and context-parallel ranks."""
    view.require(backend_of(view) == "megatron")
    key = "policy.make_sequence_length_divisible_by"
    _, context, tensor = axis_sizes(view)
    share = sequence_share(tensor, context, view[f"{MEGATRON}.sequence_parallel"])
    if view[key] % share:
        bound = (
            f"tensor {tensor} and context {context} ranks share each sequence, of which each of several "
            f"context ranks holds two chunks, so it must be a multiple of {share}"
        )
        yield Violation(
            key, view[key], bound, "write such a multiple", each_of(key, multiples_near(share, view[key]))
        )


def layers_divide(view: View) -> Iterator[Violation]:
    """Require that the layers divide over pipeline stages, and those of a stage over its model chunks."""
    view.require(backend_of(view) == "megatron")
    stages, first, last = view[PIPELINE], view[FIRST], view[LAST]
    view.require(
        stages >= 1
        and (first is None or first >= 1)
        and (last is None or last >= 1)
        and view[WRITTEN] is None
    )
    if stages == 1:
        for key, value in ((FIRST, first), (LAST, last)):
            if value is not None:
                yield Violation(key, value, f"there is one pipeline stage ({PIPELINE} = 1)", "write null")
        return
    try:
        layers = layers_per_stage(view.facts.num_layers, stages, first, last)
    except ValueError as error:
        key, value = next(
            ((key, value) for key, value in ((FIRST, first), (LAST, last)) if value is not None),
            (PIPELINE, stages),
        )
        fix = f"choose {PIPELINE}, {FIRST} and {LAST} so that the {view.facts.num_layers} layers divide"
        even = ({FIRST: None, LAST: None},) if (first, last) != (None, None) else ()
        candidates = (*even, *each_of(PIPELINE, divisors_near(view.facts.num_layers, stages)))
        yield Violation(key, value, str(error), fix, candidates)
        return
    chunks = view[VIRTUAL]
    if chunks is not None and any(count % chunks for count in layers):
        bound = f"each stage's layers ({', '.join(map(str, layers))}) must divide into {chunks} model chunks"
        candidates = each_of(VIRTUAL, (*divisors_near(math.gcd(*layers), chunks), None))
        yield Violation(
            VIRTUAL, chunks, bound, "write a number that divides all of them, or null", candidates
        )


def written_layout_fits(view: View) -> Iterator[Violation]:
    """Require that ``pipeline_model_parallel_layout`` distributes exactly the model's layers over all
    stages, and that no other key contradicts it."""
    view.require(backend_of(view) == "megatron" and view[WRITTEN] is not None)
    text, stages = view[WRITTEN], view[PIPELINE]
    view.require(stages >= 1)
    for key in (FIRST, LAST):
        if view[key] is not None:
            yield Violation(key, view[key], f"{WRITTEN} says which layers a stage holds", "write null")
    if stages == 1:
        yield Violation(WRITTEN, text, f"there is one pipeline stage ({PIPELINE} = 1)", "write null")
        return
    try:
        chunks_of_stages(view[MEGATRON], view.facts.num_layers)
    except ValueError as error:
        yield Violation(WRITTEN, text, str(error), "write another layout, or null")
        return
    chunks = pipeline_chunks(view[MEGATRON])
    if view[VIRTUAL] not in {None, chunks}:
        yield Violation(
            VIRTUAL, view[VIRTUAL], f"{WRITTEN} has {chunks} chunks a stage", f"write {chunks} or null"
        )


def widths_divide(view: View) -> Iterator[Violation]:
    """Require that the tensor-parallel size divides the attention heads, and the widths of MLPs and shared
    experts."""
    key = tensor_key(view)
    view.require(key != "")
    tensor, facts = view[key], view.facts
    view.require(tensor >= 1)
    widths = {"attention heads": facts.num_attention_heads, "key-value heads": facts.num_key_value_heads}
    if facts.latent_attention is not None and key == TENSOR:
        widths["columns of latent keys and values"] = (
            facts.latent_attention.kv_lora_rank + facts.latent_attention.qk_rope_head_dim
        )
        widths["columns of latent queries"] = facts.latent_attention.q_lora_rank or 0
    if facts.gated_delta is not None:
        widths["key heads of gated delta nets"] = facts.gated_delta.key_heads
    if facts.has_dense_layers:
        widths["MLP columns"] = facts.ffn_hidden_size
    if facts.mixture is not None and facts.mixture.shared_ffn_hidden_size:
        widths["columns of the shared expert"] = facts.mixture.shared_ffn_hidden_size
    # Propose divisors of all widths, because a size that divides only one of them would violate the rule
    # again.
    candidates = each_of(key, divisors_near(math.gcd(*widths.values()), tensor))
    for name, width in widths.items():
        if width % tensor:
            bound = f"it must divide the model's {width} {name}"
            yield Violation(
                key, tensor, bound, "write a number that divides all of the model's widths", candidates
            )


def hidden_divides(view: View) -> Iterator[Violation]:
    """Require that the model's attention heads are a multiple of its key-value heads."""
    facts = view.facts
    if facts.num_attention_heads % facts.num_key_value_heads:
        bound = (
            f"{facts.num_attention_heads} attention heads are not a multiple of "
            f"{facts.num_key_value_heads} key-value heads"
        )
        yield Violation(
            "policy.model_name", view["policy.model_name"], bound, "correct the model's config.json"
        )


def sinks_are_gathered(view: View) -> Iterator[Violation]:
    """Refuse ring attention for models with attention sinks: each rank would count the sink in the softmax
    denominator of its own part."""
    view.require(backend_of(view) == "megatron" and view.facts.family in WITH_SINKS)
    if view[CONTEXT] > 1 and view.get(EXCHANGE) == "p2p":
        bound = f"the attention of {view.facts.family} has sinks, which ring attention does not support"
        yield Violation(EXCHANGE, "p2p", bound, "write all_gather")


PARALLEL_RULES: tuple[Rule, ...] = (
    sinks_are_gathered,
    ranks_divide,
    tensor_stays_inside_nodes,
    sequence_length_divides,
    layers_divide,
    written_layout_fits,
    widths_divide,
    hidden_divides,
)


EXPERT = f"{MEGATRON}.expert_model_parallel_size"
EXPERT_TENSOR = f"{MEGATRON}.expert_tensor_parallel_size"
DISPATCHER = f"{MEGATRON}.moe_token_dispatcher_type"
PERMUTATION = f"{MEGATRON}.moe_permute_fusion"
BALANCING = f"{MEGATRON}.moe_router_load_balancing_type"
COEFFICIENT = f"{MEGATRON}.moe_aux_loss_coeff"
BIAS_RATE = f"{MEGATRON}.moe_router_bias_update_rate"
# Keys that only mixture-of-experts models read -> the values that mean "off", which dense models may have.
WITHOUT_EXPERTS: dict[str, tuple[object, ...]] = {
    EXPERT: (1,),
    EXPERT_TENSOR: (1,),
    DISPATCHER: ("alltoall",),
    PERMUTATION: (False,),
    f"{MEGATRON}.moe_grouped_gemm": (None, False),
    f"{MEGATRON}.freeze_moe_router": (False,),
    f"{MEGATRON}.moe_router_dtype": (None,),
    BALANCING: ("none",),
    COEFFICIENT: (None, 0),
    f"{MEGATRON}.moe_z_loss_coeff": (None, 0),
    BIAS_RATE: (0,),
}


def _of_a_mixture(view: View) -> None:
    view.require(backend_of(view) == "megatron" and view.facts.num_experts > 0)


def experts_divide(view: View) -> Iterator[Violation]:
    """Require that the expert-parallel size divides the number of experts, and that a mixture-of-experts
    model with tensor parallelism uses sequence parallelism."""
    _of_a_mixture(view)
    view.require(view[EXPERT] >= 1)
    if view.facts.num_experts % view[EXPERT]:
        candidates = each_of(EXPERT, divisors_near(view.facts.num_experts, view[EXPERT]))
        bound = f"it must divide the model's {view.facts.num_experts} experts"
        yield Violation(EXPERT, view[EXPERT], bound, "write a divisor of that", candidates)
    # Megatron-Core's MoELayer refuses to train without sequence parallelism.
    if view[TENSOR] > 1 and not view[f"{MEGATRON}.sequence_parallel"]:
        bound = "a mixture of experts with tensor parallelism needs sequence parallelism"
        yield Violation(f"{MEGATRON}.sequence_parallel", False, bound, "set it to true")


def expert_widths_divide(view: View) -> Iterator[Violation]:
    """Require that the expert tensor-parallel size divides an expert's width, and is 1 for experts with
    biases."""
    _of_a_mixture(view)
    size, mixture = view[EXPERT_TENSOR], view.facts.mixture
    view.require(size >= 1)
    width = 0 if mixture is None else mixture.ffn_hidden_size
    if width % size:
        bound, candidates = (
            f"it must divide the {width} columns of the model's experts",
            each_of(EXPERT_TENSOR, divisors_near(width, size)),
        )
        yield Violation(EXPERT_TENSOR, size, bound, "write a divisor of that", candidates)
    if size > 1 and view.facts.mlp_bias:
        yield Violation(
            EXPERT_TENSOR,
            size,
            "Megatron-Core does not split experts that have biases",
            f"write 1; raise {EXPERT} instead",
        )


def expert_ranks_divide(view: View) -> Iterator[Violation]:
    """Require that the ranks of a pipeline stage are a multiple of expert x expert tensor parallel size."""
    _of_a_mixture(view)
    world, stages, experts, cut = world_size(view), view[PIPELINE], view[EXPERT], view[EXPERT_TENSOR]
    view.require(min(stages, experts, cut) >= 1 and world % stages == 0)
    if world // stages % (experts * cut):
        key = EXPERT if experts > 1 else EXPERT_TENSOR
        bound = (
            f"the {world // stages} ranks of a pipeline stage must be a multiple of expert {experts} x "
            f"expert tensor {cut}"
        )
        ranks = world // stages
        candidates = (
            *each_of(EXPERT, (size for size in divisors_near(ranks, experts) if ranks % (size * cut) == 0)),
            *each_of(
                EXPERT_TENSOR, (size for size in divisors_near(ranks, cut) if ranks % (size * experts) == 0)
            ),
            {EXPERT: 1, EXPERT_TENSOR: 1},
        )
        yield Violation(key, view[key], bound, "lower these two sizes, or give more ranks", candidates)


def tokens_get_to_their_experts(view: View) -> Iterator[Violation]:
    """Refuse DeepEP (``flex``) and the fused permutation on a CPU, and DeepEP with group sizes or dtypes
    that it does not support."""
    _of_a_mixture(view)
    on_cpu, sends_by_kernels = view.get("cluster.device") == "cpu", view[DISPATCHER] == "flex"
    if view[PERMUTATION] and on_cpu:
        bound = "its kernels are Transformer Engine's, which needs a GPU, and cluster.device is cpu"
        yield Violation(PERMUTATION, True, bound, "write false", each_of(PERMUTATION, [False]))
    if not sends_by_kernels:
        return
    otherwise = each_of(DISPATCHER, ["alltoall"])
    if on_cpu:
        bound = "its kernels are DeepEP's, which needs GPUs, and cluster.device is cpu"
        yield Violation(DISPATCHER, "flex", bound, "write alltoall", otherwise)
    ranks, precision = view[EXPERT] * view[EXPERT_TENSOR], view["policy.precision"]
    if ranks not in (2, 4) and (ranks < 1 or ranks % 8):
        bound = f"DeepEP supports 2, 4 or a multiple of 8 ranks, and {EXPERT} x {EXPERT_TENSOR} = {ranks}"
        yield Violation(
            DISPATCHER,
            "flex",
            bound,
            "write alltoall, or divide the experts over such a number of ranks",
            otherwise,
        )
    if precision != "bfloat16":
        bound = f"DeepEP sends only bfloat16, and policy.precision is {precision}"
        yield Violation(DISPATCHER, "flex", bound, "write alltoall, or train in bfloat16", otherwise)


EXPERT_RULES: tuple[Rule, ...] = (
    experts_divide,
    expert_widths_divide,
    expert_ranks_divide,
    tokens_get_to_their_experts,
)
