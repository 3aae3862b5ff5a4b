"""The parts of ``--all``: what the default tier leaves out, in pieces of at most ten minutes that can be run
apart.

``python -m tests.parts`` prints name, what has to be installed, how its tests are spread over processes and
contents of each, separated by tabs;
``python -m tests.parts --turn N`` prints the name whose turn it is after N commits;
``python -m tests.parts --passed NAME`` notes in ``tests/parts_passed.tsv`` that a part has passed at the
commit that is checked out; ``python -m tests.parts --ages`` prints at which commit each part last passed, the
oldest first. Nothing but Python and git is needed.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
NEWEST, NEXT, PIP_AUDIT, SLURM, TRITON, VLLM = (
    "newest-megatron",
    "next-megatron",
    "pip-audit",
    "slurm",
    "triton",
    "vllm",
)
OF_NEWEST = (NEWEST, NEXT)
"""Needs of parts whose tests are those with the mark ``newest_megatron``."""
MODEL_CLASS = "MEGARL_TEST_MODEL_CLASS"
"""Environment variable: ``policy.megatron_cfg.model_class`` of configurations that say nothing of it."""
GPU_STACK, ITS_TURN = "newest-megatron", 3
"""Every third turn is that of the layouts on the Megatron-Core that GPU users get, of which the default tier
runs nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some minutes of ``--all``: the tests of some files that the default tier leaves out.

    Attributes:
        what: its tests in a few words.
        files: patterns of paths below ``tests/``; a file belongs to the first part that names it.
        needs: what else has to be installed: ``NEWEST`` (Python 3.12 and the newest Megatron-Core), ``NEXT``
            (a pre-release behind it), ``PIP_AUDIT``, ``SLURM``, ``TRITON`` or ``VLLM``; "" for nothing.
        share: (k, n) for every n-th case from the k-th on, where the files hold more than ten minutes; (0, 1)
            for all.
        spread: how pytest-xdist spreads it over processes; "no" where ranks fill the cores, or tests look at
            the whole machine.
        variables: of the environment that it runs in.
    """

    what: str
    files: tuple[str, ...]
    needs: str = ""
    share: tuple[int, int] = (0, 1)
    spread: str = "loadfile"
    variables: Mapping[str, str] = field(default_factory=dict)

    def has(self, path: Path) -> bool:
        """Whether a file's tests belong to it, or to another part with the same files and another share."""
        return any(fnmatch.fnmatch(path.relative_to(TESTS).as_posix(), pattern) for pattern in self.files)


TRAINING, DTENSOR = ("dist/test_training.py",), ("dist/test_dtensor*", "dist/test_workers.py")
EXPERTS = ("dist/test_megatron_experts.py", "dist/test_training_mixtures.py", "dist/test_expert_adapters.py")
DISTRIBUTED, PROGRAMS = ("dist/*",), ("system/*", "engines/*")
RESUME, VLLM_ENGINES, REAL_SLURM = (
    ("system/test_resume.py",),
    ("system/test_vllm.py", "engines/test_vllm.py"),
    ("launch/test_real_slurm.py",),
)
PARTS: Mapping[str, Part] = {
    **{
        f"training-{k + 1}": Part("each backend in every layout", TRAINING, share=(k, 3), spread="no")
        for k in range(3)
    },
    "dtensor": Part("DTensor alone; workers of all backends", DTENSOR, spread="no"),
    **{
        f"experts-{k + 1}": Part("mixtures of experts in every layout", EXPERTS, share=(k, 2), spread="no")
        for k in range(2)
    },
    "megatron": Part(
        "Megatron in every layout, other mixtures",
        ("dist/test_megatron_*", "dist/test_generation.py"),
        spread="no",
    ),
    **{
        f"distributed-{k + 1}": Part(
            "FSDP1, refit, keys, foreign checkpoints, the parity fuzzer",
            DISTRIBUTED,
            share=(k, 2),
            spread="no",
        )
        for k in range(2)
    },
    "kernels": Part(
        "Triton kernels, interpreted and compiled",
        ("unit/test_logprob_kernels.py", "unit/test_gated_delta_kernels.py"),
        TRITON,
        spread="no",
    ),
    "units": Part("converters, checkpoints, weight transport", ("unit/*",)),
    **{
        f"resume-{k + 1}": Part("runs killed at every step and moment", RESUME, share=(k, 3), spread="no")
        for k in range(3)
    },
    "ppo": Part("PPO killed at random moments, in several layouts", ("system/test_ppo.py",), spread="no"),
    **{
        f"vllm-{k + 1}": Part("vLLM engines, refitted by every backend", VLLM_ENGINES, VLLM, (k, 2), "no")
        for k in range(2)
    },
    "vllm-faults": Part(
        "vLLM engines killed, out of memory, on devices", ("system/test_vllm_*",), VLLM, spread="no"
    ),
    **{f"slurm-{k + 1}": Part("jobs on a real Slurm", REAL_SLURM, SLURM, (k, 2), "no") for k in range(2)},
    "signals": Part(
        "signals, a killed driver, a lost Ray, time limits", ("system/test_signals.py",), spread="no"
    ),
    "nodes": Part(
        "checkpoints that wait in the memory of two nodes", ("system/test_saving_nodes.py",), spread="no"
    ),
    "faults": Part("whole runs with one fault of each kind", ("system/test_faults.py",), spread="no"),
    "restarts": Part("workers and engines lost within a launch", ("system/test_restarts.py",), spread="no"),
    "asynchronous": Part(
        "sampling beside training, against a serial program",
        ("system/test_asynchronous.py", "system/test_scored_parts.py"),
        spread="no",
    ),
    "gpu": Part(
        "versions, test bodies and the probe for GPUs",
        ("launch/test_gpu_constraints.py", "system/test_gpu_*.py"),
        spread="no",
    ),
    "audit": Part(
        "known holes of the pinned versions", ("launch/test_dependencies.py",), PIP_AUDIT, spread="no"
    ),
    "benchmarks": Part("whole cases of the benchmarks, small", ("system/test_benchmarks.py",), spread="no"),
    **{f"programs-{k + 1}": Part("whole programs", PROGRAMS, share=(k, 2)) for k in range(2)},
    "launch": Part("launch scripts, with replacements for pip and Slurm", ("launch/*",)),
    "newest-converters": Part("converters on the newest Megatron-Core", ("unit/*",), NEWEST),
    GPU_STACK: Part("layouts on the newest Megatron-Core", DISTRIBUTED, NEWEST, spread="no"),
    "newest-hybrid": Part(
        "the same with its HybridModel", DISTRIBUTED, NEWEST, spread="no", variables={MODEL_CLASS: "hybrid"}
    ),
    "next-megatron": Part("layouts on Megatron-Core's newest pre-release", DISTRIBUTED, NEXT, spread="no"),
}


