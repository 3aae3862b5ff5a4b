"""Sample random cases. All fields are sampled freely, and the configuration rules reject what is impossible,
so a new feature is included as soon as the rules allow it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from megarl.errors import ConfigError
from megarl.parity.case import (
    BALANCES,
    DECAYS,
    DENSE,
    DISPATCHERS,
    EXCHANGES,
    HEAD_NORMS,
    MODEL_CLASSES,
    OF_MEGATRON,
    PAIRED,
    PATHS,
    PLANS,
    RECIPE_EPSILON,
    ROPES,
    ROUTER_TYPES,
    SCHEDULES,
    SPARSE,
    WINDOWED,
    Case,
    Fields,
    fields_without_use,
)
from megarl.parity.draw_loss import draw_loss
from megarl.parity.models import ModelShelf
from megarl.parity.possible import LEAST_HIDDEN, absent_model_class, refusal

# Prime vocabulary sizes, so that tensor parallelism always has to pad.
PRIMES = (
    11,
    13,
    17,
    19,
    23,
    29,
    31,
    37,
    41,
    43,
    47,
    53,
    59,
    61,
    67,
    71,
    73,
    79,
    83,
    89,
    97,
    101,
    103,
    107,
    109,
    113,
    127,
    131,
)
PACKERS = (
    "",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
)
ATTEMPTS = 2000
PATIENCE = 100
"""Attempts with one backend and kind of model. Rules reject many layouts of mixtures of experts; without
this, these would become rarer."""
SPARSE_SHARE, HALF_SHARE, ADAPTED_SHARE, SEGMENTED_SHARE, STACKED_SHARE = 0.45, 0.3, 0.25, 0.5, 0.6
OUTER_SHARE = 0.4
# Small worlds are faster and find most errors. Large ones are needed to combine three kinds of parallelism.
WORLDS = (1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 6, 8, 8)
HALF_RATES = {"adam": 0.02, "sgd": 0.2}
"""Learning rates in 16 bit; smaller steps would vanish in the rounding of the weights."""
AXES: Mapping[str, Sequence[str]] = {
    "megatron": ("tp", "pp", "cp", "dp"),
    "dtensor": ("tp", "cp", "dp"),
    "fsdp1": ("dp",),
}


class Drawer:
    """Samples cases that the configuration rules accept.

    Args:
        shelf: stores the configs of sampled models, which the rules read.
        backends: backends to sample.
        max_world: maximum number of ranks.
        fixed: fields of every case; for ``loss`` and ``advantages``, the kind and options to include.

    Attributes:
        refusals: configuration key -> number of candidates that were rejected because of it.
    """

    def __init__(
        self,
        shelf: ModelShelf,
        backends: Sequence[str],
        max_world: int,
        fixed: Fields | None = None,
    ) -> None:
        self._shelf = shelf
        self._backends = tuple(backends)
        self._max_world = max_world
        self._fixed = dict(fixed or {})
        self.refusals: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def draw(self, seed: int, number: int) -> Case:
        """Return case ``number`` of ``seed``; independent of earlier calls.

        Raises:
            ConfigError: the rules reject every candidate.
        """
        generator = random.Random(f"{seed}/{number}")
        for attempt in range(ATTEMPTS):
            # The fixed fields may rule out a backend or all its dense families, so choose again after some
            # failures.
            if attempt % PATIENCE == 0:
                backend = self._fixed.get("backend") or generator.choice(self._backends)
                sparse = backend == "megatron" and generator.random() < SPARSE_SHARE
            dense = (*DENSE, *OF_MEGATRON) if backend == "megatron" else DENSE
            case = self._candidate(generator, backend, SPARSE if sparse else dense)
            if case.world <= self._max_world and self._accepted(case):
                return case
        often = "; ".join(f"{key}: {self._reasons[key]}" for key, _ in self.refusals.most_common(3))
        raise ConfigError(
            f"no case in {ATTEMPTS} draws for {', '.join(self._backends)}: the rules refuse them all "
            f"({often})"
        )

    def _accepted(self, case: Case) -> bool:
        refused = refusal(case, self._shelf)
        for violation in refused.violations if refused else ():
            self.refusals[violation.key] += 1
            self._reasons[violation.key] = f"{violation.value!r}: {violation.bound}"
        return refused is None

    def _candidate(self, generator: random.Random, backend: str, families: Sequence[str]) -> Case:
        fields: Fields = {
            "backend": backend,
            "seed": generator.randrange(10**6),
            "family": generator.choice(families),
        }
        fixed = {name: value for name, value in self._fixed.items() if name not in ("loss", "advantages")}
        fields |= _layout(generator, backend, self._max_world) | fixed
        # A separate generator, so that the choice of losses does not change the other fields of a seed.
        fields |= draw_loss(
            random.Random(f"{fields['seed']}/loss"), self._fixed.get("loss"), self._fixed.get("advantages")
        )
        # Keep this order: each function reads the fields of those before it.
        for drawn in (_model, _stages, _training, _optimizer, _batch, _paths):
            fields |= drawn(generator, fields) | fixed
        fields |= _adapters(random.Random(f"{fields['seed']}/lora"), fields) | fixed
        fields |= _segments(random.Random(f"{fields['seed']}/segments"), fields) | fixed
        fields |= _model_class(random.Random(f"{fields['seed']}/class"), backend) | fixed
        unused = fields_without_use(fields["loss"].split("+")[0])
        return Case(**{name: value for name, value in fields.items() if name in fixed or name not in unused})


def _layout(generator: random.Random, backend: str, max_world: int) -> Fields:
    """Sample a layout: assign each prime factor of the world size to a random axis."""
    world = generator.choice([world for world in WORLDS if world <= max_world])
    sizes = dict.fromkeys(AXES[backend], 1)
    for prime in (2, 3):
        while world % prime == 0:
            sizes[generator.choice(AXES[backend])] *= prime
            world //= prime
    drawn: Fields = dict(sizes)
    if sizes.get("tp", 1) > 1:
        drawn["sp"] = generator.random() < 0.5
        if backend == "dtensor":
            drawn["plan"] = generator.choice(("built-in", *PLANS))
    if sizes.get("cp", 1) > 1:
        drawn["comm"] = generator.choice(EXCHANGES)
    return drawn


def _model(generator: random.Random, fields: Fields) -> Fields:
    """Sample the model's sizes; they are divisible by the tensor-parallel size, and distinct."""
    family, tensor = fields["family"], fields.get("tp", 1)
    kv = tensor * generator.choice((1, 1, 2))
    group = generator.choice([group for group in (1, 2, 3, 3, 5) if kv * group <= max(12, kv)])
    heads, head = kv * group, generator.choice((10, 12, 14) if family in HEAD_NORMS else (4, 6, 10, 12))
    least = -(-LEAST_HIDDEN // heads)
    width = generator.choice(
        [width for width in range(least, least + 10) if width != head and width * heads <= 72] or [least]
    )
    # Distinct sizes, so that swapped dimensions change a shape.
    taken = {heads * width, heads * head, heads, kv}
    chosen: Fields = {
        "tied": generator.random() < 0.4,
        "rope": generator.choice(("default", *ROPES)),
        "kv": kv,
        "group": group,
        "head": head,
        "width": width,
        "ffn": generator.choice([size for size in range(3 * tensor, 60, tensor) if size not in taken]),
        # A prime is not divisible by a tensor-parallel size, so the vocabulary needs padding.
        "vocab": generator.choice(PRIMES),
        "window": generator.choice((0, generator.randint(2, 9))) if family in WINDOWED else 0,
    }
    if family in SPARSE:
        chosen |= _experts(generator, fields, family)
    return chosen


def _experts(generator: random.Random, fields: Fields, family: str) -> Fields:
    tensor = fields.get("tp", 1)
    ranks = tensor * fields.get("cp", 1) * fields.get("dp", 1)
    etp = generator.choice((1, tensor))
    sizes = [size for size in range(1, 9) if ranks % (size * etp) == 0] or [1]
    ep = generator.choice([*sizes, *sizes[1:]])
    experts = ep * generator.choice((1, 2, 3))
    experts = experts if experts > 2 else ep * generator.choice((2, 3, 4))
    drawn = {
        "experts": experts,
        # Rarely select all experts, because the load is then always balanced.
        "topk": min(experts, generator.choice((2, 2, 2, 3))),
        "dispatcher": generator.choice(DISPATCHERS),
        "balance": generator.choice(BALANCES),
        "zloss": generator.random() < 0.3,
        "freeze": generator.random() < 0.2,
        "router": generator.choice(("model", *ROUTER_TYPES)),
        # Shared experts must be divisible by the tensor-parallel size.
        "expert": (etp if family == "qwen3_moe" else tensor) * generator.randint(3, 9)
        if family != "mixtral"
        else 0,
        **({"ep": ep, "etp": etp} if fields["backend"] == "megatron" else {}),
    }
    return {name: value for name, value in drawn.items() if name not in fields_without_use(family)}


def _stages(generator: random.Random, fields: Fields) -> Fields:
    """Sample the number of layers and their division among pipeline stages: even, in model chunks, uneven at
    the ends, or as an explicit layout."""
    pipeline = fields.get("pp", 1)
    if pipeline == 1:
        return {"layers": generator.choice((1, 3, 3, 5))}
    kind = generator.choice(("even", "uneven", "uneven", "chunks", "written"))
    if kind == "even":
        return {"layers": pipeline * generator.choice((1, 1, 2))}
    if kind == "written":
        return _written(generator, pipeline)
    if kind == "chunks" or fields.get("vpp", 1) > 1:
        chunks = fields.get("vpp") or generator.choice((2, 2, 3))
        return {"layers": pipeline * chunks, "vpp": chunks}
    first, last = generator.choice((1, 2)), generator.choice((1, 2))
    middle = generator.choice((1, 2)) if pipeline > 2 else 0
    # With two stages, none is in the middle.
    which = generator.choice(("both", "first", "last")) if pipeline > 2 else "both"
    if which == "first":
        return {"layers": first + middle * (pipeline - 1), "first": first}
    if which == "last":
        return {"layers": middle * (pipeline - 1) + last, "last": last}
    return {"layers": first + middle * (pipeline - 2) + last, "first": first, "last": last}


def _written(generator: random.Random, pipeline: int) -> Fields:
    """Sample an explicit layout with one or two chunks per stage. Chunks have one or two layers; those with
    the embedding and the output layer may have none."""
    chunks = pipeline * generator.choice((1, 1, 2))
    inner = [generator.randint(1, 2) for _ in range(chunks - 2)]
    counts = [generator.randint(0, 2), *inner, generator.randint(0, 2)]
    # At least one layer is needed.
    counts[0] += not sum(counts)
    held = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    return {"layers": sum(counts), "layout": "|".join(["E" + held[0], *held[1:-1], held[-1] + "L"])}


def _training(generator: random.Random, fields: Fields) -> Fields:
    half = generator.random() < HALF_SHARE
    return {
        "temperature": generator.choice((1.0, 1.0, 0.7, 1.5)),
        "keep": 0 if half else generator.choice((0, 0, 0, generator.randint(2, 9))),
        "nucleus": 1.0 if half else generator.choice((1.0, 1.0, 1.0, 0.8, 0.4)),
        "precision": generator.choice(("bfloat16", "float16")) if half else "float32",
        "recompute": generator.random() < 0.2,
        "reference": generator.random() < 0.3,
        "evaluate": generator.random() < 0.2,
        "together": generator.random() < 0.3,
    }


def _optimizer(generator: random.Random, fields: Fields) -> Fields:
    optimizer, half = generator.choice(("adam", "adam", "sgd")), fields["precision"] != "float32"
    falls = generator.random() < 0.3
    chosen: Fields = {
        "optimizer": optimizer,
        "lr": HALF_RATES[optimizer] if half else 0.002,
        "clip": generator.choice((0.0, 0.05, 1.0)),
        "warmup": generator.random() < 0.3,
        # A decay needs steps after the warm-up.
        "steps": generator.choice((3, 4)) if falls else 2,
    }
    if fields["backend"] == "megatron":
        overlap = generator.random() < 0.3
        chosen |= {
            "schedule": generator.choice(SCHEDULES) if falls else "constant",
            "decay": generator.choice(DECAYS) if falls else "constant",
            "wide": half and generator.random() < 0.5,
            "distopt": optimizer == "adam" and generator.random() < 0.7,
            "overlap": overlap,
            "bucket": generator.choice((0, 500)) if overlap else 0,
        }
    else:
        chosen |= {
            "offload": generator.random() < 0.15,
            "schedule": generator.choice(SCHEDULES[:-1]) if falls else "constant",
        }
    if optimizer == "adam" and generator.random() < 0.3:
        chosen["eps"] = RECIPE_EPSILON
    return chosen


def _batch(generator: random.Random, fields: Fields) -> Fields:
    batching = fields.get("batching") or generator.choice(("fixed", "fixed", "dynamic", "packed"))
    pairs = fields["loss"].split("+")[0] in PAIRED
    mbs = generator.choice((2, 4) if pairs else (1, 2, 3))
    length = generator.randint(4, 24)
    chosen: Fields = {
        "batching": batching,
        "mbs": mbs,
        "micro": generator.choice((1, 2, 2, 3)),
        "length": length,
        "pad": generator.choice((1, 1, 1, 3)),
        "lpbs": generator.choice((1, 2, 3, 5)),
        "masked": generator.choice(("none", "none", "some", "some", "rank", "all")),
    }
    if generator.random() < 0.4:
        chosen["rows"] = generator.randint(1, fields["steps"] * mbs * chosen["micro"] * fields.get("dp", 1))
    if batching != "fixed":
        # Both rows of a pair must fit into a micro-batch.
        chosen["room"] = generator.randint(0, 3 * length) + (length if pairs else 0)
    if batching == "dynamic":
        chosen["round"] = generator.choice((1, 4, 8))
    if batching == "packed":
        chosen["packer"] = generator.choice(PACKERS)
    return chosen


def _adapters(generator: random.Random, fields: Fields) -> Fields:
    """Sample adapters, if the rules allow them. They have a separate generator and are sampled last, so that
    they never cause a case to be rejected.

    Excluded: explicit layouts, in which a stage may have no layers and thus nothing to train; and Adam's
    small epsilon, with which a gradient of rounding errors moves an element of a factor, and thereby a whole
    row of the weight.
    """
    possible = (
        fields["backend"] != "fsdp1" and not fields.get("layout") and fields.get("eps") != RECIPE_EPSILON
    )
    drawn = generator.random() < ADAPTED_SHARE
    rank = (
        generator.randint(1, 4) if drawn and possible and fields.get("plan", "built-in") == "built-in" else 0
    )
    return {
        "lora": rank,
        "stacks": rank > 0 and fields["family"] in SPARSE and generator.random() < STACKED_SHARE,
        "outer": rank > 0 and not fields.get("tied") and generator.random() < OUTER_SHARE,
    }


def _segments(generator: random.Random, fields: Fields) -> Fields:
    """Sample the number of segments per response, above 1 only if advantages are given and a global batch has
    several rows. Has a separate generator, like adapters."""
    rows = fields["mbs"] * fields["micro"] * fields.get("dp", 1)
    possible = (
        fields["loss"].split("+")[0] == "pg" and fields["advantages"].split("+")[0] == "given" and rows > 1
    )
    return {"segments": generator.randint(2, 4) if possible and generator.random() < SEGMENTED_SHARE else 1}


def _model_class(generator: random.Random, backend: str) -> Fields:
    """Sample a Megatron-Core model class, if both are available. Has a separate generator, like adapters."""
    possible = backend == "megatron" and absent_model_class() is None
    return {"model_class": generator.choice(MODEL_CLASSES) if possible else MODEL_CLASSES[0]}


def _paths(generator: random.Random, fields: Fields) -> Fields:
    """Sample the kind of paths, after all other fields, so that a seed keeps the fields that it had before
    this choice existed."""
    paths = fields.get("paths") or generator.choice(("fast", "fast", *PATHS))
    chunked = generator.random() < 0.4
    return {"paths": paths, "chunk": generator.randint(1, 2 * fields["length"]) if chunked else 0}
