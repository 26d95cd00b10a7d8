"""What the service knows of a program that it has not yet measured."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from torchtune_ext.measured.kernel import Kernel


@dataclass(eq=False, slots=True)
class Job:
    """One program, and all who wait for its result."""

    key: str
    kernel_name: str
    kernel_key: str
    kernel: bytes
    text: str
    permitted: tuple[str, ...] | None
    futures: list[Future]
    library: bytes = b""
    techniques: tuple[str, ...] = ()
    attempts: int = 0
    has_begun: bool = False
    is_timed_again: bool = False  # its timing was disturbed, and is made once more
    seconds: dict[str, float] = field(default_factory=dict)

    def begin(self) -> bool:
        """Marks it as begun: from now on it cannot be canceled. Returns False if everybody has canceled it before."""
        if not self.has_begun:
            self.futures = [future for future in self.futures if future.set_running_or_notify_cancel()]
            self.has_begun = bool(self.futures)
        return self.has_begun


def kernel_key(kernel: Kernel) -> str:
    """Returns a name that tells kernels, and their timed sizes, apart."""
    kind = type(kernel)
    return f"{kind.__module__}.{kind.__qualname__} {kernel.name} {dict(kernel.timed)}"
