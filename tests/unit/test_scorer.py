"""The reward `http`: a scorer elsewhere that answers, is busy, is down, is silent, or says nonsense."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import check
from megarl.config.validate import validate_config
from megarl.errors import ConfigError, RewardError
from megarl.rollout.environment import Turn
from megarl.rollout.rewards import RewardSpec, Task, get_reward
from megarl.rollout.single_turn import SingleTurn
from megarl.time_limit import time_limit
from tests.tiers import slow
from tests.unit.config_samples import complete, raw_grpo

REPLIES = {
    "words": "<html>",
    "null": '{"score": null}',
    "judged": '{"score": 2.5, "acc": 1}',
    "many": "[1, 2]",
    "empty": "\n",
    "not a number": "NaN",
    "beyond": "1e999",
    "beyond right": '{"score": 1, "acc": 2}',
    "another key": '{"reward": 1}',
    "half": '{"score": 1',
    "deep": "[" * 100_000,
}


class Scorer(ThreadingHTTPServer):
    """Does what a response asks for, and remembers what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Scorer

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        response = asked["response"]
        times = sum(each["response"] == response for each in self.server.asked)
        if response == "silent" or (response == "silent once" and times == 1):
            self.server.is_over.wait(60)
        if response == "trickles":
            self.send_response(200)
            self.end_headers()
            while not self.server.is_over.wait(0.05):
                self.wfile.write(b" ")
        if response == "endless":
            self.send_response(200)
            self.end_headers()
            while not self.server.is_over.is_set():
                self.wfile.write(b"[" * (1 << 16))
        if response == "hangs up":
            return
        if response.startswith("short"):
            # what is there is a number
            self.send_response(200)
            self.send_header("Content-Length", "4" if response == "short" else "3")
            self.end_headers()
            self.wfile.write(b"0.2" if response == "short" else b"0.2 and more")
            return
        statuses = {
            "busy twice": 503 if times < 3 else 200,
            "busy": 429,
            "refused": 400,
            "elsewhere": 302,
            "round": 307,
        }
        self.send_response(statuses.get(response, 200))
        self.send_header("Location", "/score")
        self.end_headers()
        self.wfile.write(REPLIES.get(response, str(len(response) / 8)).encode())

    def do_GET(self) -> None:
        self.server.asked.append({"response": "GET", "prompt": ""})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"1.0")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scorer]:
    """A scorer on this machine, that no proxy stands before."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Scorer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()


def reward_of(url: str, timeout_s: float = 20.0, attempts: int = 3) -> Any:
    spec = RewardSpec.of_section({"reward": "http", "url": url, "attempts": attempts, "timeout_s": timeout_s})
    return lambda response: get_reward(spec).judge(Task(response, "a", 3, "p", {"answer": "a", "index": 7}))


def test_what_a_scorer_is_asked_and_replies(scorer: Scorer) -> None:
    ask = reward_of(scorer.url)
    assert ask("four") == 0.5 and ask("judged") == {"score": 2.5, "acc": 1}
    assert ask("\ud800 ") == 0.25
    question = {"prompt": "p", "response": "four", "answer": "a", "record": {"answer": "a", "index": 7}}
    assert scorer.asked[0] == question and scorer.asked[2]["response"] == "\ud800 "


@slow
def test_a_scorer_that_is_busy_is_asked_again(scorer: Scorer) -> None:
    ask = reward_of(scorer.url, timeout_s=2.0)
    assert ask("busy twice") == 10 / 8 and len(scorer.asked) == 3
    # within the time that all requests share
    with time_limit(2.0):
        assert ask("silent once") == 11 / 8 and len(scorer.asked) == 5
    with pytest.raises(RewardError, match=r"gave no score in 3 attempts \(status 429\)\. Fix"):
        ask("busy")
    assert len(scorer.asked) == 8
    with pytest.raises(RewardError, match=r"in 1 attempts \(status 400\)"):
        ask("refused")
    assert len(scorer.asked) == 9


def test_a_reply_that_is_shorter_than_was_announced_is_none(scorer: Scorer) -> None:
    with pytest.raises(
        RewardError, match=r"in 3 attempts \(IncompleteRead: IncompleteRead\(3 bytes read, 1 more expected\)"
    ):
        reward_of(scorer.url)("short")
    assert len(scorer.asked) == 3
    assert reward_of(scorer.url)("short no more") == 0.2


def test_a_scorer_that_fails_on_every_response_is_down(scorer: Scorer) -> None:
    environment = SingleTurn(
        complete({**raw_grpo(), "env": {"reward": "http", "url": scorer.url, "timeout_s": 2.0}})["env"]
    )
    records: list[Any] = [
        SimpleNamespace(index=row, answer="a", env_name=None, fields={}) for row in range(2)
    ]
    try:
        assert environment.step(
            Turn(records, ["refused", "words"], [[1]] * 2, [None] * 2, ["p"] * 2)
        ).masked == [True, True]
    finally:
        environment.close()


def test_replies_that_are_no_score(scorer: Scorer) -> None:
    with pytest.raises(RewardError, match="did not reply with JSON"):
        reward_of(scorer.url)("words")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RewardError, match=r"in 2 attempts \(URLError: .*refused"):
        reward_of(f"http://127.0.0.1:{port}", timeout_s=0.2, attempts=2)("a")


CAUSED = {"endless", "hangs up", "short", "refused", *REPLIES} - {"judged"}
"""Responses that may be why the scorer gives no score."""


def test_what_a_scorer_does_not_judge_scores_0_or_is_masked_and_no_hang(
    scorer: Scorer, caplog: pytest.LogCaptureFixture
) -> None:
    """What the scorer or the way there causes is masked, a silence too; the others have their scores."""
    config = raw_grpo()
    config["env"] = {"reward": "http", "url": scorer.url, "timeout_s": 2.0, "processes": 4}
    filled = complete(config)
    assert check(filled) == []
    environment = SingleTurn(filled["env"])
    bad = ["silent", "trickles", "endless", "hangs up", "short", "refused", "elsewhere", "round", *REPLIES]
    bad.remove("judged")
    responses = ["four", *bad, "judged"]
    records: list[Any] = [
        SimpleNamespace(index=row, answer="a", env_name=None, fields={}) for row in range(len(responses))
    ]
    try:
        result = environment.step(
            Turn(records, responses, [[1]] * len(responses), [None] * len(responses), ["p"] * len(responses))
        )
    finally:
        environment.close()
    assert list(result.rewards) == [0.5, *[0.0] * len(bad), 2.5]
    assert list(result.masked) == [False, *(response not in CAUSED for response in bad), False]
    assert (result.metrics["reward_errors"], result.metrics["reward_timeouts"]) == (len(bad), 0)
    # no redirection is followed
    assert {each["prompt"] for each in scorer.asked} == {"p"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"reward": "http"}, r"env\.url = None: the reward 'http' needs it"),
        (
            {"reward": "http", "url": "localhost:80"},
            r"env\.url = 'localhost:80': it must be an http or https address",
        ),
        ({"reward": "http", "url": "file:///etc/passwd"}, "it must be an http or https address"),
        ({"reward": "http", "url": "http://a", "attempts": 0}, r"env\.attempts = 0"),
        ({"url": "http://a"}, r"env\.url = 'http://a': the reward 'exact_match' does not read it"),
    ],
)
def test_scorers_that_make_no_sense_are_refused(env: dict[str, Any], message: str) -> None:
    config = raw_grpo()
    config["env"] |= env
    with pytest.raises(ConfigError, match=message):
        validate_config(config)
