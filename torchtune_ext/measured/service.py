"""The benchmark service as the settings `bench:` of a task describe it, and what its results mean as scores."""

from collections.abc import Sequence
from dataclasses import asdict

from torchtune_ext.measured.bench import Bench
from torchtune_ext.measured.cache import Cache
from torchtune_ext.measured.check import OUTCOMES, Checker
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.machine import choose_cores
from torchtune_ext.measured.ray_bench import RayBench
from torchtune_ext.measured.results import BenchConfig, Result
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.tasks.task import Score


def open_bench(config: BenchConfig) -> Bench | RayBench:
    """Starts the service on this machine, or, if `config.address` is given, on the machines of a Ray cluster.

    Raises:
        ValueError, SandboxError, BenchError: as `Bench` and `RayBench` say.
    """
    settings = asdict(config)
    address, resource = settings.pop("address"), settings.pop("resource")
    return Bench(**settings) if address is None else RayBench(address, resource, **settings)


def rehearse(config: BenchConfig, kernels: Sequence[Kernel]) -> None:
    """Finds out in a second what would else go wrong when the engine has started, or at the first sample: no compiler, cores
    that are not there, a cache that cannot be written, a machine that cannot lock programs in, a kernel whose own program does
    not compile, fit the memory or end in time.

    Where a Ray cluster measures, its machines find that out themselves.

    Raises:
        ValueError, SandboxError: as `choose_cores`, `Cache` and `Checker` say.
    """
    if config.address is None:
        choose_cores(None if config.cores is None else list(config.cores), config.threads)
        compiler = Compiler.find(config.compiler)
        settings = (compiler, config.optimization, config.threads, None, config.namespaces, config.sandbox)
        Cache(config.cache).close()
        for kernel in kernels:
            try:
                Checker(kernel, *settings).close()
            except (SandboxError, ValueError) as error:
                size = " ".join(f"{name}={value}" for name, value in kernel.timed.items())
                # A kernel of the user's may raise a kind of ValueError that cannot be made of a text.
                kind = SandboxError if isinstance(error, SandboxError) else ValueError
                raise kind(f"{kernel.name} with {size} cannot be measured here: {error}") from error


def score(result: Result, reward: float) -> Score:
    """Returns the score of a program: its note says to people what the machine said, its parts are numbers.

    Args:
        result: what became of the program. It is not NOISY: that is no grade.
        reward: what that is worth.

    Returns:
        A score with the parts `outcome_*`, 1 for its outcome and 0 for the others, and, if its speed is known, `gflops`,
        `speedup` (times the naive program), `peak_share`, `spread` and `speedup_spread` (half of the 95% intervals of the time
        and of the speed-up, as shares). Its facts are the machine and the techniques.
    """
    parts = {f"outcome_{name}": float(result.outcome == name) for name in OUTCOMES}
    if (timing := result.timing) is not None:
        speeds = {"gflops": timing.gflops, "speedup": timing.ratio, "peak_share": timing.peak_share}
        parts |= speeds | {"spread": timing.spread, "speedup_spread": timing.ratio_spread}
    return Score(reward, parts, result.note, {"machine": result.fingerprint, "techniques": ",".join(result.techniques)})
