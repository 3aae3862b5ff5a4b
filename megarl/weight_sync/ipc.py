"""Shared memory for colocated refits: allocated once, shared once by handle, and overwritten at every
refit.

It has two slots, so that the policy gathers one group of weights while the engine reads the other. On a CPU
the memory has no name in any file system (``memfd_create``, Linux only): another process of the same user
opens it through ``/proc``, and the kernel frees it when the last process that uses it is gone.

On a GPU the slots are device memory, shared by a CUDA handle. The handle is created only once per buffer,
because torch counts every created handle as a further reader to wait for, but only the first is ever opened.
It is sent as named numbers and bytes, and the reader rejects other types: nothing from the policy is
unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from megarl.distributed.allocator import AllocatorOptions
from megarl.errors import RefitError

# Bytes of a token after the weights, in the same mapping, with which a process checks that it has mapped the
# intended block.
_TOKEN_BYTES = 16
SLOTS = 2
PAGE = 4096


@functools.cache
def host_identity() -> str:
    """Return an identity that is equal for processes that can open each other's shared memory: the kernel's
    boot id and the PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class BlockHandle(TypedDict):
    """A block of shared memory of a process on this host, as plain types."""

    host: str
    process: int
    descriptor: int
    nbytes: int
    token: str


class BufferHandle(TypedDict):
    """An IPC buffer, as plain types. ``device`` is torch's handle of device memory, with the fields of
    ``_TRAVELS`` and ``nbytes``; None on a CPU."""

    memory: BlockHandle
    slot_bytes: int
    device: dict[str, Any] | None


