"""Faults of the served policy, planted in running engines: each has to be named at its refit, and no whole
refit may be.

    python -m tests.faults.served --refits 50 --seed 1

Faults of weights are planted between what arrived and the engine's loader, so that its own parameters have
them; those of computing in its modules, with all weights right. Results are appended to
``benchmarks/results/faults-served.jsonl``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from megarl.algorithms.refit import Refit
from megarl.algorithms.served import ServedCheck
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.errors import MismatchError
from megarl.models.engine.receiving import ArrivedWeights
from megarl.models.policy.lm_policy import Policy
from megarl.models.policy.policy_engines import PolicyEngines, engine_policy
from tests.dist.batches import make_batch
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.models import make_tiny, policy_config
from tests.system.vllm_engines import dense_model, engines

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults-served.jsonl"
DENSE, SPARSE, TIED = "stages to tensor parallel", "divided experts to copies", "FSDP1 to DTensor"
VLLM = "two engines of vLLM"
"""Weights of these are in vLLM's own forms, so that log-probabilities alone can show a fault."""
HEAD = 10

Weights = dict[str, torch.Tensor]
Edit = Callable[[Weights, Weights], None]
Undo = Callable[[], None]


def _named(weights: Weights, pattern: str) -> list[str]:
    found = [name for name in weights if re.search(pattern, name)]
    assert found, f"no weight is called {pattern}"
    return found


def old(pattern: str) -> Edit:
    """These weights stay as they were."""

    def edit(new: Weights, before: Weights) -> None:
        new.update({name: before[name] for name in _named(new, pattern)})

    return edit


