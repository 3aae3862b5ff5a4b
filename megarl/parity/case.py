"""A case: one comparison with the reference, written as a line of text.

Every field is a number, a name or a boolean, and its default is the simplest value. Sizes that must divide
others are factors (heads = ``kv`` x ``group``), so that most fields can be changed independently.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megarl.config.arithmetic import sequence_share
from megarl.models.generation.sampling import SamplingSettings
from megarl.parity.options import Numbers, numbers_of, split

BACKENDS = ("megatron", "dtensor", "fsdp1")
DENSE = ("llama", "qwen2", "qwen3", "mistral")
OF_MEGATRON = ("ministral", "seed_oss", "qwen3_5_text")
"""Dense families that are compared only on the Megatron backend."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
"""Families with latent attention."""
CLASS_IN_TRANSFORMERS = {"kimi_k2": "deepseek_v3"}
"""Family -> name that transformers has for it, if different."""
GROUPED = (*LATENT, "glm4_moe", "dots1")
"""Families with DeepSeek's mixture of experts: groups of experts, shared experts, a dense first layer if
there are several layers, and routers in float32."""
SPARSE = ("mixtral", "qwen3_moe", "qwen2_moe", *GROUPED, "gpt_oss", "qwen3_next", "qwen3_5_moe_text")
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with gated delta nets instead of attention in every second layer, beginning with the first."""
HEAD_NORMS = ("qwen3", "qwen3_moe", "dots1", *HYBRID)
"""Families that normalise queries and keys per head."""
WINDOWED = ("mistral", "mixtral", "ministral", "dots1", "gpt_oss")
"""Families with a sliding window; the last three only in some layers."""
ROPES = ("default", "linear", "llama3", "yarn")
BATCHINGS = ("fixed", "dynamic", "packed")
MASKS = ("none", "some", "rank", "all")
DISPATCHERS = ("alltoall", "allgather")
BALANCES = ("none", "aux", "seq")
OPTIMIZERS = ("adam", "sgd")
PRECISIONS = ("float32", "bfloat16", "float16")
ROUTER_TYPES = ("model", "fp32", "fp64")
EXCHANGES = ("all_gather", "p2p")
PLANS = ("built-in", "written", "names", "mlp")
SCHEDULES = ("constant", "linear", "cosine", "inverse-square-root")
DECAYS = ("constant", "linear", "cosine")
PATHS = ("fast", "plain")
MODEL_CLASSES = ("gpt", "hybrid")
# Adam divides by the root of the second moment, so a gradient's error may reappear in a weight, multiplied by
# up to the learning rate over epsilon. Gradients here are of order 1e-2 to 1, with rounding errors of 1e-8 to
# 1e-7. With a smaller epsilon, these errors would show in the next gradient.
MILD_EPSILON = 1e-2
RECIPE_EPSILON = 1e-8
"""Adam's epsilon in recipes. With it, a weight whose gradient consists of rounding errors moves by the
learning rate in either direction, so the error bounds of such a case are measured
(``megarl.parity.noise``)."""
SCORING = ("rm", "value")
"""Losses of reward and value models: Bradley-Terry, and the value loss."""
PAIRED = ("dpo", "rm")
"""Losses of pairs of rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison with the reference.

    Attributes:
        backend: training backend.
        seed: seed of weights and batches.
        family: ``model_type`` of the model.
        tied: the output layer shares the embedding's weight.
        rope: type of rotary scaling.
        layers: number of transformer layers.
        kv: key-value heads.
        group: query heads per key-value head.
        head: width of a head, even; with latent attention, of the part that is not rotated.
        width: hidden size per query head.
        ffn: width of the gated MLP.
        vocab: vocabulary size.
        window: sliding window in tokens; 0 for none.
        experts: experts per layer, for families with experts.
        topk: experts per token.
        expert: width of an expert, if the family has a separate one; shared experts are as wide, or twice.
        dispatcher: token exchange between expert-parallel ranks.
        balance: load-balancing loss of the routers: ``none``, ``aux`` over the global batch, ``seq`` per
            sequence.
        zloss: routers have a z-loss.
        freeze: routers are frozen.
        router: dtype in which routers compute; ``model`` for the model's.
        tp, pp, cp, dp: tensor-, pipeline-, context- and data-parallel size.
        sp: sequence parallelism.
        first, last: layers in the first and the last pipeline stage; 0 divides evenly.
        vpp: model chunks per pipeline stage.
        layout: layers of each model chunk in Megatron-Core's notation; empty if the other fields decide.
        comm: exchange of keys and values between context-parallel ranks.
        plan: tensor-parallel plan of DTensor: built-in, or one of ``megarl.parity.settings``.
        ep, etp: expert-parallel and expert-tensor-parallel size.
        batching: how rows are divided into micro-batches.
        mbs: rows per micro-batch.
        micro: micro-batches of ``mbs`` rows per data-parallel rank and global batch.
        room: tokens that a micro-batch may have beyond one longest sequence (dynamic, packed).
        round: multiple to which lengths are rounded up (dynamic).
        packer: packing algorithm; empty for the default.
        length: S, number of columns of the batch.
        pad: rows are padded to this multiple of the length that the layout needs.
        rows: rows whose log-probabilities are requested; 0 for all.
        lpbs: rows per micro-batch for log-probabilities.
        masked: masked samples: none, some, all of one data-parallel rank, all.
        segments: maximum number of rows per response, which share its advantage; 1 if each row is a response.
        together: pass all global batches to one ``train()`` call.
        evaluate: evaluate first; this must give the loss of the first step and change nothing.
        reference: keep a reference policy, whose log-probabilities must not change by training.
        loss: ``nll``, ``pg``, ``dpo``, ``distill``, ``rm`` or ``value`` with options
            (``megarl.parity.options``), such as ``pg+kl:0.02``. With the last two the model has a score
            layer, and values are compared instead of log-probabilities.
        advantages: advantages of a policy gradient, or returns of a value loss: ``given``, or an estimator
            with options.
        temperature: sampling temperature.
        keep: top-k; 0 for all tokens.
        nucleus: top-p; 1 for all tokens.
        optimizer: ``adam`` or ``sgd``.
        eps: Adam's epsilon. Recipes have 1e-8; see ``MILD_EPSILON``.
        lr: maximum learning rate.
        clip: maximum gradient norm; 0 for no clipping.
        warmup: the learning rate rises over the first calls.
        schedule: how the learning rate falls after warm-up.
        decay: how the weight decay grows (Megatron).
        steps: number of optimizer steps.
        precision: dtype of the model's weights and activations.
        wide: accumulate gradients in float32 (Megatron); the torch backends always do.
        recompute: recompute activations in the backward pass.
        distopt: distributed optimizer (Megatron).
        overlap: overlap gradient reductions with the backward pass (Megatron).
        bucket: parameters per reduction, with overlap (Megatron); 0 for Megatron's default.
        offload: keep parameters in host memory between uses (torch backends).
        lora: rank of adapters that are trained instead of the weights; 0 for none.
        stacks: stacks of experts have adapters too.
        outer: embedding and output layer, which must be separate, have adapters too.
        paths: ``fast``, or ``plain`` without the fast paths in ``megarl.parity.paths``.
        chunk: positions whose logits are computed at a time; 0 for all of a micro-batch.
        model_class: ``hybrid`` for Megatron-Core's HybridModel, which counts a layer of the case as two.
    """

    backend: str = "megatron"
    seed: int = 0
    family: str = "llama"
    tied: bool = False
    rope: str = "default"
    layers: int = 1
    kv: int = 1
    group: int = 1
    head: int = 4
    width: int = 16
    ffn: int = 5
    vocab: int = 7
    window: int = 0
    experts: int = 0
    topk: int = 0
    expert: int = 0
    dispatcher: str = "alltoall"
    balance: str = "none"
    zloss: bool = False
    freeze: bool = False
    router: str = "model"
    tp: int = 1
    sp: bool = False
    pp: int = 1
    first: int = 0
    last: int = 0
    vpp: int = 1
    layout: str = ""
    cp: int = 1
    comm: str = "all_gather"
    ep: int = 1
    etp: int = 1
    dp: int = 1
    plan: str = "built-in"
    batching: str = "fixed"
    mbs: int = 1
    micro: int = 1
    room: int = 0
    round: int = 1
    packer: str = ""
    length: int = 3
    pad: int = 1
    rows: int = 0
    lpbs: int = 1
    masked: str = "none"
    segments: int = 1
    together: bool = False
    evaluate: bool = False
    reference: bool = False
    loss: str = "nll"
    advantages: str = "given"
    temperature: float = 1.0
    keep: int = 0
    nucleus: float = 1.0
    optimizer: str = "adam"
    eps: float = MILD_EPSILON
    lr: float = 0.002
    clip: float = 0.0
    warmup: bool = False
    schedule: str = "constant"
    decay: str = "constant"
    steps: int = 2
    precision: str = "float32"
    wide: bool = False
    recompute: bool = False
    distopt: bool = False
    overlap: bool = False
    bucket: int = 0
    offload: bool = False
    lora: int = 0
    stacks: bool = False
    outer: bool = False
    paths: str = "fast"
    chunk: int = 0
    model_class: str = "gpt"

    @property
    def sampling(self) -> SamplingSettings:
        """Sampling settings of the distribution from which the tokens are assumed to be sampled."""
        return SamplingSettings(temperature=self.temperature, top_k=self.keep or None, top_p=self.nucleus)

    @property
    def filters(self) -> bool:
        """True if top-k or top-p excludes tokens."""
        return not self.sampling.keeps_all(self.vocab)

    @property
    def has_measured_bounds(self) -> bool:
        """True if error bounds must be measured, because the effect of rounding cannot be predicted: in 16
        bit; where Adam divides by gradients that consist of rounding errors; in IPO, whose gradient contains
        the margin minus a constant of similar size; and in distillation, whose gradient sums differences of
        two distributions that cancel."""
        divides_by_rounding = self.optimizer == "adam" and self.eps < MILD_EPSILON
        return (
            self.precision != "float32"
            or divides_by_rounding
            or "ipo" in self.loss_options
            or self.loss_kind == "distill"
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.kv * self.group

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.width

    @property
    def global_batch(self) -> int:
        """Rows per optimizer step, over all data-parallel ranks."""
        return self.mbs * self.micro * self.dp

    @property
    def total_rows(self) -> int:
        """Rows of all optimizer steps."""
        return self.steps * self.global_batch

    @property
    def logprob_rows(self) -> int:
        """Number of rows whose log-probabilities are requested."""
        return min(self.rows or self.total_rows, self.total_rows)

    @property
    def share(self) -> int:
        """Number that must divide every padded sequence length in this layout."""
        return sequence_share(self.tp, self.cp, self.sp)

    @property
    def budget(self) -> int:
        """Tokens of a dynamic or packed micro-batch."""
        multiple = math.lcm(self.share * self.pad, self.round)
        return -(-self.length // multiple) * multiple + self.room

    @property
    def is_fast(self) -> bool:
        """True if fast paths are used."""
        return self.paths == "fast"

    @property
    def half(self) -> bool:
        """True if the model computes in 16 bit."""
        return self.precision != "float32"

    @property
    def loss_kind(self) -> str:
        """Kind of loss: ``nll``, ``pg``, ``dpo``, ``distill``, ``rm`` or ``value``."""
        return self.loss.split("+")[0]

    @property
    def scores(self) -> bool:
        """True if the model has a score layer instead of an output layer over the vocabulary."""
        return self.loss_kind in SCORING

    @property
    def likeliest(self) -> int:
        """Number of most likely tokens that a policy and a teacher report; 0 without a teacher."""
        return min(int(self.loss_number("topk") or 0), self.vocab) if self.loss_kind == "distill" else 0

    @property
    def loss_options(self) -> frozenset[str]:
        """Names of the loss's options, without their numbers."""
        return frozenset(split(self.loss)[1])

    def loss_numbers(self, option: str) -> Numbers:
        """Return the numbers of an option of the loss; its defaults if the case gives none."""
        return numbers_of(self.loss, option)

    def loss_number(self, option: str) -> float | None:
        """Return the number of an option that has a single one; None means no bound."""
        (number,) = self.loss_numbers(option)
        return number

    @property
    def advantages_kind(self) -> str:
        """Kind of advantages: ``given``, or the name of an estimator."""
        return self.advantages.split("+")[0]

    @property
    def advantages_options(self) -> frozenset[str]:
        """Names of the estimator's options, without their numbers."""
        return frozenset(split(self.advantages)[1])

    @property
    def compares_answers(self) -> bool:
        """True if an advantage depends on rewards of other responses to the same prompt."""
        return self.advantages_kind in ("grpo", "rloo", "gdpo", "reinforce-baseline")

    @property
    def takes_divergence_from_rewards(self) -> bool:
        """True if the KL from the reference policy is subtracted from the rewards."""
        return self.loss_kind == "pg" and "in-reward" in self.loss_options

    def __str__(self) -> str:
        """Return the line that ``parse`` reads: backend, seed, and ``key=value`` for all other fields that
        differ from their default."""
        words = [f"backend={self.backend}", f"seed={self.seed}"]
        # Backend and seed, the first two fields, are always written.
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_text(value)}")
        return " ".join(words)


