"""The parts of ``--all``: what the default tier leaves out, in pieces of at most ten minutes that can be run apart.

``python -m tests.parts`` prints name, what has to be installed, how its tests are spread over processes and contents of each,
separated by tabs;
``python -m tests.parts --turn N`` prints the name whose turn it is after N commits. Nothing but Python is needed.
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
NEWEST, PIP_AUDIT, SLURM, TRITON, VLLM = "newest-megatron", "pip-audit", "slurm", "triton", "vllm"
GPU_STACK, ITS_TURN = "newest-megatron", 3
"""Every third turn is that of the layouts on the Megatron-Core that GPU users get, of which the default tier runs nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some minutes of ``--all``: the tests of some files that the default tier leaves out.

    Attributes:
        what: its tests in a few words.
        files: patterns of paths below ``tests/``; a file belongs to the first part that names it.
        needs: what else has to be installed: ``NEWEST`` (Python 3.12 and the newest Megatron-Core), ``PIP_AUDIT``, ``SLURM``,
            ``TRITON`` or ``VLLM``; "" for nothing.
        share: (k, n) for every n-th case from the k-th on, where the files hold more than ten minutes; (0, 1) for all.
        spread: how pytest-xdist spreads it over processes; "no" where ranks fill the cores, or tests look at the whole machine.
    """

    what: str
    files: tuple[str, ...]
    needs: str = ""
    share: tuple[int, int] = (0, 1)
    spread: str = "loadfile"

    def has(self, path: Path) -> bool:
        """Whether a file's tests belong to it, or to another part with the same files and another share."""
        return any(fnmatch.fnmatch(path.relative_to(TESTS).as_posix(), pattern) for pattern in self.files)


DTENSOR, EXPERTS = ("dist/test_dtensor*",), ("dist/test_megatron_experts.py",)
DISTRIBUTED, PROGRAMS = ("dist/*",), ("system/*",)
RESUME, VLLM_ENGINES, REAL_SLURM = ("system/test_resume.py",), ("system/test_vllm.py",), ("launch/test_real_slurm.py",)
PARTS: Mapping[str, Part] = {
    **{f"dtensor-{k + 1}": Part("DTensor: layouts, families, resume", DTENSOR, share=(k, 3), spread="no") for k in range(3)},
    **{f"experts-{k + 1}": Part("mixtures of experts in every layout", EXPERTS, share=(k, 2), spread="no") for k in range(2)},
    "megatron": Part("Megatron in every layout, other mixtures", ("dist/test_megatron_*",), spread="no"),
    **{
        f"distributed-{k + 1}": Part("FSDP1, refit, keys, foreign checkpoints, the parity fuzzer", DISTRIBUTED, share=(k, 2), spread="no")
        for k in range(2)
    },
    "kernels": Part("Triton kernels, interpreted and compiled", ("unit/test_logprob_kernels.py",), TRITON, spread="no"),
    "units": Part("converters, checkpoints, weight transport", ("unit/*",)),
    **{f"resume-{k + 1}": Part("runs killed at every step and moment", RESUME, share=(k, 3), spread="no") for k in range(3)},
    "ppo": Part("PPO killed at random moments, in several layouts", ("system/test_ppo.py",), spread="no"),
    **{f"vllm-{k + 1}": Part("vLLM engines, refitted by every backend", VLLM_ENGINES, VLLM, (k, 2), "no") for k in range(2)},
    "vllm-faults": Part("vLLM engines killed, out of memory, on devices", ("system/test_vllm_*",), VLLM, spread="no"),
    **{f"slurm-{k + 1}": Part("jobs on a real Slurm", REAL_SLURM, SLURM, (k, 2), "no") for k in range(2)},
    "signals": Part("signals, a killed driver, a lost Ray, time limits", ("system/test_signals.py",), spread="no"),
    "nodes": Part("checkpoints that wait in the memory of two nodes", ("system/test_saving_nodes.py",), spread="no"),
    "faults": Part("whole runs with one fault of each kind", ("system/test_faults.py",), spread="no"),
    "restarts": Part("workers and engines lost within a launch", ("system/test_restarts.py",), spread="no"),
    "gpu": Part("versions, test bodies and the probe for GPUs", ("launch/test_gpu_constraints.py", "system/test_gpu_*.py"), spread="no"),
    "audit": Part("known holes of the pinned versions", ("launch/test_dependencies.py",), PIP_AUDIT, spread="no"),
    "benchmarks": Part("whole cases of the benchmarks, small", ("system/test_benchmarks.py",), spread="no"),
    **{f"programs-{k + 1}": Part("whole programs", PROGRAMS, share=(k, 2)) for k in range(2)},
    "launch": Part("launch scripts, with replacements for pip and Slurm", ("launch/*",)),
    "newest-converters": Part("converters on the newest Megatron-Core", ("unit/*",), NEWEST),
    GPU_STACK: Part("layouts on the newest Megatron-Core", DISTRIBUTED, NEWEST, spread="no"),
}


def of_turn(commits: int) -> str:
    """The part whose turn it is after so many commits."""
    if commits % ITS_TURN == 0:
        return GPU_STACK
    others = [name for name in PARTS if name != GPU_STACK]
    return others[(commits - commits // ITS_TURN - 1) % len(others)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__)
    parser.add_argument("--turn", type=int, metavar="N", help="print only the part whose turn it is after N commits")
    turn = parser.parse_args().turn
    if turn is not None:
        print(of_turn(turn))
        return
    for name, part in PARTS.items():
        print(name, part.needs or "-", part.spread, part.what, sep="\t")


if __name__ == "__main__":
    main()
