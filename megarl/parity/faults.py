"""Planted faults: small changes to the trainer's source code, each with the ``megarl parity`` cases that must
detect it.

Planting a fault writes no file. The changed source text of a module is compiled, and while a case runs, the
changed functions get the new code objects. Modules that imported such a function before see the fault too.

The table below has one or two faults for each kind of compared quantity and each family of losses, which is
enough to show that the comparison detects faults. A checkout has many more in ``tests/mutations``; they are
added if that directory exists.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from megarl.errors import ConfigError

MUTATIONS = Path(__file__).parents[2] / "tests" / "mutations" / "__init__.py"
"""File that defines the additional faults; it exists only in a checkout."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        module: dotted name of the module that is changed.
        old: source text to replace. It must occur exactly once in the module, inside a function.
        new: the replacement.
        cases: case lines that must detect the fault. A line without a backend runs on every backend that has
            all the features it uses.
        kind: kind of compared quantity (``logprobs``, ``loss``, ...) that must be out of bounds in every
            case. If empty, one case must detect the fault, by any kind of quantity.
    """

    module: str
    old: str
    new: str
    cases: tuple[str, ...] = ()
    kind: str = ""


@contextlib.contextmanager
def planted(fault: Fault | None) -> Iterator[None]:
    """Plant a fault in this process for the duration of the ``with`` block; None plants no fault.

    Raises:
        ConfigError: the text does not occur exactly once in the module, or is not inside a function.
    """
    if fault is None:
        yield
        return
    module = importlib.import_module(fault.module)
    changed = changed_functions(fault, module)
    originals = {function: function.__code__ for function in changed}
    _give(module, changed)
    try:
        yield
    finally:
        _give(module, originals)


def _give(module: ModuleType, codes: Mapping[FunctionType, CodeType]) -> None:
    for function, code in codes.items():
        # Replace the code object, not the function: other modules hold references to the function.
        function.__code__ = code
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):  # Cached values were computed by the replaced code.
            value.cache_clear()


def changed_functions(fault: Fault, module: ModuleType) -> dict[FunctionType, CodeType]:
    """Return the functions that a fault changes, each with its new code object.

    Raises:
        ConfigError: the source text that the fault replaces does not occur exactly once in the module or is
            not inside a function, or the replacement needs other closure variables.
    """
    source = inspect.getsource(module)
    if source.count(fault.old) != 1:
        raise ConfigError(
            f"fault in {fault.module}: {fault.old!r} occurs {source.count(fault.old)} times; "
            "choose a text that occurs once"
        )
    changed = source.replace(fault.old, fault.new)
    # Set dont_inherit: otherwise the __future__ imports of this file would also apply to the compiled text.
    before, after = (
        dict(_codes(compile(text, str(module.__file__), "exec", dont_inherit=True)))
        for text in (source, changed)
    )
    found: dict[FunctionType, CodeType] = {}
    for name, code in after.items():
        if _without_lines(code) != _without_lines(before[name]):
            found[_function(module, name)] = code
    if not found:
        raise ConfigError(
            f"fault in {fault.module}: {fault.old!r} is in no function, or {fault.new!r} does the same; "
            "choose another text"
        )
    # A function's closure cells are fixed at its definition, so a code object with other free variables
    # cannot be assigned.
    if any(code.co_freevars != function.__code__.co_freevars for function, code in found.items()):
        raise ConfigError(
            f"fault in {fault.module}: {fault.new!r} closes over other names, such as that of super(); "
            "choose another text"
        )
    return found


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield the qualified name and the code object of each function in a compiled module or class.

    Nested functions are not yielded, because they are constants of the code of their outer function.
    """
    for constant in code.co_consts:
        if (
            # Class bodies lack CO_NEWLOCALS; lambdas and comprehensions have a < in their name.
            isinstance(constant, CodeType)
            and constant.co_flags & inspect.CO_NEWLOCALS
            and "<" not in constant.co_qualname
        ):
            yield constant.co_qualname, constant
        elif isinstance(constant, CodeType):
            yield from _codes(constant)


