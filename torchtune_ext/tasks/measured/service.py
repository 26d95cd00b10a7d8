"""The benchmark service as a recipe's node `bench:` describes it, and what its results mean as scores."""

from dataclasses import asdict

from torchtune_ext.tasks.measured.bench import Bench
from torchtune_ext.tasks.measured.check import OUTCOMES
from torchtune_ext.tasks.measured.ray_bench import RayBench
from torchtune_ext.tasks.measured.results import NOISY, BenchConfig, Result
from torchtune_ext.tasks.task import Score


def open_bench(config: BenchConfig) -> Bench | RayBench:
    """Starts the service on this machine, or, if `config.address` is given, on the machines of a Ray cluster.

    Raises:
        ValueError, SandboxError, BenchError: as `Bench` and `RayBench` say.
    """
    settings = asdict(config)
    address, resource = settings.pop("address"), settings.pop("resource")
    return Bench(**settings) if address is None else RayBench(address, resource, **settings)


def score(result: Result, reward: float) -> Score:
    """Returns the score of a program: its note says to people what the machine said, its parts are numbers.

    Args:
        result: what became of the program.
        reward: what that is worth.

    Returns:
        A score with the parts `outcome_*`, 1 for its outcome and 0 for the others, and, if its speed is known, `gflops`,
        `speedup` (times the naive program), `peak_share` and `spread` (half of the 95% interval, as a share).
    """
    parts = {f"outcome_{name}": float(result.outcome == name) for name in (*OUTCOMES, NOISY)}
    if (timing := result.timing) is not None:
        speeds = {"gflops": timing.gflops, "speedup": timing.ratio, "peak_share": timing.peak_share}
        parts |= speeds | {"spread": timing.spread}
    return Score(reward, parts, result.note)
