"""What megarl brings along: licences that allow it, and versions without known holes, as far as that can be
looked up."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl import env
from tests.tiers import slow

ROOT = Path(__file__).resolve().parents[2]
PERMISSIVE = re.compile(
    r"apache|\bmit\b|\bbsd\b|\b[0-3]-?bsd|\bisc\b|\bpsf|python software|\bmpl\b|mozilla|unlicense|public "
    r"domain|zlib|\bhpnd\b|cc0|boost|"
    r"\bbsl-1|wtfpl",
    re.IGNORECASE,
)
COPYLEFT = re.compile(
    r"(?<!l)\b(?:a?gpl)\b|gnu (?:affero )?general public|\bsspl\b|server side public|commons "
    r"clause|non-?commercial",
    re.IGNORECASE,
)
KNOWN = {"setuptools": "MIT"}
"""Packages whose metadata say no licence that the pattern knows, with the one that their source has."""


def closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that some need, with those that these need, and so on."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        name, extras = pending.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in found[name].requires or []:
            required = Requirement(text)
            if required.marker is None or any(
                required.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            ):
                pending.append((canonicalize_name(required.name), frozenset(required.extras)))
    return found


def licence_of(distribution: importlib.metadata.Distribution) -> str:
    """All that its metadata say, in one line; the text of a licence counts by its beginning."""
    metadata = distribution.metadata
    classifiers = [
        line.rpartition("::")[2].strip()
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    return "; ".join(
        part
        for part in (metadata.get("License-Expression"), *classifiers, (metadata.get("License") or "")[:200])
        if part
    )


def direct() -> list[str]:
    """What pyproject.toml asks for."""
    import tomllib

    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [canonicalize_name(Requirement(text).name) for text in asked]


def test_whatever_a_run_needs_may_be_used_by_everybody() -> None:
    found = closure(direct())
    assert len(found) > len(direct()) > 15
    licences = {
        name: KNOWN.get(name) or licence_of(distribution) for name, distribution in sorted(found.items())
    }
    for name, licence in licences.items():
        print(f"{name:<32} {found[name].version:<16} {' '.join(licence.split())[:80]}")
    # of several licences one may choose
    assert {
        name: licence
        for name, licence in licences.items()
        if COPYLEFT.search(licence) and not PERMISSIVE.search(licence)
    } == {}
    assert {name: licence for name, licence in licences.items() if not PERMISSIVE.search(licence)} == {}


@pytest.mark.parametrize(
    ("licence", "permissive", "copyleft"),
    [
        ("Apache-2.0", True, False),
        ("BSD-3-Clause", True, False),
        ("MIT License", True, False),
        ("GPL-3.0-only", False, True),
        ("GNU Affero General Public License v3", False, True),
        ("AGPL", False, True),
        ("Proprietary", False, False),
        ("Submit a licence", False, False),
        ("", False, False),
    ],
)
def test_the_patterns_tell_licences_apart(licence: str, permissive: bool, copyleft: bool) -> None:
    assert (bool(PERMISSIVE.search(licence)), bool(COPYLEFT.search(licence))) == (permissive, copyleft)


@slow
@pytest.mark.parametrize("constraints", ["constraints-cpu.txt", "constraints-gpu.txt"])
def test_no_version_has_a_known_hole(constraints: str) -> None:
    """With ``MEGARL_TEST_AUDIT=1`` it fails where it cannot look; without, that is the reason why it is left
    out.

    ``launch/test.sh --part audit`` says by ``MEGARL_TEST_PIP_AUDIT`` where it has put pip-audit.
    """

    def left_out(reason: str) -> None:
        if env.flag("MEGARL_TEST_AUDIT"):
            pytest.fail(f"{constraints} was not looked up: {reason}")
        pytest.skip(f"{constraints} was not looked up: {reason}")

    place = env.text("MEGARL_TEST_PIP_AUDIT", "") or ""
    if not place and importlib.util.find_spec("pip_audit") is None:
        left_out("pip-audit is not installed; bash launch/test.sh --part audit does it")
    pinned = [
        line for line in (ROOT / constraints).read_text().splitlines() if re.match(r"[A-Za-z0-9._-]+==", line)
    ]
    assert len(pinned) > 50
    # a local version (2.13.0+cpu) is no version that a database knows
    requirements = "\n".join(re.sub(r"\+[\w.]+", "", line) for line in pinned)
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--requirement",
        "/dev/stdin",
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
    ]
    path = os.pathsep.join(part for part in (place, env.text("PYTHONPATH")) if part)
    variables = {**env.snapshot(), "PYTHONPATH": path}
    done = subprocess.run(
        command, input=requirements, env=variables, capture_output=True, text=True, check=False, timeout=500
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        left_out(f"pip-audit ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    looked_up = [each for each in report["dependencies"] if "skip_reason" not in each]
    assert {
        f"{each['name']} {each['version']}": [hole["id"] for hole in each["vulns"]]
        for each in looked_up
        if each["vulns"]
    } == {}
    skipped = [
        f"{each['name']}: {each['skip_reason']}" for each in report["dependencies"] if "skip_reason" in each
    ]
    if skipped:
        left_out(f"{len(skipped)} of {len(pinned)} packages, such as {skipped[0]}")
