"""Memory that processes of one host share, without a name in any file system: the kernel frees it when the last of them is gone.

Linux alone has it (``memfd_create``). Another process opens it through ``/proc``, which the same user may do.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.errors import RefitError

_TOKEN_BYTES = 16


@functools.cache
def host_identity() -> str:
    """What processes have in common that can open one another's shared memory: the boot of the kernel and the process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class SharedBlock:
    """A block of shared memory; ``create`` makes one, ``attach`` opens another process's.

    Attributes:
        bytes: uint8 [nbytes], the memory itself.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, nbytes + _TOKEN_BYTES)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes, self._token = whole[:nbytes], whole[nbytes:]

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """Zeros, of which no page is taken before it is written.

        Raises:
            RefitError: the system has no such memory, or not as much.
        """
        if not hasattr(os, "memfd_create"):
            raise RefitError("shared memory without a file needs Linux: generate with the policy itself")
        descriptor = os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes + _TOKEN_BYTES)
            block = cls(descriptor, nbytes)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise RefitError(f"no {nbytes} bytes of shared memory: {error}; set a smaller policy.refit_buffer_size_gb") from error
        block._token.copy_(torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8))
        return block

    def handle(self) -> dict[str, Any]:
        """What ``attach`` needs, of plain types."""
        return {
            "host": host_identity(),
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "nbytes": self.bytes.numel(),
            "token": bytes(self._token.tolist()).hex(),
        }

    @classmethod
    def attach(cls, handle: Mapping[str, Any]) -> SharedBlock:
        """The block of another process, or of this one.

        Raises:
            RefitError: it is on another host, or is gone.
        """
        if handle["host"] != host_identity():
            raise RefitError("the weights are in the memory of another host or container: to be colocated, engine and policy need the same")
        path = f"/proc/{handle['process']}/fd/{handle['descriptor']}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RefitError(f"the policy's shared memory is gone ({path}: {error.strerror}): start a new refit") from error
        if os.fstat(descriptor).st_size != handle["nbytes"] + _TOKEN_BYTES:
            os.close(descriptor)
            raise RefitError(f"{path} is not the policy's shared memory any more: start a new refit")
        try:
            block = cls(descriptor, handle["nbytes"])
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise RefitError(
                f"no room for {handle['nbytes']} bytes of the policy's shared memory in this process: {error}; "
                "leave it more, or set a smaller policy.refit_buffer_size_gb"
            ) from error
        if bytes(block._token.tolist()).hex() != handle["token"]:
            block.close()
            raise RefitError(f"{path} is not the policy's shared memory any more: start a new refit")
        return block

    @property
    def closed(self) -> bool:
        """Whether it was let go of."""
        return self._descriptor < 0

    def lock(self, number: int) -> bool:
        """Take lock ``number``, unless another opening of the block has it. The kernel frees it with this one, however its process ends."""
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, number))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def is_locked(self, number: int) -> bool:
        """Whether another opening of the block has lock ``number``."""
        found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, number))
        return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Let go of it; tensors that look into it keep their pages."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _flock(kind: int, number: int) -> bytes:
    """``struct flock`` of one byte (fcntl(2)): type, whence, start, length, and a process, which has to be 0 for these locks."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)