def of_turn(commits: int) -> str:
    """The part whose turn it is after so many commits."""
    if commits % ITS_TURN == 0:
        return GPU_STACK
    # what a pre-release of another project breaks is for whoever asks, and no reason to hold a change up
    others = [name for name, part in PARTS.items() if name != GPU_STACK and part.needs != NEXT]
    return others[(commits - commits // ITS_TURN - 1) % len(others)]


PASSED = TESTS / "parts_passed.tsv"
"""Of each part that ever passed: its name, and the last commit at which it did."""


def _git(*arguments: str) -> str | None:
    """What a command says; None where it fails."""
    done = subprocess.run(["git", *arguments], cwd=TESTS, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def passed() -> dict[str, str]:
    """The last commit at which each part passed, by its name."""
    lines = PASSED.read_text(encoding="utf-8").splitlines() if PASSED.exists() else []
    return dict(line.split("\t") for line in lines)


def note_pass(name: str) -> None:
    """Note that a part has passed at the commit that is checked out. Nothing is noted where a tracked file
    has changed, but for the notes themselves, since what ran is not that commit, and where there is no
    repository."""
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude,top)tests/{PASSED.name}"
    )
    if changed is None or changed:
        return
    noted = passed() | {name: _git("rev-parse", "--short", "HEAD") or ""}
    PASSED.write_text(
        "".join(f"{part}\t{noted[part]}\n" for part in PARTS if part in noted), encoding="utf-8"
    )


def ages() -> list[tuple[str, str, int | None]]:
    """Each part, the last commit at which it passed ("" for none) and how many commits were made since; the
    oldest first."""
    noted, found = passed(), []
    for name in PARTS:
        since = _git("rev-list", "--count", f"{noted[name]}..HEAD") if name in noted else None
        found.append((name, noted.get(name, ""), None if since is None else int(since)))
    return sorted(found, key=lambda row: math.inf if row[2] is None else row[2], reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__)
    parser.add_argument(
        "--turn", type=int, metavar="N", help="print only the part whose turn it is after N commits"
    )
    parser.add_argument(
        "--passed",
        choices=PARTS,
        metavar="NAME",
        help="note that this part has passed at the commit that is checked out",
    )
    parser.add_argument("--ages", action="store_true", help="print at which commit each part last passed")
    chosen = parser.parse_args()
    if chosen.turn is not None:
        print(of_turn(chosen.turn))
        return
    if chosen.passed is not None:
        note_pass(chosen.passed)
        return
    if chosen.ages:
        for name, commit, since in ages():
            print(f"{name:<18} {commit or '-':<9} {'never' if since is None else f'{since} commits ago'}")
        return
    for name, part in PARTS.items():
        print(name, part.needs or "-", part.spread, part.what, sep="\t")


if __name__ == "__main__":
    main()