def _without_lines(code: CodeType) -> CodeType:
    """Return the code object without line numbers. A replacement with more or fewer lines shifts the line
    numbers of all later functions, which must not count as a change."""
    constants = (
        _without_lines(constant) if isinstance(constant, CodeType) else constant
        for constant in code.co_consts
    )
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=tuple(constants))


def _function(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    # A property holds its function in fget, a cached function in __wrapped__.
    found = inspect.unwrap(getattr(found, "fget", None) or found)
    assert isinstance(found, FunctionType), f"{module.__name__}: {name} is no plain function"
    return found


_LOSSES, _VALUES, _ENGINE = (
    "megarl.algorithms.loss_functions",
    "megarl.algorithms.value_losses",
    "megarl.models.engine",
)
_ADAPTED = ("megatron", "dtensor")
_EXPERTS = "backend=megatron family=mixtral experts=4 topk=2 mbs=2 length=9 lora=2 stacks=1"
# Kind of quantity -> fault name -> (module, old text, new text, case lines...).
_TABLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "logprobs": {
        "vocabulary-shards-not-combined": (
            f"{_ENGINE}.logprobs",
            "if shard.ranks == 1 or not statistics.shape[1]:",
            "if True:",
            "tp=2 kv=2 ffn=6 length=6",
        ),
        "temperature-only-in-training": (
            f"{_ENGINE}.step",
            "head = LogprobHead(backend.vocabulary, sampling, chunk_size)",
            "head = LogprobHead(backend.vocabulary, replace(sampling, temperature=1.0), chunk_size)",
            "temperature=0.7 length=6",
        ),
        "attention-leaks": (
            f"{_ENGINE}.attention",
            "slice(start, last)))",
            "slice(0, last)))",
            "batching=packed room=30 micro=8 length=8 paths=plain",
        ),
        "reference-is-the-policy": (
            f"{_ENGINE}.offload_state",
            "_write(backend, self._weights)",
            "pass",
            "reference=1 length=9",
        ),
        "reference-with-adapters": (
            f"{_ENGINE}.offload_state",
            "with backend.without_adapters() or contextlib.nullcontext():",
            "with contextlib.nullcontext():",
            *(f"backend={backend} reference=1 length=9 lora=2" for backend in _ADAPTED),
        ),
        "adapters-without-their-scale": (
            "megarl.models.megatron.adapters",
            "product(inputs, self._down_of(adapters)) * settings.scaling",
            "product(inputs, self._down_of(adapters))",
            "backend=megatron length=6 lora=2",
        ),
        "adapter-of-one-expert-missing": (
            "megarl.models.megatron.adapters",
            "                if pairs:",
            '                if pairs and ".local_experts.3." not in name:',
            f"{_EXPERTS} ep=2 dp=2",
        ),
        "columns-of-an-embedding-s-adapter-not-summed": (
            "megarl.models.megatron.vocabulary_adapters",
            "reduce_from_tensor_model_parallel_region(columns, group=self._group)",
            "columns",
            "backend=megatron tp=2 kv=2 ffn=6 length=9 lora=2 outer=1",
        ),
        "dtensor-columns-of-an-embedding-s-adapter-not-summed": (
            "megarl.models.dtensor.styles",
            "sum_of_parts(columns, layout, group)",
            "columns",
            "backend=dtensor tp=2 kv=2 ffn=6 length=9 lora=2 outer=1",
        ),
    },
    "loss": {
        "loss-not-summed-over-data": (
            f"{_ENGINE}.step",
            "backend.groups.sum_over_data(backend.groups.from_last_stage(share))",
            "backend.groups.from_last_stage(share)",
            "dp=2 mbs=2 length=6",
        ),
        "likelihood-of-the-prompt": (
            _LOSSES,
            'token_mask = data["token_mask"][:, 1:]',
            'token_mask = data["token_mask"][:, :-1]',
            "mbs=4 length=9 masked=some",
        ),
        "segments-count-as-responses": (
            f"{_ENGINE}.normalizers",
            'if "response_tokens" in data:',
            "if False:",
            "loss=pg+seq segments=3 dp=2 mbs=3 length=9",
        ),
        "mean-over-a-segment": (
            _LOSSES,
            'data.get("response_tokens") if self.sequence_normalizer is None',
            "None if self.sequence_normalizer is None",
            "loss=pg+seq segments=2 mbs=4 length=9",
        ),
        "ratio-not-clipped": (
            _LOSSES,
            "return ratio, ratio.clamp(1.0 - self.ratio_clip_min, 1.0 + self.ratio_clip_max)",
            "return ratio, ratio",
            "loss=pg+cispo+cliprange:1:0.28 dp=2 mbs=3 length=10",
            "loss=pg mbs=6 length=12",
        ),
        "own-reward-in-the-baseline": (
            "megarl.algorithms.advantages",
            "others = count - own_count",
            "others = count",
            "loss=pg advantages=rloo dp=2 mbs=3 length=10",
        ),
        "state-behind-the-token": (
            "megarl.algorithms.advantages",
            "torch.nn.functional.pad(values[:, :-1], (1, 0))",
            "values",
            "loss=value+clip advantages=gae+bootstrap dp=2 mbs=3 length=10",
        ),
        "rejected-for-chosen": (
            _LOSSES,
            "chosen, rejected = rewards[::2], rewards[1::2]",
            "rejected, chosen = rewards[::2], rewards[1::2]",
            "loss=dpo mbs=2 length=9",
        ),
        "score-of-the-last-column": (
            _VALUES,
            "values.gather(1, lengths.long()[:, None] - 1).squeeze(1)",
            "values[:, -1]",
            "loss=rm dp=2 mbs=2 length=9",
        ),
        "value-behind-the-token": (
            _VALUES,
            "visible(values[:, :-1])",
            "visible(values[:, 1:])",
            "loss=value dp=2 mbs=2 length=8",
        ),
        "divergence-the-other-way-round": (
            "megarl.algorithms.distillation_loss",
            "torch.where(can_be, one.exp() * (one - other), 0.0)",
            "torch.where(can_be, other.exp() * (other - one), 0.0)",
            "loss=distill dp=2 mbs=2 length=8",
        ),
    },
    "metric": {
        "sums-not-shared": (
            f"{_ENGINE}.step",
            "[value / count for value in values]",
            "[value for value in values]",
            "mbs=2 length=6 together=1",
        ),
        "schedule-stands-still": (
            f"{_ENGINE}.step",
            "            backend.lr_step()",
            "            pass",
            "mbs=2 length=6 warmup=1",
        ),
    },
    "grad_norm": {
        "gradient-of-a-whole-factor-counted-twice": (
            "megarl.models.megatron.adapters",
            "is_parallel=is_cut",
            "is_parallel=True",
            "backend=megatron tp=2 kv=2 ffn=6 mbs=2 length=6 optimizer=sgd lora=2",
        ),
        "gradient-of-an-expert-s-whole-factor-counted-twice": (
            "megarl.models.megatron.adapters",
            "self._of_expert and self._group.rank() == 0",
            "self._of_expert",
            f"{_EXPERTS} tp=2 kv=2 ffn=6 sp=1 etp=2 optimizer=sgd",
        ),
        "gradient-averaged-over-data": (
            f"{_ENGINE}.heads",
            "HeadOutput(loss=loss, metrics=kept",
            "HeadOutput(loss=(loss + loss.detach()) / 2, metrics=kept",
            "dp=2 mbs=2 length=6",
        ),
        "gradients-pile-up": (
            f"{_ENGINE}.step",
            "        backend.zero_grad()",
            "        pass",
            "mbs=2 length=6",
        ),
        "divergence-pathwise": (
            _LOSSES,
            "if self.exact_kl_gradient:",
            "if False:",
            "loss=pg+kl mbs=2 length=9",
        ),
        "norm-counts-copies": (
            "megarl.models.megatron.optimizer",
            "    config = optimizer_config(policy)",
            "    config = optimizer_config(policy)\n"
            "    for parameter in (each for chunk in chunks for each in chunk.parameters()):\n"
            "        parameter.tensor_model_parallel = True",
            "backend=megatron tp=2 kv=2 ffn=6 length=9",
        ),
        "dtensor-norm-counts-copies": (
            "megarl.models.dtensor.backend",
            " if first or block_of(each).tensor_dimension is not None",
            "",
            "backend=dtensor tp=2 kv=2 ffn=6 length=9",
        ),
        "torch-norm-of-own-shard": (
            "megarl.models.huggingface.optimizer",
            "dist.all_reduce(total)",
            "pass",
            "backend=dtensor dp=2 mbs=2 length=9",
            "backend=fsdp1 dp=2 mbs=2 length=9",
        ),
    },
    "weights": {
        "gradients-not-reduced": (
            "megarl.models.megatron.schedule",
            "finalize_model_grads(model, None, **options)",
            "pass",
            "backend=megatron dp=2 mbs=2 length=9 optimizer=sgd",
        ),
        "gradients-of-a-whole-factor-not-summed": (
            "megarl.models.megatron.adapters",
            "self.sequence_parallel and not is_cut",
            "False",
            "backend=megatron tp=2 kv=2 ffn=6 sp=1 mbs=2 length=6 optimizer=sgd lora=2",
        ),
        "parts-of-an-expert-s-whole-factor-not-summed": (
            "megarl.models.megatron.adapters",
            "self._of_expert and self._group.size() > 1",
            "False",
            f"{_EXPERTS} tp=2 kv=2 ffn=6 sp=1 etp=2 optimizer=sgd",
        ),
        "adapters-of-experts-reduced-as-other-layers": (
            "megarl.models.megatron.adapters",
            "parameter.allreduce = not self._of_expert",
            "parameter.allreduce = True",
            f"{_EXPERTS} ep=2 dp=2 optimizer=sgd",
        ),
        "clipping-forgotten": (
            "megarl.models.megatron.settings",
            'chosen["clip_grad"] or NO_CLIPPING',
            "NO_CLIPPING",
            "backend=megatron mbs=2 length=6 clip=0.05 optimizer=sgd",
        ),
        "torch-clipping-forgotten": (
            "megarl.models.huggingface.optimizer",
            "gradient.mul_(factor)",
            "pass",
            "backend=dtensor mbs=2 length=6 clip=0.05 optimizer=sgd",
            "backend=fsdp1 mbs=2 length=6 clip=0.05 optimizer=sgd",
        ),
        "adapters-merged-twice": (
            f"{_ENGINE}.adapters",
            "alpha=scaling).to",
            "alpha=2 * scaling).to",
            *(f"backend={backend} length=6 lora=2" for backend in _ADAPTED),
        ),
        "export-cut-elsewhere": (
            "megarl.models.megatron.weight_stream",
            "copies += _copies(layouts[rank], number",
            "copies += _copies(layouts[ranks - 1 - rank], number",
            "backend=megatron tp=2 kv=2 ffn=6 length=6",
        ),
    },
}
FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        name: Fault(module, old, new, tuple(cases), kind)
        for kind, rows in _TABLE.items()
        for name, (module, old, new, *cases) in rows.items()
    }
)
"""Faults shipped with the package, by name."""


def known_faults(seed: int = 0) -> Mapping[str, Fault]:
    """Return all faults by name: the shipped faults and, in a checkout, the faults of ``tests/mutations``.

    Args:
        seed: seed for the random sample of mutants that ``tests/mutations`` generates.
    """
    if not MUTATIONS.is_file():
        return FAULTS
    sys.path.insert(
        0, str(MUTATIONS.parents[2])
    )  # ``tests`` is not importable from an installed command, whose sys.path lacks the root of the checkout.
    try:
        return {**FAULTS, **importlib.import_module("tests.mutations").parity_faults(seed)}
    finally:
        sys.path.pop(0)


def faults_named(name: str, seed: int = 0) -> dict[str, Fault]:
    """Return the fault with the given name, or all faults whose kind or module has that name.

    Raises:
        ConfigError: no fault matches.
    """
    known = known_faults(seed)
    found = {each: fault for each, fault in known.items() if name in (each, fault.kind, fault.module)}
    if not found:
        kinds = ", ".join(dict.fromkeys(fault.kind for fault in FAULTS.values()))
        raise ConfigError(
            f"mutation {name!r}: there is none of that name; the mutations are {', '.join(FAULTS)}; kinds "
            f"of them: {kinds}"
        )
    return found
