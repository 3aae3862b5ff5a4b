"""Rules on mixtures of experts: how experts are divided over ranks, and what their routers can do."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.rules.backends import MEGATRON, backend_of
from megarl.config.rules.parallel import PIPELINE, TENSOR, world_size
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

EXPERT = f"{MEGATRON}.expert_model_parallel_size"
EXPERT_TENSOR = f"{MEGATRON}.expert_tensor_parallel_size"
BALANCING = f"{MEGATRON}.moe_router_load_balancing_type"
COEFFICIENT = f"{MEGATRON}.moe_aux_loss_coeff"
BIAS_RATE = f"{MEGATRON}.moe_router_bias_update_rate"
# what concerns experts and their routers only, with the values that leave everything as it is
WITHOUT_EXPERTS: dict[str, tuple[object, ...]] = {
    EXPERT: (1,),
    EXPERT_TENSOR: (1,),
    f"{MEGATRON}.moe_token_dispatcher_type": ("alltoall",),
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
    """Experts divide over their ranks, and mixtures of experts want sequence parallelism beside tensor parallelism."""
    _of_a_mixture(view)
    view.require(view[EXPERT] >= 1)
    if view.facts.num_experts % view[EXPERT]:
        yield Violation(EXPERT, view[EXPERT], f"it must divide the model's {view.facts.num_experts} experts", "write a divisor of that")
    if view[TENSOR] > 1 and not view[f"{MEGATRON}.sequence_parallel"]:
        bound = "a mixture of experts with tensor parallelism needs sequence parallelism"
        yield Violation(f"{MEGATRON}.sequence_parallel", False, bound, "set it to true")


def expert_widths_divide(view: View) -> Iterator[Violation]:
    """The columns of an expert divide over the ranks that it is cut over."""
    _of_a_mixture(view)
    size, width = view[EXPERT_TENSOR], view.facts.expert_ffn_hidden_size
    view.require(size >= 1)
    if width % size:
        yield Violation(EXPERT_TENSOR, size, f"it must divide the {width} columns of the model's experts", "write a divisor of that")
    if size > 1 and view.facts.mlp_bias:
        yield Violation(EXPERT_TENSOR, size, "Megatron-Core does not cut experts that have biases", f"write 1; raise {EXPERT} instead")


def expert_ranks_divide(view: View) -> Iterator[Violation]:
    """The ranks of a pipeline stage are a multiple of one copy of its experts."""
    _of_a_mixture(view)
    world, stages, experts, cut = world_size(view), view[PIPELINE], view[EXPERT], view[EXPERT_TENSOR]
    view.require(min(stages, experts, cut) >= 1 and world % stages == 0)
    if world // stages % (experts * cut):
        key = EXPERT if experts > 1 else EXPERT_TENSOR
        bound = f"the {world // stages} ranks of a pipeline stage must be a multiple of expert {experts} x expert tensor {cut}"
        yield Violation(key, view[key], bound, "make the two smaller, or give more ranks")


def experts_are_there(view: View) -> Iterator[Violation]:
    """What is said about experts and their routers would do nothing in a dense model."""
    view.require(backend_of(view) == "megatron" and view.facts.num_experts == 0)
    for key, idle in WITHOUT_EXPERTS.items():
        if view.get(key, idle[0]) not in idle:
            bound = "the model has no experts, so it would do nothing"
            yield Violation(key, view[key], bound, f"remove the line, or write {_as_yaml(idle[0])}")


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()


def router_options_fit(view: View) -> Iterator[Violation]:
    """What a router adds to choose experts by stays as it was loaded, and a coefficient needs a loss."""
    _of_a_mixture(view)
    if view.get(BIAS_RATE, 0):
        bound = f"no bias of the routers of {view.facts.model_type} is updated in training: it stays as it was loaded, where there is one"
        yield Violation(BIAS_RATE, view[BIAS_RATE], bound, f"write 0; to balance the experts set {BALANCING}")
    if view.get(COEFFICIENT) and view.get(BALANCING) == "none":
        yield Violation(COEFFICIENT, view[COEFFICIENT], f"{BALANCING} is none", "write null, or choose aux_loss or seq_aux_loss")


EXPERT_RULES: tuple[Rule, ...] = (
    experts_divide,
    expert_widths_divide,
    expert_ranks_divide,
    experts_are_there,
    router_options_fit,
)
