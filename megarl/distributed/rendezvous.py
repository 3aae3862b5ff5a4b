"""Rendezvous of the ranks of a worker group, without a gap in which another process could take the port.

Rank 0 binds a listening socket to port 0 in its own process and keeps it open; only then are address and port
published. The socket becomes the server socket of ``torch.distributed.TCPStore``. Under ``torchrun`` no
socket is bound here, and the usual ``env://`` rendezvous is used.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl import env
from megarl.distributed.run_secret import proof
from megarl.errors import ClusterError, DeadlineError, StateError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
# All ranks may connect at the same time. The kernel's own limit (net.core.somaxconn) has the same default.
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which the ranks of a worker group connect.

    Attributes:
        address, port: address and port of rank 0's listening socket.
        run_id: random text that only the group's ranks know. They use it to prove that they belong to the
            group, and never send it.
    """

    address: str
    port: int
    run_id: str


class _Rendezvous:
    """State of this process's rendezvous. ``generation`` counts the process groups created so far, so that a
    group never reads the keys of an earlier one."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.listener: socket.socket | None = None
        self.store: Store | None = None
        self.generation = 0


_rendezvous = _Rendezvous()


def listening_socket(address: str, port: int) -> socket.socket:
    """Listen on one address of this host.

    Args:
        address: address of this host; no other address is bound.
        port: port number; 0 for any free port.

    Raises:
        OSError: the port is in use, or the address does not belong to this host.
    """
    # The address determines the family, because a cluster may have only IPv6 addresses.
    family, _, _, _, (host, *_) = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    # Peers may connect before anyone accepts, because the kernel queues connections.
    return socket.create_server((str(host), port), family=family, backlog=_BACKLOG)


def open_listener(address: str) -> int:
    """Bind a free port of ``address`` in this process, keep it, and return its number. Only for rank 0.

    Raises:
        StateError: this process already listens.
        ClusterError: the address does not belong to this host.
    """
    if _rendezvous.listener is not None or _rendezvous.store is not None:
        raise StateError(
            f"rendezvous listener of this process is open already (address {address}). Fix: open it once "
            "for a worker"
        )
    try:
        # With port 0 the kernel chooses a free port. A configured port might be in use.
        listener = listening_socket(address, 0)
    except OSError as error:
        raise ClusterError(
            f"rendezvous address = {address!r} cannot be bound on {socket.gethostname()} ({error}): an "
            "address of this host is needed. "
            "Fix: start Ray with the right --node-ip-address"
        ) from error
    _rendezvous.listener = listener
    return int(listener.getsockname()[1])


def set_endpoint(endpoint: Endpoint) -> None:
    """Set the address at which this process's group connects. Called on every rank before its worker is
    constructed."""
    _rendezvous.endpoint = endpoint


def init_process_group(
    backend: str, timeout: datetime.timedelta = DEFAULT_TIMEOUT, device: torch.device | None = None
) -> None:
    """Call ``torch.distributed.init_process_group``, with a store on the kept socket (under Ray) or over
    ``env://`` (under torchrun). Every worker calls this.

    Rank and world size come from ``RANK`` and ``WORLD_SIZE``. All ranks may call this again after
    ``destroy_process_group``.

    Args:
        backend: for example ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.
        timeout: time limit of the rendezvous and of every collective.
        device: device of this rank. A CUDA device is bound to the group: NCCL then connects the ranks here
            instead of in the first step, and a barrier need not guess the device.

    Raises:
        ClusterError: the world size differs from rank 0's, another process has this rank, or the group at
            this address is another one.
        DeadlineError: another rank did not connect in time.
    """
    # Import torch here, because the worker shell imports this module, and must set thread counts before torch
    # is loaded.
    import torch.distributed as dist

    # gloo does not support binding a device.
    bound = device if device is not None and device.type == "cuda" else None
    endpoint = _rendezvous.endpoint
    if endpoint is None:
        dist.init_process_group(backend, init_method="env://", timeout=timeout, device_id=bound)
        return
    rank, world_size = env.integer("RANK", 0), env.integer("WORLD_SIZE", 1)
    _keep_gloo_on_loopback(endpoint.address)
    if _rendezvous.store is None:
        _rendezvous.store = _connect(endpoint, rank, world_size, timeout)
    # A new prefix for each group, because the store still contains the keys of earlier groups.
    prefix = f"megarl/{_rendezvous.generation}"
    _rendezvous.generation += 1
    store = dist.PrefixStore(prefix, _rendezvous.store)
    check_membership(store, endpoint, rank, world_size)
    if rank == 0:
        _check_proofs(store, endpoint, world_size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
    )


def _connect(endpoint: Endpoint, rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """Return the group's TCPStore: on rank 0 the server, on the kept socket; on other ranks a client."""
    import torch.distributed as dist

    listener = _rendezvous.listener
    if rank == 0 and listener is None:
        raise StateError(
            "rank 0 has an endpoint but no listening socket. Fix: call rendezvous.open_listener in this "
            "process first"
        )
    descriptor = None
    if listener is not None:
        # The store takes ownership of the file descriptor.
        descriptor = listener.detach()
        _rendezvous.listener = None
    try:
        return dist.TCPStore(
            endpoint.address,
            endpoint.port,
            world_size=world_size,
            is_master=descriptor is not None,
            timeout=timeout,
            # Do not wait here: if a rank died before it connected, no error would tell which one is missing.
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except dist.DistError as error:
        raise DeadlineError(
            f"rendezvous of rank {rank} at {endpoint.address}:{endpoint.port} failed: no answer within "
            f"{timeout.total_seconds():g} s "
            f"({error}). Fix: see why rank 0 stopped, or let the hosts reach each other"
        ) from error


def check_membership(store: Store, endpoint: Endpoint, rank: int, world_size: int) -> None:
    """Compare this rank's settings with those of rank 0, and raise at once instead of after the collective
    timeout.

    Waits for rank 0, so that no other process that connects first can determine the group's settings.

    Raises:
        ClusterError: run id or world size differ, the rank is out of range, or another process has the same
            rank.
        DeadlineError: rank 0 did not connect within the store's timeout, or is gone.
    """
    where = f"at {endpoint.address}:{endpoint.port}"
    if not 0 <= rank < world_size:
        raise ClusterError(
            f"RANK = {rank} {where}: it must lie in [0, {world_size}). Fix: check RANK and WORLD_SIZE of "
            "the workers"
        )
    if _agreed_value(store, "run_id", _proof(endpoint, "run"), rank, where) != _proof(endpoint, "run"):
        raise ClusterError(
            f"rank {rank} has another run id than the group {where}: another group uses that "
            "address. Fix: give every group its own rank 0"
        )
    agreed, _, proven = _agreed_value(
        store, "world_size", f"{world_size} {_proof(endpoint, 'size', world_size)}", rank, where
    ).partition(" ")
    if agreed != str(world_size):
        raise ClusterError(
            f"rank {rank} has WORLD_SIZE = {world_size}, the group {where} has WORLD_SIZE = "
            f"{agreed}: they must be equal. Fix: start every rank with the same world size"
        )
    if proven != _proof(endpoint, "size", world_size):
        raise ClusterError(
            f"the world size of the group {where} was not set by its rank 0. Fix: find out who "
            "else reaches that port"
        )
    # ``add`` is atomic, so only the first of two processes with the same rank gets 1.
    if store.add(f"rank_{rank}", 1) > 1:
        raise ClusterError(
            f"rank {rank} {where} is taken: two processes have the same RANK. Fix: give every "
            "process its own rank"
        )
    store.set(f"proof_{rank}", _proof(endpoint, "rank", rank))


def _check_proofs(store: Store, endpoint: Endpoint, world_size: int) -> None:
    """Verify on rank 0 that all other ranks belong to the group. Waits for them, as the creation of the group
    would.

    Raises:
        ClusterError: a rank has no valid proof.
        DeadlineError: a rank did not connect.
    """
    import torch.distributed as dist

    where = f"at {endpoint.address}:{endpoint.port}"
    for rank in range(1, world_size):
        try:
            given = store.get(f"proof_{rank}").decode(errors="replace")
        except dist.DistError as error:
            raise DeadlineError(
                f"rendezvous {where} failed: rank {rank} did not connect ({error}). Fix: see why it stopped"
            ) from error
        # Compare in constant time, so that the duration does not reveal how much of a guess is correct.
        if not hmac.compare_digest(given.encode(), _proof(endpoint, "rank", rank).encode()):
            raise ClusterError(
                f"the process that connected as rank {rank} {where} does not prove that it belongs "
                "to this group. Fix: find out who reaches that port"
            )


def _proof(endpoint: Endpoint, purpose: str, number: int = 0) -> str:
    return proof(purpose, str(number), secret=endpoint.run_id)


def _agreed_value(store: Store, key: str, own: str, rank: int, where: str) -> str:
    """Return the value of ``key`` that rank 0 wrote. Rank 0 writes ``own``; all other ranks wait for it."""
    import torch.distributed as dist

    try:
        # compare_set does not overwrite a value that another process wrote first. Rank 0 then gets that value
        # and detects the difference.
        return (store.compare_set(key, "", own) if rank == 0 else store.get(key)).decode()
    except dist.DistError as error:
        raise DeadlineError(
            f"rendezvous of rank {rank} {where} failed: rank 0 did not send its {key} ({error}). "
            "Fix: see why rank 0 stopped"
        ) from error


def _keep_gloo_on_loopback(address: str) -> None:
    """Make gloo use the loopback interface if the group connects there. Otherwise it would use the interface
    of the host name."""
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(address).is_loopback or env.text("GLOO_SOCKET_IFNAME"):
            return
        for _, interface in socket.if_nameindex():
            if interface in {"lo", "lo0"}:
                env.set_variables({"GLOO_SOCKET_IFNAME": interface})
                return


def compare_collectives() -> None:
    """Make every process group that is created later compare each collective across its ranks before it
    starts. Call this on all ranks.

    Operation, shape, dtype and the number of earlier collectives are compared. If they differ, all ranks
    raise a RuntimeError that lists each rank's call. This is the debug level DETAIL of ``torch.distributed``.
    It does not compare sends and receives between two ranks.
    """
    import torch.distributed as dist

    dist.set_debug_level(dist.DebugLevel.DETAIL)


def set_group_timeouts(seconds: float) -> None:
    """Set the collective timeout of all process groups of this process, in seconds.

    A group that was created without a timeout, as in Megatron-Core and in device meshes, has 10 minutes with
    NCCL and 30 with gloo.
    """
    from torch.distributed import distributed_c10d

    timeout = datetime.timedelta(seconds=seconds)
    # torch has no public function that changes the timeout of an existing group, and Megatron-Core creates
    # groups itself.
    for group in list(distributed_c10d._world.pg_map):
        # One backend may serve several devices of its group; setting its timeout again does no harm.
        for device in group._device_types:
            backend = _innermost(group._get_backend(device))
            if backend:
                backend._set_default_timeout(timeout)


def _innermost(backend: Any) -> Any | None:
    """Return the backend inside the wrapper of ``compare_collectives``, if there is one; None if the backend
    has no timeout."""
    inner = getattr(backend, "wrapped_pg", backend)
    return inner if hasattr(inner, "_set_default_timeout") else None