CHOICES: dict[str, tuple[str, ...]] = {
    "backend": BACKENDS,
    "family": (*DENSE, *OF_MEGATRON, *SPARSE),
    "rope": ROPES,
    "batching": BATCHINGS,
    "masked": MASKS,
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "dispatcher": DISPATCHERS,
    "balance": BALANCES,
    "router": ROUTER_TYPES,
    "comm": EXCHANGES,
    "plan": PLANS,
    "schedule": SCHEDULES,
    "decay": DECAYS,
    "paths": PATHS,
    "model_class": MODEL_CLASSES,
}
SPARSE_FIELDS = (
    "experts",
    "topk",
    "expert",
    "dispatcher",
    "balance",
    "zloss",
    "freeze",
    "router",
    "ep",
    "etp",
    "stacks",
)
"""Fields that apply to mixtures of experts."""
_MEGATRON_ONLY = (
    "pp",
    "first",
    "last",
    "vpp",
    "layout",
    "ep",
    "etp",
    "decay",
    "wide",
    "distopt",
    "overlap",
    "bucket",
    "model_class",
)
_OF_LANGUAGE = ("temperature", "keep", "nucleus", "reference", "chunk", "lora", "stacks", "outer")
# Fields without effect for a backend, family, kind of batching, optimizer, kind of paths or loss.
_FOREIGN: dict[str, tuple[str, ...]] = {
    "megatron": ("offload", "plan"),
    "dtensor": _MEGATRON_ONLY,
    "fsdp1": (*_MEGATRON_ONLY, "tp", "sp", "cp", "comm", "plan", "lora", "stacks", "outer"),
    **dict.fromkeys((*DENSE, *OF_MEGATRON), SPARSE_FIELDS),
    **dict.fromkeys(GROUPED, ("router",)),
    "gpt_oss": ("expert",),
    "fixed": ("room", "round", "packer"),
    "dynamic": ("packer",),
    "packed": ("round",),
    "sgd": ("eps",),
    "nll": ("advantages", "segments"),
    "dpo": ("advantages", "segments"),
    "distill": ("advantages", "segments", "keep", "nucleus"),
    "rm": ("advantages", "segments", *_OF_LANGUAGE),
    "value": ("segments", *_OF_LANGUAGE),
}


def fields_without_use(owner: str) -> tuple[str, ...]:
    """Return the fields that have no effect with a backend, family, kind of batching, optimizer, kind of
    paths or loss."""
    return _FOREIGN.get(owner, ())


Fields = dict[str, Any]
"""Values of some fields of a case, by name."""
DEFAULTS: Fields = {field.name: field.default for field in dataclasses.fields(Case)}
"""Default of each field of a case."""


def idle_fields(case: Case) -> dict[str, str]:
    """Return field -> ``name=value`` of the setting that ignores it, for fields that differ from their
    default without having an effect."""
    owners = {name: getattr(case, name) for name in ("backend", "family", "batching", "optimizer", "paths")}
    owners["loss"] = case.loss_kind
    idle: dict[str, str] = {}
    for key, owner in owners.items():
        for name in fields_without_use(owner):
            if getattr(case, name) != DEFAULTS[name]:
                idle[name] = f"{key}={owner}"
    return idle


def _text(value: object) -> str:
    return (
        str(int(value))
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
