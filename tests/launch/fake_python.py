"""A Python for the launch scripts that makes real virtual environments in a blink and whose pip only writes
down what it was asked for.

The environment it makes holds stand-ins for pip and pytest, and, after ``pip install --editable``, for the
packages that the scripts import to see whether an installation works. Behaviour is steered by variables of
the process environment:

    FAKE_CALLS         file to which pip and pytest append one line of JSON for each call
    FAKE_PIP_FAILS     pip writes a message and ends with status 1 when this word is among its arguments
    FAKE_PYTEST_FAILS  pytest writes a message and ends with status 1 when this word is among its arguments
    FAKE_PIP_GATE      directory with two named pipes: ``pip install`` writes to ``started`` and then waits
                       until something comes through ``release``
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

RECORD = """
import json, os, sys

def record(program):
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps([program, os.path.basename(sys.prefix), *sys.argv[1:]]) + "\\n")
"""

PIP_MAIN = """
import os, pathlib, sys
from fake_record import record

record("pip")
if "index" in sys.argv:
    print(os.environ.get("FAKE_INDEX", ""))
gate = os.environ.get("FAKE_PIP_GATE")
if gate and "install" in sys.argv:
    pathlib.Path(gate, "started").write_text("now")
    pathlib.Path(gate, "release").read_text()
if os.environ.get("FAKE_PIP_FAILS") in sys.argv:
    sys.exit("ERROR: no matching distribution, says the stand-in for pip")
if "--editable" in sys.argv:
    here = pathlib.Path(__file__).parents[1]
    for name in ("datasets", "megatron", "megatron/core", "pydantic", "ray", "torch", "transformers"):
        (here / name).mkdir(exist_ok=True)
        (here / name / "__init__.py").touch()
    (here / "clone.pth").write_text(sys.argv[-1].split("[")[0])
"""

PYTEST_MAIN = """
import os, sys
from fake_record import record

record("pytest")
print("tests of", os.path.basename(sys.prefix))
if os.environ.get("FAKE_PYTEST_FAILS") in sys.argv:
    sys.exit("1 failed, says the stand-in for pytest")
"""

SCRIPT = """#!/bin/sh
# Answers a question for its version itself, makes environments, and is the real Python for everything else.
case "$*" in
    *ensurepip*) echo "{version}"; exit 0 ;;
    "-m venv "*) exec "{python}" "{maker}" "$3" ;;
esac
exec "{python}" "$@"
"""


def write_fake_python(path: Path, version: str) -> Path:
    """An executable at ``path`` that says it is ``version``, for example ``3.11.9``."""
    path.write_text(SCRIPT.format(version=version, python=sys.executable, maker=Path(__file__).resolve()))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_environment(target: Path) -> None:
    """A virtual environment with the stand-ins; its files keep what already lay in ``target``."""
    import venv

    venv.EnvBuilder(with_pip=False, symlinks=True).create(target)
    packages = next((target / "lib").glob("python3*")) / "site-packages"
    (packages / "fake_record.py").write_text(RECORD)
    for name, main in (("pip", PIP_MAIN), ("pytest", PYTEST_MAIN)):
        (packages / name).mkdir()
        (packages / name / "__init__.py").touch()
        (packages / name / "__main__.py").write_text(main)


if __name__ == "__main__":
    make_environment(Path(sys.argv[1]))
