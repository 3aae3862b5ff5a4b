"""Kill what conversations are held with, at random moments: interpreters of the Python tool, a service, and
drivers of whole runs.

    python -m tests.faults.conversations --kills 24 --seed 1

Of a kill of a tool, the conversations that it hit are masked and counted as lost, and all others are what
they are without it, to the bit. A run whose driver is killed goes on to the weights and the log of one that
nobody disturbed. Nothing is left behind. Results are appended to
``benchmarks/results/faults-conversations.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.config.environments import EnvConfig
from megarl.data.datasets import Example
from megarl.key import defaults_of
from megarl.rollout import collector as collectors
from megarl.rollout.environments import make_environment
from tests.templates import tokenizer_of
from tests.unit.scripted import ScriptedStream, collector_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults-conversations.jsonl"
CONVERSATIONS, TURNS = 8, 4
KINDS = ("interpreter", "interpreter", "service", "driver")


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        time.sleep(0.4)
        body = json.dumps({"text": "7"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not logged."""


def _called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _collected(kind: str, url: str, during: Callable[[], None]) -> Any:
    """The samples of conversations that all call a tool in each of their turns, while something happens."""
    tools: dict[str, Any] = (
        {"python": {}} if kind == "interpreter" else {"http": {"url": url, "timeout_s": 2.0}}
    )
    own = {
        "environment": "tools",
        "reward": "exact_match",
        "tool_parser": "hermes",
        "tools": tools,
        "processes": 1,
    }
    environment = make_environment({**defaults_of(EnvConfig), **own})  # type: ignore[typeddict-item]
    tokenizer = tokenizer_of("qwen2.5")
    code = "import time\ntime.sleep(0.3)\nx = globals().get('x', 0) + 1\nx"
    call = _called("python", code=code) if kind == "interpreter" else _called("http", query="seven")

    def script(prompt: list[int], seed: int) -> list[int]:
        said = call if tokenizer.decode(prompt).count("<|im_start|>assistant") < TURNS else "7"
        return [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    collector, engine, _ = collector_of(environment, script, turns=TURNS)
    prompt = tuple(
        tokenizer("<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
            "input_ids"
        ]
    )
    waves, collectors.Waves = (
        collectors.Waves,
        lambda *arguments, **options: ScriptedStream(engine, lambda: 0.01),
    )  # type: ignore[assignment, misc]
    other = threading.Thread(target=during)
    try:
        other.start()
        return collector.collect(
            [Example(place, prompt, (), "7") for place in range(CONVERSATIONS)], 1, list(range(CONVERSATIONS))
        )
    finally:
        other.join()
        collectors.Waves = waves  # type: ignore[misc]
        environment.close()


@contextmanager
def _service() -> Iterator[tuple[ThreadingHTTPServer, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _hosts() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "megarl.rollout.tools.python" in " ".join(child.cmdline())
    ]


def _of_a_tool(kind: str, drawn: random.Random) -> tuple[bool, str]:
    with _service() as (server, url):
        whole = _collected(kind, url, lambda: None)
        hit: list[str] = []

        def kill() -> None:
            time.sleep(0.2 + drawn.random() * (0.9 if kind == "service" else 2.0))
            if kind == "service":
                server.shutdown()
                server.server_close()
                hit.append("service")
                return
            # A trial without a kill shows nothing: wait for an interpreter.
            until = time.monotonic() + 5
            while not (hosts := _hosts()) and time.monotonic() < until:
                time.sleep(0.05)
            for host in drawn.sample(hosts, min(len(hosts), drawn.randint(1, 2))):
                host.send_signal(signal.SIGKILL)
                hit.append(f"interpreter {host.pid}")

        found = _collected(kind, url, kill)
    samples, expected = found.samples, whole.samples
    lost = [row for row, ended in enumerate(samples["ended"]) if ended == "lost"]
    # one that is killed behind its last call harms nobody, which the comparison shows
    faults = []
    if kind == "interpreter" and len(lost) > len(hit):
        faults.append(f"{len(lost)} conversations were lost")
    if samples["masked"].nonzero().squeeze(1).tolist() != lost or found.metrics["episodes/lost"] != len(lost):
        faults.append(f"masked {samples['masked'].tolist()}, lost {lost}")
    for row in {*range(CONVERSATIONS)} - {*lost}:
        end = int(expected["input_lengths"][row])
        same = int(samples["input_lengths"][row]) == end and torch.equal(
            samples["input_ids"][row, :end], expected["input_ids"][row, :end]
        )
        if (
            not same
            or samples["reward"][row] != expected["reward"][row]
            or samples["ended"][row] != expected["ended"][row]
        ):
            faults.append(f"conversation {row} is another one")
    left = [child.pid for child in _hosts()]
    faults += [f"left behind: {left}"] if left else []
    return not faults, "; ".join(
        [f"killed {', '.join(hit) or 'nothing'}; {len(lost)} of {CONVERSATIONS} lost", *faults]
    )


_RUN = """
import sys
from pathlib import Path
from tests.unit.driver_runs import PolicyMaker
from tests.unit.test_segments import nagging
from megarl.run.run import run
directory, model, data = sys.argv[1:]
config = nagging("grpo", Path(directory), model, data)
config["checkpointing"]["save_period"] = 1
print("starts", flush=True)
raise SystemExit(run(config, PolicyMaker()))
"""


def _run(directory: Path, material: Path, kill_after: float | None) -> int:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [
        sys.executable,
        "-c",
        _RUN,
        str(directory),
        str(material / "model"),
        str(material / "sums.jsonl"),
    ]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if kill_after is not None:
            try:
                return process.wait(kill_after)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.read()
        return process.wait()


def _of_a_driver(drawn: random.Random, material: Path) -> tuple[bool, str]:
    from tests.unit.driver_runs import check_same
    from tests.unit.tiny_model import make_tiny_model

    if not (material / "whole" / "metrics.jsonl").exists():
        make_tiny_model(material / "model", 5)
        lines = [json.dumps({"prompt": f"{left}+{left}=", "answer": str(2 * left)}) for left in range(7)]
        (material / "sums.jsonl").write_text("\n".join(lines))
        begun = time.monotonic()
        assert _run(material / "whole", material, None) == 0
        (material / "seconds").write_text(str(time.monotonic() - begun))
    seconds = float((material / "seconds").read_text())
    directory, wanted, kills = material / f"killed-{drawn.getrandbits(32)}", drawn.randint(1, 3), 0
    while kills < wanted:
        if _run(directory, material, drawn.random() * seconds) == -signal.SIGKILL:
            kills += 1
        elif kills:
            break
        else:
            # The run ended before it was to be killed: begin again, and kill earlier.
            shutil.rmtree(directory)
            seconds /= 2
    code = _run(directory, material, None)
    try:
        check_same(material / "whole", directory)
    except (AssertionError, OSError) as error:
        return False, f"{kills} kills, exit code {code}: {str(error)[:200]}"
    return code == 0, f"{kills} kills, exit code {code}; log and weights equal"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    failures = 0
    with tempfile.TemporaryDirectory() as made:
        for number in range(chosen.kills):
            drawn, kind, begun = (
                random.Random(f"{chosen.seed}/{number}"),
                KINDS[number % len(KINDS)],
                time.monotonic(),
            )
            passed, said = _of_a_driver(drawn, Path(made)) if kind == "driver" else _of_a_tool(kind, drawn)
            row = {
                "commit": commit,
                "seed": chosen.seed,
                "number": number,
                "kind": kind,
                "passed": passed,
                "said": said,
            }
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "seconds": round(time.monotonic() - begun, 1)}) + "\n")
            print(
                f"{number + 1} of {chosen.kills}: {kind}: {'held' if passed else 'FAILED'}: {said}",
                flush=True,
            )
            failures += not passed
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
