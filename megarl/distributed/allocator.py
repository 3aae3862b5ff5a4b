"""Settings of torch's CUDA allocator: those in the environment, and those that megarl adds."""

from __future__ import annotations

from dataclasses import dataclass

from megarl import env

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch reads, the newer name first. The older one is ignored if the newer one is
set."""
_EXPANDABLE = "expandable_segments"
# torch can allocate page-locked memory on several threads only with malloc and cudaHostRegister.
# cudaHostAlloc uses a single thread.
_PINNING = {"pinned_use_cuda_host_register": "True", "pinned_num_register_threads": "8"}


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """Options of torch's CUDA allocator.

    Attributes:
        variable: environment variable that contains the options.
        parts: the options as written, each ``name:value``.
    """

    variable: str
    parts: tuple[str, ...]

    @staticmethod
    def of_environment() -> AllocatorOptions:
        """Read the options from this process's environment; there are none if neither variable is set."""
        # If neither is set, use the older name, because older torch versions read only that one.
        variable = next((name for name in VARIABLES if env.text(name)), VARIABLES[-1])
        parts = map(str.strip, (env.text(variable) or "").split(","))
        return AllocatorOptions(variable, tuple(filter(None, parts)))

    def __str__(self) -> str:
        """Return the options as the variable's value."""
        return ",".join(self.parts)

    @property
    def expandable(self) -> bool | None:
        """The option ``expandable_segments``; None if it is not set."""
        chosen = None
        for part in self.parts:
            # Go on after the first one, because torch uses the last of several settings.
            if _name(part) == _EXPANDABLE:
                chosen = part.partition(":")[2].strip().lower() == "true"
        return chosen

    def with_expandable(self, chosen: bool) -> AllocatorOptions:
        """Return the options with ``expandable_segments`` set to ``chosen``."""
        # Replace the option instead of appending it, so that a reader of the variable finds only one value.
        kept = tuple(part for part in self.parts if _name(part) != _EXPANDABLE)
        return AllocatorOptions(self.variable, (*kept, f"{_EXPANDABLE}:{chosen}"))

    def as_environment(self) -> dict[str, str]:
        """Return ``{variable: value}``."""
        return {self.variable: str(self)}


def _name(part: str) -> str:
    return part.partition(":")[0].strip()


def fast_pinning() -> dict[str, str]:
    """Return an environment variable that makes torch allocate page-locked memory on several threads. The
    first offload of a model has to wait for this allocation.

    On an H200 this gave 8.6 GB/s instead of 2.5. Options that the environment already sets are kept.
    """
    given = AllocatorOptions.of_environment()
    given_names = set(map(_name, given.parts))
    added = (f"{name}:{value}" for name, value in _PINNING.items() if name not in given_names)
    return AllocatorOptions(given.variable, (*given.parts, *added)).as_environment()
