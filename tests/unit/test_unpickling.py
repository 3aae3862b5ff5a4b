"""The watch over pickles in whole programs sees those that are read from files and sockets, and none that Ray
or multiprocessing carry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl import env
from tests.unpickling.watch import PickleWatch

READ = "import pickle, fractions; data = pickle.dumps(fractions.Fraction(1, 3))\n"


def run(code: str, directory: Path) -> PickleWatch:
    watch = PickleWatch(directory)
    subprocess.run(
        [sys.executable, "-c", code], env={**env.snapshot(), **watch.variables}, check=True, cwd=directory
    )
    return watch


@pytest.mark.parametrize(
    "code",
    [
        READ + "pickle.loads(data)",
        READ + "open('file', 'wb').write(data); pickle.load(open('file', 'rb'))",
        READ + "pickle.Unpickler(__import__('io').BytesIO(data)).load()",
        READ + "import socket; a, b = socket.socketpair(); a.sendall(data); pickle.loads(b.recv(1000))",
        # of a group what nobody sends there
        READ
        + (
            "import sys; exec(compile('import pickle; pickle.loads(data)', "
            "'/x/torch/distributed/distributed_c10d.py', 'exec'))"
        ),
        # nor there what FSDP1 alone is sent
        "import collections, pickle\ndata = pickle.dumps(collections.OrderedDict(fractions=1))\n"
        "exec(compile('import pickle; pickle.loads(data)', '/x/torch/distributed/distributed_c10d.py', "
        "'exec'))",
        # in directories that are only called like the packages that may
        READ + "exec(compile('pickle.loads(data)', '/home/ray/project/multiprocessing/reader.py', 'exec'))",
        READ + "exec(compile('pickle.loads(data)', '/home/me/concurrent/futures/reader.py', 'exec'))",
        # within what Ray runs, as all code of a worker is
        "import sys, types\n"
        "ray = types.ModuleType('ray'); ray.call = None\n"
        "exec(compile('def call(f): return f()', '/site-packages/ray/_private/workers/default_worker.py', "
        "'exec'), vars(ray))\n" + READ + "ray.call(lambda: pickle.loads(data))",
    ],
)
def test_what_is_read_elsewhere_is_told_with_its_stack(code: str, tmp_path: Path) -> None:
    watch = run(code, tmp_path)
    [found] = watch.found()
    assert found.startswith(("fractions.Fraction\n", "collections.OrderedDict\n")) and "<string>:" in found
    assert len(watch.watched()) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import json; json.loads('[1, 2]')",
        "import pickle; pickle.loads(pickle.dumps({'plain': [1, 2.0, 'text', None]}))",
        "import multiprocessing, fractions\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool: assert pool.map(double, "
        "[fractions.Fraction(1, 3)])[0] < 1",
        READ
        + (
            "import sys; exec(compile('import pickle; pickle.loads(data)', "
            "'/site-packages/ray/_private/serialization.py', 'exec'))"
        ),
    ],
)
def test_what_is_expected_is_not(code: str, tmp_path: Path) -> None:
    watch = run(code, tmp_path)
    assert watch.found() == [] and watch.watched()
