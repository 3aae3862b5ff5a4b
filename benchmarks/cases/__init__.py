"""The cases, by name. A module of a case is imported only when it runs, because it needs torch, Ray or
Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """A case of the benchmarks.

    Attributes:
        about: one line on what is compared with what.
        module: module that has ``function(quick) -> Iterator[Point]``, or ``function(quick, options)`` if the
            case takes options.
        function: name of the function that measures.
        takes: the options of ``benchmarks.options.Options`` that the case follows.
        needs: options that the case requires; a run of all cases skips the case if they are not given.
        load: number of processes that the case computes with at the same time, and so the load that it causes
            itself.
        by_name: the case runs only if it is named; a run of all cases skips it.
    """

    about: str
    module: str
    function: str = "measure"
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    load: float = 2.0
    by_name: bool = False


CASES = {
    "episodes": Case(
        "conversations at their own pace against a barrier between turns",
        "benchmarks.cases.episodes",
        load=1.0,
    ),
    "asynchronous": Case(
        "steps that sample beside training against steps that do it in turn", "benchmarks.cases.asynchronous"
    ),
    "convert.h2m": Case(
        "import of a checkpoint against a plain copy and against transformers",
        "benchmarks.cases.conversion",
        "measure_import",
    ),
    "convert.m2h": Case(
        "export of a checkpoint against a plain copy and against transformers",
        "benchmarks.cases.conversion",
        "measure_export",
    ),
    "refit.ipc": Case(
        "weights handed over in 300 and 10,000 tensors against one flat copy of them",
        "benchmarks.cases.refit",
        "measure_handover",
    ),
    "refit.bcast": Case(
        "weights sent in 300 and 10,000 tensors against one flat broadcast of them",
        "benchmarks.cases.refit",
        "measure_broadcast",
    ),
    "refit.export": Case(
        "all weights of mixtures of 12 and 125 experts a layer, about as many bytes, against one flat copy",
        "benchmarks.cases.refit_export",
    ),
    "refit.load": Case(
        "host seconds of loading experts into vLLM's model at a refit, a layer's together against one "
        "weight after another; needs vLLM",
        "benchmarks.cases.refit_load",
        by_name=True,
    ),
    "messages": Case(
        "messages and bytes of driver and ranks of a refit at 8 to 1,024 ranks, counted; fails above its "
        "bounds",
        "benchmarks.cases.messages",
    ),
    "train.packed": Case(
        "valid tokens a second of packed and dynamic against padded micro-batches",
        "benchmarks.cases.train_packed",
    ),
    "train.adapters": Case(
        "a training step of low-rank adapters against a step of all weights of the same model",
        "benchmarks.cases.train_adapters",
        takes=("device",),
    ),
    "grpo.step": Case(
        "a GRPO step by phase against TRL's GRPOTrainer, or a loop by hand", "benchmarks.cases.grpo_step"
    ),
    "recipe.step": Case(
        "log-probabilities and training of a recipe in its layout on all nodes, against products of "
        "matrices there",
        "benchmarks.cases.recipe_step",
        takes=("device", "model", "tokens"),
        needs=("model",),
    ),
    "logprobs": Case(
        "the log-probability phase of each backend against the model of transformers with log_softmax",
        "benchmarks.cases.logprobs",
        takes=("device", "model", "tokens"),
    ),
    "gdn": Case(
        "a gated delta net forward and backward against the layer of transformers, in chunks both",
        "benchmarks.cases.gated_delta",
        takes=("device",),
    ),
    "scaling.ranks": Case(
        "core-seconds of a training step on 1 to 8 ranks against one rank, and against torch's FSDP2",
        "benchmarks.cases.scaling_ranks",
        takes=("device", "model", "tokens"),
        load=8.0,
    ),
    "train.step": Case(
        "a training step of each backend and layout against a bare loop on transformers, and against "
        "torch's FSDP2",
        "benchmarks.cases.train_step",
        takes=("device", "model", "layout", "tokens"),
    ),
    "startup": Case(
        "a command, a dry run and a tiny GRPO run until its first step, against an empty interpreter, "
        "import torch and TRL",
        "benchmarks.cases.startup",
    ),
    "data.start": Case(
        "the first and the second start with 50,000 rows of data, or others, against reading and tokenizing "
        "them alone",
        "benchmarks.cases.data_start",
        takes=("rows",),
    ),
    "generation": Case(
        "generation by each backend, ragged prompts, against generate of transformers",
        "benchmarks.cases.generation",
    ),
    "host.adam": Case(
        "bytes of optimizer states stepped in host memory a second against a copy of them",
        "benchmarks.cases.host_adam",
    ),
    "operations": Case(
        "operations and host syncs of a packed micro-batch of 2, 16 and 64 sequences, counted; fails above "
        "its bounds",
        "benchmarks.cases.operations",
    ),
    "ckpt.save": Case(
        "a save until the checkpoint has its name against a raw write of its bytes with fsync",
        "benchmarks.cases.checkpoints",
        "measure_save",
        takes=("model",),
    ),
    "ckpt.load": Case(
        "a checkpoint verified, and loaded, against a raw read of its bytes",
        "benchmarks.cases.checkpoints",
        "measure_load",
        takes=("model",),
    ),
    "ckpt.async_stall": Case(
        "how long training stands still for a checkpoint that is written meanwhile, against one copy of its "
        "bytes",
        "benchmarks.cases.checkpoints",
        "measure_stall",
        takes=("model",),
    ),
}