def changed(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """These weights become others."""

    def edit(new: Weights, before: Weights) -> None:
        new.update({name: change(new[name]) for name in _named(new, pattern)})

    return edit


def exchanged(one: str, other: str) -> Edit:
    """These weights have each other's places."""

    def edit(new: Weights, before: Weights) -> None:
        for name in _named(new, re.escape(one)):
            partner = name.replace(one, other)
            new[name], new[partner] = new[partner], new[name]

    return edit


def _rotary_pairs_side_by_side(weight: torch.Tensor) -> torch.Tensor:
    """Rows of each head in the order in which Meta publishes them."""
    heads = weight.view(-1, 2, HEAD // 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


def _next_head(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(HEAD, 0)


def _one_bit(weight: torch.Tensor) -> torch.Tensor:
    bits = weight.clone().view(torch.int32)
    bits.view(-1)[7] ^= 1
    return bits.view(weight.dtype)


def _first_is_nan(weight: torch.Tensor) -> torch.Tensor:
    spoiled = weight.clone()
    spoiled.view(-1)[0] = torch.nan
    return spoiled


def otherwise(
    module_type: str, attribute: str, value: Callable[[Any], Any]
) -> Callable[[torch.nn.Module], Undo]:
    """Every module of a type computes with another number or function."""

    def change(model: torch.nn.Module) -> Undo:
        found = [module for module in model.modules() if type(module).__name__ == module_type]
        assert found, f"no module is a {module_type}"
        before = [getattr(module, attribute) for module in found]
        for module, was in zip(found, before, strict=True):
            setattr(module, attribute, value(was))
        return lambda: (
            [setattr(module, attribute, was) for module, was in zip(found, before, strict=True)] and None
        )

    return change


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which engines do not serve the policy.

    Attributes:
        edit: changes whole weights on their way into the loader.
        wrong: pattern of the names that have to be found wrong.
        local: pattern of the parameters of the engines' last rank, or the last engine, that stay as they
            were, instead of an edit.
        computes: changes modules instead; what undoes it.
        engines: kinds that it can be planted in.
        shows: log-probabilities show it for certain where weights cannot be compared.
    """

    edit: Edit | None = None
    wrong: str = ""
    local: str | None = None
    computes: Callable[[torch.nn.Module], Undo] | None = None
    engines: tuple[str, ...] = (DENSE, SPARSE, TIED, VLLM)
    shows: bool = True


_OWN, _MEGATRON, _UNTIED = (DENSE, SPARSE, TIED), (DENSE, SPARSE), (DENSE, SPARSE, VLLM)
_LAYER = r"layers\.{}\."
FAULTS: Mapping[str, Fault] = {
    "no refit at all": Fault(old(""), ""),
    "half a refit": Fault(
        old(r"layers\.[23]\.|model\.norm|lm_head"), r"layers\.[23]\.|model\.norm|lm_head", engines=_UNTIED
    ),
    "a group left out": Fault(old(r"layers\.1\.(mlp|post)"), r"layers\.1\.(mlp|post)"),
    "one old weight": Fault(old(r"layers\.2\.self_attn\.o_proj"), r"layers\.2\.self_attn\.o_proj"),
    "old embedding": Fault(old("embed_tokens"), "embed_tokens|lm_head", engines=(TIED,)),
    "old output layer": Fault(old("lm_head"), "lm_head", engines=_UNTIED),
    "old final norm": Fault(old(r"model\.norm"), r"model\.norm"),
    "a rank that did not load": Fault(local="", shows=False),
    "a norm of one rank": Fault(
        local=r"final_layernorm|model\.norm", wrong=r"norm\.weight", engines=_OWN, shows=False
    ),
    "missing bias": Fault(
        changed(r"layers\.1\..*bias", torch.zeros_like), r"layers\.1\..*bias", engines=(DENSE, VLLM)
    ),
    "swapped layers": Fault(exchanged("layers.0.", "layers.1."), r"layers\.[01]\."),
    "wrong scale": Fault(
        changed(r"layers\.2\..*down_proj", lambda weight: weight / 2), r"layers\.2\..*down_proj"
    ),
    "scale of one channel": Fault(
        changed(r"layers\.0\..*o_proj", lambda weight: weight * torch.arange(len(weight)).ne(5)[:, None]),
        r"layers\.0\..*o_proj",
    ),
    "gate and up exchanged": Fault(exchanged("gate_proj", "up_proj"), "(gate|up)_proj"),
    "keys and values exchanged": Fault(exchanged("k_proj", "v_proj"), "[kv]_proj"),
    "heads in another order": Fault(
        changed(r"layers\.3\..*q_proj\.weight", _next_head), r"layers\.3\..*q_proj\.weight", engines=_OWN
    ),
    "rotary pairs side by side": Fault(
        changed(r"[qk]_proj\.weight", _rotary_pairs_side_by_side), r"[qk]_proj\.weight", engines=_OWN
    ),
    "a norm less one": Fault(changed("input_layernorm", lambda weight: weight - 1), "input_layernorm"),
    "rounded to bfloat16": Fault(
        changed("", lambda weight: weight.bfloat16().float()), "", engines=_OWN, shows=False
    ),
    "tokens one further": Fault(
        changed("lm_head", lambda weight: weight.roll(1, 0)), "lm_head", engines=_UNTIED
    ),
    # what it leaves in the memory of vLLM's cache is named at the next refit too
    "no number": Fault(
        changed(r"layers\.1\..*v_proj\.weight", _first_is_nan), r"layers\.1\..*v_proj\.weight", engines=_OWN
    ),
    "one bit": Fault(
        changed(r"layers\.1\..*o_proj", _one_bit), r"layers\.1\..*o_proj", engines=_OWN, shows=False
    ),
    "one expert old": Fault(
        old(r"layers\.2\.mlp\.experts\.3\."), r"layers\.2\.mlp\.experts\.3\.", engines=(SPARSE,), shows=False
    ),
    "experts exchanged": Fault(exchanged("experts.2.", "experts.5."), r"experts\.[25]\.", engines=(SPARSE,)),
    "old router": Fault(old(r"mlp\.gate\.weight"), r"mlp\.gate\.weight", engines=(SPARSE,)),
    # angles are kept from one batch to the next
    "another rotary base": Fault(
        computes=otherwise("RotaryEmbedding", "forward", lambda found: lambda *a, **k: found(*a, **k) * 1.5),
        engines=_MEGATRON,
    ),
    "another epsilon": Fault(
        computes=otherwise("PortableRMSNorm", "eps", lambda found: 0.1), engines=_MEGATRON
    ),
    "another epsilon in vLLM": Fault(
        computes=otherwise("RMSNorm", "variance_epsilon", lambda found: 0.1), engines=(VLLM,)
    ),
    "attention of another scale": Fault(
        computes=otherwise("PortableAttention", "softmax_scale", lambda found: 0.5), engines=_MEGATRON
    ),
    "fewer experts a token": Fault(
        computes=otherwise("BalancedRouter", "topk", lambda found: 2), engines=(SPARSE,)
    ),
}


def plant(shell: Any, name: str) -> None:
    """In the process of an engine's worker: plant a fault, of weights in what the next refit loads."""
    backend, fault = shell._worker.backend, FAULTS[name]
    if fault.computes is not None:
        shell.undo = fault.computes(backend.stages[0])
        return
    load, edit, local = backend.load_hf, fault.edit, fault.local

    def with_fault(source: Any) -> None:
        del backend.load_hf
        if edit is not None:
            before = {key: weight.clone() for key, weight in backend.export_hf()}
            new = {key: source.read(key).clone() for key in source.names()}
            edit(new, before)
            return load(ArrivedWeights(source.directory, new))
        kept = [
            (weight, weight.detach().clone())
            for key, weight in backend.trainable()
            if re.search(local or "", key)
        ]
        assert kept, f"no parameter is called {local}"
        load(source)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            for weight, was in kept:
                weight.data.copy_(was)

    backend.load_hf = with_fault


def keep_weights(shell: Any, name: str) -> None:
    """In the process of vLLM: remember what came, as what is old at the next refit. All comes in one
    group."""
    engine = _vllm_worker(shell).weight_transfer_engine
    load = engine.load

    def keeping(weights: list[tuple[str, torch.Tensor]]) -> None:
        shell.came = {key: weight.clone() for key, weight in weights}
        load(weights)

    engine.load = keeping


def plant_in_vllm(shell: Any, name: str) -> None:
    """In the process of vLLM: plant a fault."""
    worker, fault = _vllm_worker(shell), FAULTS[name]
    if fault.computes is not None:
        shell.undo = fault.computes(worker.model_runner.model)
        return
    engine, edit = worker.weight_transfer_engine, old("") if fault.edit is None else fault.edit
    load = engine.load

    def with_fault(weights: list[tuple[str, torch.Tensor]]) -> None:
        engine.load = load
        new = {key: weight.clone() for key, weight in weights}
        edit(new, shell.came)
        load(list(new.items()))

    engine.load = with_fault


def leave_unfinished(shell: Any, name: str) -> None:
    """In the process of vLLM: a request is under way, whose keys and values a refit would have to throw
    away."""
    from vllm import SamplingParams

    engine = shell._worker._engine._llm.llm_engine
    engine.add_request(
        "left", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=20, ignore_eos=True)
    )
    engine.step()


def give_up_unfinished(shell: Any, name: str) -> None:
    """In the process of vLLM: end that request."""
    shell._worker._engine._llm.llm_engine.abort_request(["left"])


def _vllm_worker(shell: Any) -> Any:
    return shell._worker._engine._llm.llm_engine.model_executor.driver_worker.worker


def mend(shell: Any, name: str) -> None:
    """In the process of an engine's worker: undo a fault of computing, which no refit does."""
    if FAULTS[name].computes is not None:
        shell.undo()


class Pair:
    """A policy that trains and engines apart, and what a run has between them.

    Args:
        directory: for the model.
        kind: one of the kinds of engines above.
        seed: of all noise.
    """

    def __init__(self, directory: Path, kind: str, seed: int = 3) -> None:
        family, tensor, layout = KINDS[kind]
        self.kind = kind
        apart = {"colocated": {"enabled": False}, "engine_cfg": {"tensor_parallel_size": tensor}}
        if kind == VLLM:
            sizes = {
                "intermediate_size": 112,
                "num_hidden_layers": 4,
                "initializer_range": 0.2,
                "tie_word_embeddings": False,
            }
            model = dense_model(directory / family, **sizes)
            apart = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
        else:
            model = make_tiny(directory / family, family, tied=kind == TIED, layers=4)
        make = fsdp1_config if kind == TIED else policy_config
        config = make(model, generation={**apart, "backend": "hf"} if kind == TIED else apart, **layout)
        self.clusters = [RayVirtualCluster([2], use_gpus=False, name="trains")]
        self.policy = Policy(self.clusters[0], config, None, seed=seed)
        if kind == VLLM:
            self.engines: Any = engines(model, "generates", colocated=False, places=2, sampling=apart)
        else:
            self.clusters.append(RayVirtualCluster([2], use_gpus=False, name="generates"))
            section = engine_policy(self.policy.cfg, 2)
            self.engines = PolicyEngines(
                lambda: Policy(self.clusters[1], section, None, "generation", init_optimizer=False)
            )
        self.refit = Refit(self.policy, self.engines, colocated=False)
        self._precision = config["precision"]
        self.renew_check()
        if kind == VLLM:
            self.refit.bring_up_to_date()
            self.in_engines(keep_weights)
            self.said_at_refit()

    def renew_check(self) -> None:
        """Start the check anew, as a run does: what it took for usual is forgotten."""
        self.check = ServedCheck(
            {"sequences": 3, "on_difference": "stop"}, self.policy, self.engines, self._precision, seed=5
        )
        self.check.remember(BatchedDataDict(make_batch(7, 11, seed=2)), 1)
        self.refit.check = self.check.check

    def change_the_policy(self) -> None:
        self.policy._call_all("_add_noise_to_weights")
        self.refit.stale = True

    def change_the_engines(self) -> None:
        self.engines._policy._call_all("_add_noise_to_weights")

    def in_engines(self, function: Callable[..., None], name: str = "") -> None:
        """Call a function of a worker's shell in each process of the engines; a fault of one engine of vLLM
        in the last."""
        workers = (
            self.engines.worker_group.workers
            if self.kind == VLLM
            else self.engines._policy.worker_group.workers
        )
        alone = self.kind == VLLM and name and FAULTS[name].local is not None
        ray.get(
            [worker.actor.__ray_call__.remote(function, name) for worker in workers[-1 if alone else 0 :]]
        )

    def faults(self) -> list[str]:
        """Names of the faults that these engines can have."""
        return [name for name, fault in FAULTS.items() if self.kind in fault.engines]

    def said_at_refit(self) -> str:
        """What the check says at a refit with other weights; "" where it says nothing."""
        self.change_the_policy()
        try:
            self.refit.bring_up_to_date()
        except MismatchError as error:
            return str(error)
        return ""

    def said_of(self, name: str, *, by_weights: bool = True) -> str:
        """What the check says at the refit that has a fault.

        Args:
            name: of the fault.
            by_weights: the engines can tell their weights.
        """
        self.renew_check()
        self.in_engines(plant_in_vllm if self.kind == VLLM else plant, name)
        if not by_weights and self.kind != VLLM:
            self.engines.weight_digests = lambda: None  # type: ignore[method-assign, assignment, return-value]
        said = self.said_at_refit()
        self.engines.__dict__.pop("weight_digests", None)
        self.in_engines(mend, name)
        self.renew_check()
        return said

    def is_named(self, name: str) -> tuple[bool, str]:
        """Whether the refit with a fault names it, and what it says."""
        fault, said = FAULTS[name], self.said_of(name)
        if self.kind == VLLM:
            which = "engine 1's" if fault.local is not None else r"engine \d's"
            return bool(
                re.match(
                    rf"{which} log-probabilities of \d+ given tokens differ from the policy's by "
                    r"([0-9.e-]+|nan) ",
                    said,
                )
            ), said
        if fault.computes is not None:
            return bool(
                re.match(
                    r"the engines' log-probabilities of \d+ given tokens differ from the policy's by "
                    r"[0-9.e-]+ ",
                    said,
                )
            ), said
        if fault.local is not None:
            return bool(
                re.search(
                    r"\d+ of \d+ weights in the engines differ from the policy's: .*" + fault.wrong, said
                )
            ), said
        names = list(self.policy.weight_digests())
        wrong = [each for each in names if re.search(fault.wrong, each)]
        expected = (
            f"{len(wrong)} of {len(names)} weights in the engines differ from the policy's: "
            f"{', '.join(wrong[:3])}"
        )
        return said.startswith(expected), said

    def close(self) -> None:
        assert self.engines.shutdown() and self.policy.shutdown()
        for cluster in self.clusters:
            cluster.shutdown()


KINDS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    DENSE: ("qwen2", 2, {"tp": 1, "pp": 2}),
    SPARSE: ("qwen3_moe", 1, {"tp": 1, "ep": 2}),
    TIED: ("llama", 2, {}),
    VLLM: ("words", 1, {"tp": 2}),
}


def main() -> int:
    """Append what refits of every kind of engine say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--refits", type=int, default=50, help="whole ones, of each kind of engine")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    failures = 0
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    for kind in KINDS if importlib.util.find_spec("vllm") else KINDS.keys() - {VLLM}:
        with tempfile.TemporaryDirectory() as directory:
            begun, pair = time.monotonic(), Pair(Path(directory), kind, chosen.seed)
            alarms = [said for said in (pair.said_at_refit() for _ in range(chosen.refits)) if said]
            judged = {name: pair.is_named(name) for name in pair.faults()}
            pair.close()
        missed = {name: said for name, (named, said) in judged.items() if not named}
        row = {
            "commit": commit,
            "seed": chosen.seed,
            "engines": kind,
            "whole_refits": chosen.refits,
            "false_alarms": alarms,
        }
        found = {
            **row,
            "faults": list(judged),
            "not_named": missed,
            "seconds": round(time.monotonic() - begun, 1),
        }
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(
            f"{kind}: {len(alarms)} of {chosen.refits} whole refits named, {len(missed)} of {len(judged)} "
            "faults not",
            flush=True,
        )
        failures += len(alarms) + len(missed)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
