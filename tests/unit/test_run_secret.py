"""Who does not have the secret of a run meets none of its processes: neither side takes the other for what it
is not."""

from __future__ import annotations

import hashlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megarl import env
from megarl.distributed.rendezvous import Endpoint, _check_proofs, check_membership, listening_socket
from megarl.distributed.run_secret import VARIABLE, drawn_secret, proof, proves
from megarl.distributed.virtual_cluster import free_port
from megarl.errors import ClusterError, RefitError
from megarl.weight_sync import rendezvous
from megarl.weight_sync.line import Line
from megarl.weight_sync.rendezvous import Members, Rendezvous
from tests.tiers import sampled, slow
from tests.unit.weight_processes import _FORKSERVER

HOST, SECONDS = "127.0.0.1", 60.0
OURS, THEIRS = "a" * 64, "b" * 64
OWN = {"manifest": "same"}


def hmac_by_hand(key: bytes, message: bytes) -> str:
    """RFC 2104 with SHA-256."""
    block = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).hexdigest()


@given(st.text(max_size=80), st.text(max_size=10), st.lists(st.text(max_size=10), max_size=3))
def test_a_proof_is_an_hmac_of_what_is_proven(secret: str, purpose: str, parts: list[str]) -> None:
    encoded = [text.encode() for text in (purpose, *parts)]
    message = b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
    assert proof(purpose, *parts, secret=secret) == hmac_by_hand(secret.encode(), message)


def test_parts_purposes_and_secrets_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, OURS)
    made = [
        proof("a", "bc"),
        proof("ab", "c"),
        proof("a", "b", "c"),
        proof("a", "bc", ""),
        proof("a", "bc", secret=THEIRS),
    ]
    assert len(set(made)) == len(made)
    assert proves(made[0], "a", "bc") and proves(made[0], "a", "bc", secret=OURS)
    for wrong in (None, 5, b"", "", made[1], made[0].upper(), made[0] + "0", "ü"):
        assert not proves(wrong, "a", "bc")
    monkeypatch.delenv(VARIABLE)
    assert not proves(made[0], "a", "bc")


def test_the_driver_draws_one_secret() -> None:
    assert drawn_secret() == drawn_secret() and len(drawn_secret()) == 64


def join(port: int, secret: str, out: Connection) -> None:
    """A rank of an engine; says what came of it."""
    env.set_variables({VARIABLE: secret})
    try:
        Rendezvous(HOST, port, keeps=False, seconds=SECONDS).introduce(OWN, 1, 0, 7)
        out.send("in")
    except RefitError as error:
        out.send(str(error))


def meet(secret: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, list[Any]]:
    """What the policy and an engine with ``secret`` make of one another, and what the policy heard and said
    on its connection."""
    port, words = free_port(HOST), list[Any]()
    hear, say = Line.hear, Line.say

    def hearing(line: Line, seconds: float) -> Any:
        words.append(hear(line, seconds))
        return words[-1]

    def saying(line: Line, message: Any) -> None:
        words.append(message)
        say(line, message)

    policy = Rendezvous(HOST, port, keeps=True, seconds=SECONDS)
    here, there = _FORKSERVER.Pipe()
    engine = _FORKSERVER.Process(target=join, args=(port, secret, there), daemon=True)
    engine.start()
    there.close()
    try:
        with monkeypatch.context() as listening:
            listening.setattr(Line, "hear", hearing)
            listening.setattr(Line, "say", saying)
            policy.judge(OWN, Members(2, 1), 7, ())
        said = "in"
    except RefitError as error:
        said = str(error)
    heard = here.recv()
    engine.join()
    policy.close()
    return said, heard, words


@slow
def test_both_of_one_run_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, OURS)
    policy, engine, words = meet(OURS, monkeypatch)
    assert (policy, engine) == ("in", "in")
    assert len(words) == 3 and OURS not in json.dumps(words), "the secret itself is never sent"


@sampled(1)
@pytest.mark.parametrize(("ours", "theirs"), [(OURS, THEIRS), (OURS, ""), ("", THEIRS)])
def test_an_engine_of_another_run_is_refused(ours: str, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ours)
    policy, engine, _ = meet(theirs, monkeypatch)
    assert "cannot prove to belong to this run" in policy and "cannot prove to belong to this run" in engine


def test_a_policy_of_another_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets everybody in, so as to send its own weights."""
    monkeypatch.setenv(VARIABLE, THEIRS)
    monkeypatch.setattr(rendezvous, "proves", lambda *arguments: True)
    policy, engine, _ = meet(OURS, monkeypatch)
    assert policy == "in" and "the policy does not prove that it belongs to this run" in engine


def test_a_policy_that_repeats_what_another_one_said_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, OURS)
    _, _, (asked, _, verdict) = meet(OURS, monkeypatch)
    with listening_socket(HOST, 0) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            Rendezvous(HOST, server.getsockname()[1], keeps=False, seconds=20.0).introduce, OWN, 1, 0, 7
        )
        line = Line(server.accept()[0])
        line.say(asked)
        line.hear(SECONDS)
        line.say(verdict)
        with pytest.raises(RefitError, match="the policy does not prove that it belongs to this run"):
            joining.result()
        line.close()


@sampled(1)
@pytest.mark.parametrize("change", ["replayed", "no proof", "other rank"])
def test_who_has_listened_at_another_meeting_learned_nothing(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, OURS)
    _, _, (asked, said, _) = meet(OURS, monkeypatch)
    forged = {
        "replayed": said,
        "no proof": {"hello": said["hello"], "challenge": said["challenge"]},
        "other rank": {**said, "hello": said["hello"].replace('"rank": 1', '"rank": 2')},
    }[change]
    if change == "other rank":
        # on the same connection
        monkeypatch.setattr(rendezvous.secrets, "token_hex", lambda count: asked["nonce"])
    port = free_port(HOST)
    policy = Rendezvous(HOST, port, keeps=True, seconds=SECONDS)
    line = Line(socket.create_connection((HOST, port)))
    line.say(forged)
    with pytest.raises(RefitError, match="cannot prove to belong to this run"):
        policy.judge(OWN, Members(3, 1), 7, ())
    line.close()


def test_a_rank_that_only_reads_the_store_cannot_join_a_group() -> None:
    store, endpoint = dist.HashStore(), Endpoint(HOST, 1, OURS)
    check_membership(store, endpoint, 0, 3)
    read = store.get("run_id").decode()
    assert OURS not in read
    with pytest.raises(ClusterError, match="another group uses that address"):
        check_membership(store, Endpoint(HOST, 1, read), 1, 3)
    check_membership(store, endpoint, 1, 3)
    store.set("proof_2", store.get("proof_1"))
    with pytest.raises(ClusterError, match=r"the process that connected as rank 2 .* does not prove"):
        _check_proofs(store, endpoint, 3)
    check_membership(store, endpoint, 2, 3)
    _check_proofs(store, endpoint, 3)


def test_a_world_size_that_rank_0_has_not_said_is_not_believed() -> None:
    store, endpoint = dist.HashStore(), Endpoint(HOST, 1, OURS)
    check_membership(store, endpoint, 0, 3)
    store.set("world_size", store.get("world_size").decode().replace("3 ", "4 ", 1))
    with pytest.raises(ClusterError, match="was not set by its rank 0"):
        check_membership(store, endpoint, 1, 4)
