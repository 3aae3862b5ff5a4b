"""Settings of torch's allocator on CUDA devices: those in the environment, and those that megarl adds."""

from __future__ import annotations

from dataclasses import dataclass

from megarl import env

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch reads; it ignores the older name, the second, if the newer one is set."""
_EXPANDABLE = "expandable_segments"
# torch maps pages on several threads only if it allocates with malloc and registers the memory
# (cudaHostRegister); cudaHostAlloc maps on a single thread.
_PINNING = {"pinned_use_cuda_host_register": "True", "pinned_num_register_threads": "8"}


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """Options of torch's allocator.

    Attributes:
        variable: environment variable that holds them.
        parts: each option as written, ``name:value``.
    """

    variable: str
    parts: tuple[str, ...]

    @staticmethod
    def of_environment() -> AllocatorOptions:
        """Read the settings that torch finds in this process's environment; if the older variable is not set,
        it adds none."""
        # If neither is set, use the older name: earlier versions of torch read only that one.
        variable = next((name for name in VARIABLES if env.text(name)), VARIABLES[-1])
        parts = map(str.strip, (env.text(variable) or "").split(","))
        return AllocatorOptions(variable, tuple(filter(None, parts)))

    def __str__(self) -> str:
        """Return the variable's value."""
        return ",".join(self.parts)

    @property
    def expandable(self) -> bool | None:
        """True if segments may grow, False if they may not; None if no setting decides."""
        chosen = None
        for part in self.parts:
            # Go on after the first one, because torch uses the last of several settings.
            if _name(part) == _EXPANDABLE:
                chosen = part.partition(":")[2].strip().lower() == "true"
        return chosen

    def with_expandable(self, chosen: bool) -> AllocatorOptions:
        """Return these options with the option that says whether segments may grow."""
        # Replace the option instead of appending it, so that both torch and a reader of the variable find one
        # value.
        kept = tuple(part for part in self.parts if _name(part) != _EXPANDABLE)
        return AllocatorOptions(self.variable, (*kept, f"{_EXPANDABLE}:{chosen}"))

    def as_environment(self) -> dict[str, str]:
        """Return the variable with its value."""
        return {self.variable: str(self)}


def _name(part: str) -> str:
    return part.partition(":")[0].strip()


def fast_pinning() -> dict[str, str]:
    """Return an environment in which torch allocates page-locked memory on several threads: the first offload
    of a model waits for it.

    On an H200 this gave 8.6 GB/s instead of 2.5. Allocator settings of this environment are kept.
    """
    given = AllocatorOptions.of_environment()
    given_names = set(map(_name, given.parts))
    added = (f"{name}:{value}" for name, value in _PINNING.items() if name not in given_names)
    return AllocatorOptions(given.variable, (*given.parts, *added)).as_environment()
