"""A case: one comparison, and the line of text that stands for it.

A case is flat: every field is a number, a name or a yes-or-no, and its default is the simplest value there
is. Sizes that have to divide others are stored as factors (heads = ``kv`` x ``group``), so that most fields
can be changed one at a time.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megarl.config.arithmetic import sequence_share
from megarl.models.generation.sampling import SamplingSettings
from megarl.parity.options import Numbers, numbers_of, split

BACKENDS = ("megatron", "dtensor", "fsdp1")
DENSE = ("llama", "qwen2", "qwen3", "mistral")
OF_MEGATRON = ("ministral", "seed_oss", "qwen3_5_text")
"""Dense families that the Megatron backend alone is compared with."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
"""Families with latent attention."""
CLASS_IN_TRANSFORMERS = {"kimi_k2": "deepseek_v3"}
"""Families that transformers knows by another name alone."""
GROUPED = (*LATENT, "glm4_moe", "dots1")
"""Families with DeepSeek's mixture: groups of experts, shared experts, a dense first layer where there are
several; routers compute in
float32."""
SPARSE = ("mixtral", "qwen3_moe", "qwen2_moe", *GROUPED, "gpt_oss", "qwen3_next", "qwen3_5_moe_text")
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with gated delta nets in the place of attention, in the first layer and every second one after
it."""
HEAD_NORMS = ("qwen3", "qwen3_moe", "dots1", *HYBRID)
"""Families that normalise queries and keys by head."""
WINDOWED = ("mistral", "mixtral", "ministral", "dots1", "gpt_oss")
"""Families with a sliding window; the last three have it in some layers."""
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
# Adam divides by the root of the second moment, so that an error of a gradient comes back in a weight times
# up to the learning rate by epsilon. Gradients here are of order 1e-2 to 1, their rounding errors of 1e-8 to
# 1e-7; a larger factor shows in the next gradient.
MILD_EPSILON = 1e-2
RECIPE_EPSILON = 1e-8
"""With it, a number whose gradient is nothing but rounding errors moves by the learning rate, this way or
that: what such a case may be apart is measured (``megarl.parity.noise``)."""
SCORING = ("rm", "value")
"""Losses of models that score: Bradley-Terry, and the value loss."""
PAIRED = ("dpo", "rm")
"""Losses of pairs of rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        backend: which worker.
        seed: of weights and batches.
        family: ``model_type`` of the model.
        tied: the output layer is the embedding.
        rope: kind of rotary position scaling.
        layers: transformer layers.
        kv: key-value heads.
        group: query heads a key-value head.
        head: width of a head, even; with latent attention of the part of it that is not rotated.
        width: hidden size is ``width`` a query head.
        ffn: width of the gated MLP.
        vocab: vocabulary, tokens.
        window: sliding window of the attention, tokens; 0 for none.
        experts: experts a layer, sparse families only.
        topk: experts a token.
        expert: width of an expert, where the family has one of its own; shared experts are as wide, or twice.
        dispatcher: how tokens get to their experts.
        balance: load-balancing loss of the routers: ``none``, ``aux`` over the global batch, ``seq`` over
            each sequence.
        zloss: z-loss of the routers.
        freeze: routers are not trained.
        router: type that routers compute in; ``model`` for that of the model.
        tp, pp, cp, dp: ranks that share a layer, the layers, a sequence, the batch.
        sp: sequence parallel.
        first, last: layers of the first and the last pipeline stage; 0 divides evenly.
        vpp: model chunks a pipeline stage.
        layout: which layers each model chunk holds, in Megatron-Core's notation; empty for what the other
            fields say.
        comm: how context-parallel ranks get at the keys and values of the others.
        plan: which tensor-parallel plan DTensor gets: its own, or one of ``megarl.parity.settings``.
        ep, etp: ranks that share the experts, and one expert.
        batching: how rows become micro-batches.
        mbs: rows a micro-batch.
        micro: ``mbs`` x ``micro`` rows of a global batch are one data-parallel rank's.
        room: tokens that a micro-batch may hold beyond one longest sequence (dynamic, packed).
        round: lengths are rounded up to a multiple of it (dynamic).
        packer: the packing algorithm; empty for the default.
        length: S, columns of the batch.
        pad: rows are padded to this multiple of what the layout needs.
        rows: rows whose log-probabilities are asked for; 0 for all.
        lpbs: rows a micro-batch for log-probabilities.
        masked: which samples are masked out: none, some, all of one data-parallel rank, all.
        segments: rows of one response at most, which share its advantage; 1 for a response a row.
        together: all global batches in one ``train()`` call.
        evaluate: evaluate first; it must report the loss of the first step and change nothing.
        reference: keep a reference policy; afterwards its log-probabilities must be those from before
            training.
        loss: ``nll``, ``pg``, ``dpo``, ``distill``, ``rm`` or ``value`` with options
            (``megarl.parity.options``), as ``pg+kl:0.02``; with the last two the model scores, and values are
            compared where otherwise log-probabilities are.
        advantages: of a policy gradient: ``given``, or made by that estimator, with options likewise; returns
            of a value loss alike.
        temperature: the sampling temperature.
        keep: tokens that top-k keeps; 0 for all.
        nucleus: top-p; 1 for all.
        optimizer: ``adam`` or ``sgd``.
        eps: what Adam adds to the root of the second moment. Recipes have 1e-8; what a larger one does to
            rounding errors is said at ``MILD_EPSILON``.
        lr: the largest learning rate.
        clip: largest gradient norm; 0 for no clipping.
        warmup: the learning rate grows over the first calls.
        schedule: how it falls after that.
        decay: how the weight decay grows (Megatron).
        steps: optimizer steps.
        precision: type of the weights and activations in the model.
        wide: gradients are summed up in float32 (Megatron); the torch backends always do.
        recompute: recompute activations in the backward pass.
        distopt: the distributed optimizer (Megatron).
        overlap: reductions overlap with the backward pass (Megatron).
        bucket: parameters a reduction, with overlap (Megatron); 0 for Megatron's choice.
        offload: parameters in host memory between uses (torch backends).
        lora: rank of adapters that are trained instead of the weights; 0 for none.
        stacks: the stacks of experts have adapters too (sparse families).
        outer: embedding and output layer have adapters too, where they are two matrices.
        paths: ``fast``, or ``plain`` without what ``megarl.parity.paths`` lists.
        chunk: positions whose logits are there at a time; 0 for all of a micro-batch.
        model_class: ``hybrid`` for Megatron-Core's HybridModel, of whose layers two are one layer.
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
        """Distribution that the tokens count as sampled from."""
        return SamplingSettings(temperature=self.temperature, top_k=self.keep or None, top_p=self.nucleus)

    @property
    def filters(self) -> bool:
        """True if top-k or top-p leave tokens out."""
        return not self.sampling.keeps_all(self.vocab)

    @property
    def has_measured_bounds(self) -> bool:
        """True if bounds of errors have to be measured, because nobody can predict how far rounding leads: in
        16 bit; where Adam divides by gradients that are all rounding; in IPO's square, whose gradient has a
        margin as a factor from which a constant of its size is taken away; and in distillation, whose
        gradient sums up differences between two distributions that cancel."""
        divides_by_rounding = self.optimizer == "adam" and self.eps < MILD_EPSILON
        return (
            self.precision != "float32"
            or divides_by_rounding
            or "ipo" in self.loss_options
            or self.loss_kind == "distill"
        )

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv * self.group

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.width

    @property
    def global_batch(self) -> int:
        """Rows of an optimizer step over all data-parallel ranks."""
        return self.mbs * self.micro * self.dp

    @property
    def total_rows(self) -> int:
        """Rows of the whole batch, over all optimizer steps."""
        return self.steps * self.global_batch

    @property
    def logprob_rows(self) -> int:
        """Rows whose log-probabilities are asked for."""
        return min(self.rows or self.total_rows, self.total_rows)

    @property
    def share(self) -> int:
        """Number that sequence lengths have to be a multiple of in this layout."""
        return sequence_share(self.tp, self.cp, self.sp)

    @property
    def budget(self) -> int:
        """Tokens of a dynamic or packed micro-batch."""
        multiple = math.lcm(self.share * self.pad, self.round)
        return -(-self.length // multiple) * multiple + self.room

    @property
    def is_fast(self) -> bool:
        """True if the fast paths are taken."""
        return self.paths == "fast"

    @property
    def half(self) -> bool:
        """The model computes in 16 bit."""
        return self.precision != "float32"

    @property
    def loss_kind(self) -> str:
        """``nll``, ``pg``, ``dpo``, ``distill``, ``rm`` or ``value``."""
        return self.loss.split("+")[0]

    @property
    def scores(self) -> bool:
        """True if the model scores."""
        return self.loss_kind in SCORING

    @property
    def likeliest(self) -> int:
        """Most likely tokens that a policy is asked for, and that a teacher gives; 0 where there is no
        teacher."""
        return min(int(self.loss_number("topk") or 0), self.vocab) if self.loss_kind == "distill" else 0

    @property
    def loss_options(self) -> frozenset[str]:
        """Return what stands behind the kind of loss, without numbers."""
        return frozenset(split(self.loss)[1])

    def loss_numbers(self, option: str) -> Numbers:
        """Return the numbers of an option of the loss, also where the loss does not have the option: those
        that it then has."""
        return numbers_of(self.loss, option)

    def loss_number(self, option: str) -> float | None:
        """Return the only one of these; None is no bound."""
        (number,) = self.loss_numbers(option)
        return number

    @property
    def advantages_kind(self) -> str:
        """``given``, or the estimator that makes the advantages."""
        return self.advantages.split("+")[0]

    @property
    def advantages_options(self) -> frozenset[str]:
        """Return what stands behind the estimator, without numbers."""
        return frozenset(split(self.advantages)[1])

    @property
    def compares_answers(self) -> bool:
        """True if an advantage depends on the rewards of other answers to the same prompt."""
        return self.advantages_kind in ("grpo", "rloo", "gdpo", "reinforce-baseline")

    @property
    def takes_divergence_from_rewards(self) -> bool:
        """True if the rewards that advantages are made of have lost the divergence from the reference
        policy."""
        return self.loss_kind == "pg" and "in-reward" in self.loss_options

    def __str__(self) -> str:
        """Return the line that ``parse`` reads: ``key=value`` of every field that is not at its default."""
        words = [f"backend={self.backend}", f"seed={self.seed}"]
        # The first two, backend and seed, are always written.
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
"""Fields of a mixture of experts."""
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
# What a backend, a family, a way of batching or an optimizer has no use for.
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
    "plain": ("chunk",),
    "nll": ("advantages", "segments"),
    "dpo": ("advantages", "segments"),
    "distill": ("advantages", "segments", "keep", "nucleus"),
    "rm": ("advantages", "segments", *_OF_LANGUAGE),
    "value": ("segments", *_OF_LANGUAGE),
}


def fields_without_use(owner: str) -> tuple[str, ...]:
    """Return the fields that a backend, a family, a way of batching, an optimizer, paths or a kind of loss,
    given by its name, has no use for."""
    return _FOREIGN.get(owner, ())


def idle_fields(case: Case) -> dict[str, str]:
    """Return fields that stand away from their defaults although the case has no use for them, and what has
    none."""
    defaults = {field.name: field.default for field in dataclasses.fields(Case)}
    owners = {name: getattr(case, name) for name in ("backend", "family", "batching", "optimizer", "paths")}
    owners["loss"] = case.loss_kind
    return {
        name: f"{key}={owner}"
        for key, owner in owners.items()
        for name in fields_without_use(owner)
        if getattr(case, name) != defaults[name]
    }


def _text(value: object) -> str:
    return (
        str(int(value))
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
