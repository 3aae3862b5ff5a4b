"""Coverage: the features of a run's cases, and how often each passed on each backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

from rich.console import Console
from rich.table import Table

from megarl.parity.case import BACKENDS, DENSE, OF_MEGATRON, PATHS, RECIPE_EPSILON, SPARSE, Case

_LOSS_NAMES = {
    "nll": "loss: NLL",
    "pg": "loss: clipped policy gradient",
    "dpo": "loss: DPO",
    "rm": "loss: Bradley-Terry, of a model that scores",
    "value": "loss: of a value model",
    "distill": "loss: divergence from a teacher",
}
_OPTION_NAMES = {
    "pg": {
        "seq": "mean over sequences",
        "constant": "constant normaliser (Dr.GRPO)",
        "gspo": "ratios of sequences (GSPO)",
        "gspo-token": "ratios of sequences, gradients of tokens (GSPO-token)",
        "cispo": "clipped ratios as weights (CISPO)",
        "noratio": "no ratios",
        "forced": "previous log-probabilities that are the current ones",
        "dual": "dual clip",
        "cliprange": "other bounds of ratios",
        "ratio-clamp": "other clamp of ratios",
        "is": "importance weights",
        "tis": "truncated importance sampling (TIS)",
        "icepop": "weights out of bounds are 0 (IcePop)",
        "seq-mask": "sequences out of bounds are left out",
        "kl": "divergence from the reference policy",
        "k1": "divergence: k1",
        "k2": "divergence: k2",
        "pathwise": "divergence: pathwise gradient",
        "approx": "divergence: weighted",
        "kl-input-clamp": "divergence: other clamp of differences",
        "kl-output-clamp": "divergence: other clamp of estimates",
        "in-reward": "divergence taken from the rewards",
        "entropy": "entropy bonus",
    },
    "dpo": {
        "ipo": "preferences: IPO (within measured bounds)",
        "mean": "preferences: mean over tokens",
        "sft": "preferences: likelihood of the chosen answers",
        "sft-mean": "preferences: mean likelihood of the chosen answers",
        "beta": "preferences: other beta",
        "weight": "preferences: other weight",
    },
    "value": {"clip": "values clipped"},
    "distill": {
        "renorm": "divergence from a teacher: its tokens alone",
        "forward": "divergence from a teacher: forward",
        "mixed": "divergence from a teacher: mixed",
        "topk": "divergence from a teacher: other numbers of tokens",
    },
}
_ADVANTAGE_NAMES = {
    "grpo": "advantages: GRPO",
    "rloo": "advantages: RLOO",
    "gdpo": "advantages: GDPO",
    "reinforce": "advantages: REINFORCE++",
    "reinforce-baseline": "advantages: REINFORCE++-baseline",
    "gae": "advantages and returns: generalized (PPO)",
    "teacher": "advantages: of a teacher (distillation)",
}
_ADVANTAGE_OPTION_NAMES = {
    "raw": "advantages not divided by deviations",
    "sample": "advantages: deviations of samples",
    "plain": "advantages: an answer in its own baseline",
    "clip": "advantages clipped",
    "gamma": "generalized advantages: discount",
    "lambda": "generalized advantages: other lambda",
    "bootstrap": "generalized advantages: value behind what was cut off",
    "white": "generalized advantages whitened",
}
_PARALLEL = ("tensor parallel", "sequence parallel", "pipeline parallel", "context parallel", "expert parallel", "data parallel")
FEATURES = (
    *(f"family: {family}" for family in (*DENSE, *OF_MEGATRON, *SPARSE)),
    "tied embeddings",
    "rope scaling",
    "sliding window",
    *_PARALLEL,
    "ring attention",
    "written tensor-parallel plan",
    "uneven stages",
    "written pipeline layout",
    "virtual pipeline",
    "expert tensor parallel",
    "expert dispatch: alltoall",
    "expert dispatch: allgather",
    "load balancing: global batch",
    "load balancing: sequence",
    "router z-loss",
    "frozen routers",
    "routers in float32 or float64",
    *(f"batching: {name}" for name in ("fixed", "dynamic", "packed")),
    *_LOSS_NAMES.values(),
    *(name for of_loss in _OPTION_NAMES.values() for name in of_loss.values()),
    *_ADVANTAGE_NAMES.values(),
    *_ADVANTAGE_OPTION_NAMES.values(),
    *(f"precision: {name}" for name in ("float32", "bfloat16", "float16")),
    "temperature",
    "top-k",
    "top-p",
    "masked samples",
    "samples in groups, not trained on",
    "zero valid tokens on a rank",
    "zero valid tokens",
    "optimizer: Adam",
    "Adam with epsilon 1e-8",
    "optimizer: SGD",
    "gradient clipping",
    "learning-rate warm-up",
    "learning-rate decay",
    "warm-up, then decay",
    "weight-decay growth",
    "gradients summed in float32",
    "distributed optimizer",
    "overlapped reductions",
    "activation recompute",
    *(f"paths: {name}" for name in PATHS),
    "output layer in chunks",
    "reference policy",
    "evaluation",
    "two global batches a call",
    "offload",
)
"""Every feature, in the order of the table."""


def features(case: Case) -> list[str]:
    """The features that a case has, in the order of ``FEATURES``."""
    has = {
        f"family: {case.family}",
        f"batching: {case.batching}",
        f"precision: {case.precision}",
        f"paths: {case.paths}",
        _LOSS_NAMES[case.loss_kind],
        *(_OPTION_NAMES[case.loss_kind][option] for option in case.loss_options),
        _ADVANTAGE_NAMES.get(case.advantages_kind, ""),
        *(_ADVANTAGE_OPTION_NAMES[option] for option in case.advantages_options),
        f"optimizer: {'Adam' if case.optimizer == 'adam' else 'SGD'}",
    }
    switches = {
        "tied embeddings": case.tied,
        "rope scaling": case.rope != "default",
        "sliding window": case.window > 0,
        "tensor parallel": case.tp > 1,
        "Adam with epsilon 1e-8": case.optimizer == "adam" and case.eps == RECIPE_EPSILON,
        "sequence parallel": case.sp,
        "pipeline parallel": case.pp > 1,
        "context parallel": case.cp > 1,
        "expert parallel": case.ep > 1,
        "data parallel": case.dp > 1,
        "ring attention": case.comm == "p2p",
        "written tensor-parallel plan": case.plan != "built-in",
        "uneven stages": bool(case.first or case.last),
        "written pipeline layout": bool(case.layout),
        "virtual pipeline": case.vpp > 1,
        "expert tensor parallel": case.etp > 1,
        "expert dispatch: alltoall": case.experts > 0 and case.dispatcher == "alltoall",
        "expert dispatch: allgather": case.dispatcher == "allgather",
        # where a token goes to all experts, all are in balance whatever the routers do
        "load balancing: global batch": case.balance == "aux" and case.topk < case.experts,
        "load balancing: sequence": case.balance == "seq" and case.topk < case.experts,
        "router z-loss": case.zloss,
        "frozen routers": case.freeze,
        "routers in float32 or float64": case.router != "model",
        "temperature": case.temperature != 1.0,
        "top-k": case.keep > 0,
        "top-p": case.nucleus < 1,
        "masked samples": case.masked == "some",
        "samples in groups, not trained on": case.masked == "some" and case.compares_answers,
        "zero valid tokens on a rank": case.masked == "rank" and case.dp > 1,
        "zero valid tokens": case.masked == "all",
        "gradient clipping": case.clip > 0,
        "learning-rate warm-up": case.warmup,
        "learning-rate decay": case.schedule != "constant",
        "warm-up, then decay": case.warmup and case.schedule != "constant",
        "weight-decay growth": case.decay != "constant",
        "gradients summed in float32": case.wide,
        "distributed optimizer": case.distopt,
        "overlapped reductions": case.overlap,
        "activation recompute": case.recompute,
        "output layer in chunks": case.chunk > 0,
        "reference policy": case.reference,
        "evaluation": case.evaluate,
        "two global batches a call": case.together,
        "offload": case.offload,
    }
    return [name for name in FEATURES if name in has or switches.get(name)]


def _column(backend: str, half: bool) -> str:
    return f"{backend} 16 bit" if half else backend


COLUMNS = tuple(_column(backend, half) for half in (False, True) for backend in BACKENDS)
"""The columns of the table: every backend in float32, then every backend in bfloat16 and float16."""


class Coverage:
    """Counts features, and pairs of features, of cases that passed, by backend, and of each backend those in 16 bit apart."""

    def __init__(self) -> None:
        self._single: dict[str, Counter[str]] = {column: Counter() for column in COLUMNS}
        self._pairs: dict[str, Counter[str]] = {column: Counter() for column in COLUMNS}
        self._cases: Counter[str] = Counter()

    def add(self, case: Case) -> None:
        """Count a case that passed."""
        found, column = features(case), _column(case.backend, case.half)
        self._cases[column] += 1
        self._single[column].update(found)
        self._pairs[column].update(f"{one} + {other}" for one, other in combinations(found, 2))

    def to_json(self) -> dict[str, dict[str, dict[str, int]]]:
        """``features`` and ``pairs``, each by column of the table, with counts; the feature ``all`` is that of every case."""
        used = self._used()
        return {
            "features": {
                column: {"all": self._cases[column], **{name: self._single[column][name] for name in FEATURES}} for column in used
            },
            "pairs": {column: dict(sorted(self._pairs[column].items())) for column in used},
        }

    def _used(self) -> list[str]:
        return [column for column in COLUMNS if self._cases[column]]

    def show(self, console: Console, refused: Iterable[str] = ()) -> None:
        """A table of features by backend and precision; a dash where no case had one."""
        used = self._used()
        table = Table(title="passed cases that had a feature")
        table.add_column("feature")
        for column in used:
            table.add_column(column, justify="right")
        table.add_row("all", *(str(self._cases[column]) for column in used), style="bold")
        for name in FEATURES:
            counts = [self._single[column][name] for column in used]
            table.add_row(name, *(str(count) if count else "-" for count in counts))
        console.print(table)
        for line in refused:
            console.print(line, soft_wrap=True)