class SharedBlock:
    """A block of shared memory. ``create`` allocates one; ``attach`` opens another process's.

    Attributes:
        bytes: uint8 [nbytes], the memory itself.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        # Never close the mapping explicitly: torch.frombuffer keeps it alive, but would not prevent it from
        # being closed under a tensor.
        self._map = mmap.mmap(descriptor, nbytes + _TOKEN_BYTES)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.bytes, self._token = whole[:nbytes], whole[nbytes:]

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """Allocate a block of zeros. A page takes memory only once it is written.

        Raises:
            RefitError: the system does not support such memory, or has too little.
        """
        if not hasattr(os, "memfd_create"):
            raise RefitError("shared memory without a file needs Linux: generate with the policy itself")
        # Memory without a name: a crash leaves nothing in /dev/shm, and no other user can open it.
        descriptor = os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes + _TOKEN_BYTES)
            block = cls(descriptor, nbytes)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise RefitError(
                f"no {nbytes} bytes of shared memory: {error}; set a smaller policy.refit_buffer_size_gb"
            ) from error
        # A bytearray, because torch.frombuffer warns about read-only memory.
        block._token.copy_(torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8))
        return block

    def handle(self) -> BlockHandle:
        """Return a handle of plain types with which another process can open the block."""
        return {
            "host": host_identity(),
            "process": os.getpid(),
            # Pass the descriptor's number: the handle is sent as JSON through the driver, and the reader
            # opens the memory through /proc.
            "descriptor": self._descriptor,
            "nbytes": self.bytes.numel(),
            "token": bytes(self._token.tolist()).hex(),
        }

    @classmethod
    def attach(cls, handle: BlockHandle) -> SharedBlock:
        """Open a block of this or another process.

        Raises:
            RefitError: the block is on another host, or gone.
        """
        if handle["host"] != host_identity():
            raise RefitError(
                "the weights are in the memory of another host or container: colocated engine and "
                "policy must share one"
            )
        path = f"/proc/{handle['process']}/fd/{handle['descriptor']}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RefitError(
                f"the policy's shared memory is gone ({path}: {error.strerror}): start a new refit"
            ) from error
        # Process ids and descriptors are reused, so this may be another file by now.
        if os.fstat(descriptor).st_size != handle["nbytes"] + _TOKEN_BYTES:
            os.close(descriptor)
            raise RefitError(f"{path} is not the policy's shared memory any more: start a new refit")
        try:
            block = cls(descriptor, handle["nbytes"])
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise RefitError(
                f"no room for {handle['nbytes']} bytes of the policy's shared memory in this "
                f"process: {error}; leave this process more memory, or set a smaller "
                "policy.refit_buffer_size_gb"
            ) from error
        # A later buffer of the same process may have the same descriptor and size, but not the same token.
        if bytes(block._token.tolist()).hex() != handle["token"]:
            block.close()
            raise RefitError(f"{path} is not the policy's shared memory any more: start a new refit")
        return block

    def close(self) -> None:
        """Release the block. Tensors that are views of it keep its memory alive."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class IpcBuffer:
    """A page of metadata and two slots for groups of weights. On a GPU the slots are device memory, and only
    the page is host memory.

    Attributes:
        slot_bytes: bytes of one slot.
        marks: int64 [``SLOTS``, 3]: session, refit id and index of the group in each slot; -1 while the slot
            is being written.
    """

    def __init__(
        self,
        slot_bytes: int,
        block: SharedBlock,
        data: torch.Tensor | None,
        device_handle: dict[str, Any] | None,
    ) -> None:
        self.slot_bytes, self._block, self._device_handle = slot_bytes, block, device_handle
        # Keep marks in host memory even for a GPU, so that a reader checks them without a kernel or a stream
        # synchronization.
        self.marks = block.bytes[: SLOTS * 24].view(torch.int64).view(SLOTS, 3)
        self._data = block.bytes[PAGE:] if data is None else data

    @classmethod
    def create(cls, slot_bytes: int, device: torch.device) -> IpcBuffer:
        """Allocate a buffer on the policy's side.

        Args:
            slot_bytes: minimum bytes of one slot; rounded up to a page.
            device: device of the weights; on a GPU the slots are on it too.

        Raises:
            RefitError: there is too little memory.
        """
        # Align both slots to pages, so that a view of any dtype is aligned.
        slot_bytes = -(-slot_bytes // PAGE) * PAGE
        if device.type != "cuda":
            return cls(slot_bytes, SharedBlock.create(PAGE + SLOTS * slot_bytes), None, None)
        try:
            data = _device_buffer(SLOTS * slot_bytes, device)
        except torch.OutOfMemoryError as error:
            raise RefitError(
                f"no {SLOTS * slot_bytes / 2**30:.3g} GiB on {device} for the transfer buffer of "
                "weights: set a smaller policy.refit_buffer_size_gb"
            ) from error
        return cls(slot_bytes, SharedBlock.create(PAGE), data, _device_handle(data))

    @classmethod
    def attach(cls, handle: BufferHandle, device: torch.device) -> IpcBuffer:
        """Open the buffer of a policy process.

        Raises:
            RefitError: the memory is gone, or the handle was not created by megarl.
        """
        data = None if handle["device"] is None else _device_memory(handle["device"], device)
        return cls(handle["slot_bytes"], SharedBlock.attach(handle["memory"]), data, None)

    def handle(self) -> BufferHandle:
        """Return a handle of plain types with which another process can open the buffer. It is the same on
        every call; on a GPU it contains torch's handle of the device memory."""
        return {"memory": self._block.handle(), "slot_bytes": self.slot_bytes, "device": self._device_handle}

    def slot(self, number: int) -> torch.Tensor:
        """Return a slot, uint8 [slot_bytes]."""
        return self._data[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def close(self) -> None:
        """Release the buffer. Other processes keep it until they close it too."""
        self._block.close()


# Fields of torch's handle that are sent, with their types; the others are the same for every buffer.
_TRAVELS: Mapping[str, type] = {
    "storage_handle": bytes,
    "storage_size_bytes": int,
    "storage_offset_bytes": int,
    "tensor_offset": int,
    "ref_counter_handle": bytes,
    "ref_counter_offset": int,
    "event_handle": bytes,
    "event_sync_required": bool,
}
_KNOWN: Mapping[str, Any] = {
    "tensor_cls": torch.Tensor,
    "tensor_stride": (1,),
    "storage_cls": torch.storage.TypedStorage,
    "dtype": torch.uint8,
    "requires_grad": False,
}
_EACH_SIDE = {"tensor_size", "storage_device"}


@contextlib.contextmanager
def _plain_segments() -> Iterator[None]:
    """Within the context, make torch's allocator use plain segments even if it is configured for expandable
    ones.

    CUDA handles only cover memory of ``cudaMalloc``. An expandable segment is shared through a file
    descriptor that the reader fetches from the policy's process, for which many containers lack the
    permissions.
    """
    options = AllocatorOptions.of_environment()
    if not options.expandable:
        yield
        return
    # Each call sets all options, so pass all of them.
    _set_allocator(str(options.with_expandable(False)))
    try:
        yield
    finally:
        _set_allocator(str(options))


def _set_allocator(options: str) -> None:
    # Newer torch has one setter for all accelerators and deprecates that of torch.cuda; both take the same
    # string.
    settings = (
        getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        or torch.cuda.memory._set_allocator_settings
    )
    settings(options)


def _device_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate device memory that another process can open, uint8 [nbytes]."""
    with _plain_segments():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _device_handle(data: torch.Tensor) -> dict[str, Any]:
    """Return the handle of device memory as numbers and bytes.

    Raises:
        RefitError: this version of torch describes device memory differently.
    """
    from torch.multiprocessing import reductions

    fields = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    # torch's signature is private and has changed before: reject an unknown field here instead of guessing
    # its value in another process.
    _check_fields(fields)
    # Call this once per buffer (see the module docstring): every call adds a reference count that must be
    # released.
    values = dict(zip(fields, reductions.reduce_tensor(data)[1], strict=True))
    other = [name for name, value in _KNOWN.items() if values[name] != value]
    wrong = [name for name, kind in _TRAVELS.items() if type(values[name]) is not kind]
    if other or wrong or values["tensor_size"] != data.shape:
        raise RefitError(
            f"torch {torch.__version__} describes {', '.join([*other, *wrong]) or 'tensor_size'} "
            "of shared device memory differently than megarl expects. Fix: install the torch of "
            "the constraints file, or generate with the policy itself"
        )
    return {"nbytes": data.numel(), **{name: values[name] for name in _TRAVELS}}


def _check_fields(fields: list[str]) -> None:
    known = {*_TRAVELS, *_KNOWN, *_EACH_SIDE}
    if set(fields) != known:
        raise RefitError(
            f"torch {torch.__version__} shares device memory with other fields than megarl "
            f"expects: {sorted(known ^ set(fields))}. Fix: install the torch of the constraints "
            "file, or generate with the policy itself"
        )


def _device_memory(handle: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Open device memory of another process, uint8 [nbytes], on this process's device.

    Raises:
        RefitError: the handle has other fields, or values of other types.
    """
    from torch.multiprocessing import reductions

    kinds = {**_TRAVELS, "nbytes": int}
    wrong = sorted(set(handle) ^ set(kinds)) or [
        name for name, kind in kinds.items() if type(handle[name]) is not kind
    ]
    if wrong:
        raise RefitError(
            f"the handle of the policy's device memory has other fields than megarl's: {', '.join(wrong)}. "
            "Fix: give engine and policy one "
            "version of megarl"
        )
    _check_fields(list(inspect.signature(reductions.rebuild_cuda_tensor).parameters))
    travelled = dict(handle)
    size = torch.Size([travelled.pop("nbytes")])
    # Use the reader's own index: CUDA_VISIBLE_DEVICES may number the same GPU differently there.
    return reductions.rebuild_cuda_tensor(
        **_KNOWN, **travelled, tensor_size=size, storage_device=device.index
    )
