"""The benchmark service on a real Ray cluster: two raylets on this machine, each of which stands for a machine."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import wait as wait_for_all
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from helpers.waiting import wait_until

pytest.importorskip("tree_sitter_c")

import torchtune_ext
from helpers.ray_cluster import RayCluster
from torchtune_ext.measured.bench import Bench
from torchtune_ext.measured.check import Deadlines
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.machine import machine_fingerprint
from torchtune_ext.measured.ray_bench import RayBench
from torchtune_ext.measured.results import BenchError
from torchtune_ext.measured.sandbox import Sandbox, SandboxError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

KERNEL = Dgemm(64)
NAIVE = KERNEL.naive
PROGRAMS = {
    "right": NAIVE,
    "wrong": NAIVE.replace("+=", "-="),
    "crashes": NAIVE.replace("{", "{ __builtin_trap();", 1),
    "hangs": NAIVE.replace("{", "{ for (volatile int i = 0; ; i++);", 1),
    "does not compile": NAIVE.replace("void", "vodi", 1),
    "is forbidden": "#include <unistd.h>\n" + NAIVE.replace("{", "{ fork();", 1),
}
TEXTS = [f"```c\n{source}// {i}\n```" for i in range(2) for source in PROGRAMS.values()] + ["no program at all"]
SETTINGS = {"workers": 1, "budget_s": 0.5, "deadlines": Deadlines(verify_s=2.0)}
END_S = 200.0  # seconds that any of it may take on a busy machine


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two machines that measure. Nothing of it is left afterwards."""
    try:
        Sandbox(shutil.which("gcc")).close()
    except SandboxError as error:
        pytest.skip(str(error))
    cluster = RayCluster()
    try:
        cluster.raylets = [cluster.add("bench_host"), cluster.add("bench_host")]
        yield cluster
    finally:
        processes = cluster.processes()
        cluster.close()
        assert psutil.wait_procs(processes, timeout=20)[1] == []
        assert not Path(cluster.folder).exists()


@pytest.fixture(scope="module")
def local_outcomes():
    """What the service of this machine says. Noise is no property of a program."""
    with Bench(**SETTINGS) as bench:
        futures = [bench.submit(KERNEL, text) for text in TEXTS]
        return outcomes(futures)


def outcomes(futures):
    assert not wait_for_all(futures, timeout=END_S).not_done
    return [future.result().outcome.replace("noisy", "ok") for future in futures]


def hosts(cluster):
    """The actors that live now."""
    return [each for each in cluster.processes() if "ray::BenchActor" in " ".join(each.cmdline())]


@pytest.mark.rest
def test_outcomes_are_those_of_this_machine(cluster, local_outcomes):
    assert {"ok", "wrong_result", "runtime_error", "timeout", "compile_error", "forbidden", "format"} <= set(
        local_outcomes
    )
    before = {each.pid for each in cluster.processes()}
    with RayBench(cluster.address, **SETTINGS) as bench:
        wait_until(lambda: len(hosts(cluster)) == 2, END_S)
        futures = [bench.submit(KERNEL, text) for text in TEXTS]
        assert outcomes(futures) == local_outcomes
        # What is decided before anything runs has a fingerprint, too.
        assert {future.result().fingerprint for future in futures} == {f"{machine_fingerprint()}, -O3"}
        started = [each for each in cluster.processes() if each.pid not in before]
    assert psutil.wait_procs(started, timeout=20)[1] == []
    with pytest.raises(BenchError, match="closed"):
        bench.submit(KERNEL, TEXTS[0])


@pytest.mark.rest
def test_ray_bench_machine_killed_keeps_all_results(cluster, local_outcomes, caplog):
    caplog.set_level(logging.INFO)
    with RayBench(cluster.address, **SETTINGS) as bench:
        assert caplog.text.count(" measures: ") == 2
        futures = [bench.submit(KERNEL, text) for text in TEXTS]
        # Each machine has work for seconds: programs that hang, for two seconds each.
        wait_until(lambda: futures[0].done() or futures[1].done(), END_S)
        os.kill(cluster.raylets.pop(), signal.SIGKILL)
        assert outcomes(futures) == local_outcomes
        wait_until(lambda: "does not measure any more: " in caplog.text, END_S)


@pytest.mark.rest
def test_ray_bench_process_killed_service_and_actors_end(cluster):
    with RayBench(cluster.address, **SETTINGS) as bench:
        wait_until(lambda: hosts(cluster), END_S)
        actors = hosts(cluster)
        future = bench.submit(KERNEL, f"```c\n{PROGRAMS['hangs']}\n```")
        (process,) = [each for each in psutil.Process().children() if "ray_process" in " ".join(each.cmdline())]
        process.kill()
        with pytest.raises(BenchError, match="Ray's process was killed by SIGKILL"):
            future.result(END_S)
        with pytest.raises(BenchError, match="Ray's process was killed by SIGKILL"):
            bench.submit(KERNEL, TEXTS[0]).result(END_S)
    assert psutil.wait_procs(actors, timeout=20)[1] == []


@pytest.mark.rest
def test_ray_bench_actors_end_with_killed_driver(cluster):
    before = {each.pid for each in cluster.processes()}
    code = f"""
import time
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.ray_bench import RayBench
bench = RayBench({cluster.address!r}, workers=1)
futures = [bench.submit(Dgemm(64), Dgemm.naive + str(i)) for i in range(100)]
print("begun", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout.readline() == "begun\n"
            started = [each for each in cluster.processes() if each.pid not in before]
            started += psutil.Process(driver.pid).children(recursive=True)
            assert any("ray::BenchActor" in " ".join(each.cmdline()) for each in started)
        finally:
            driver.kill()
    assert psutil.wait_procs(started, timeout=20)[1] == []


def test_ray_bench_other_package_version_refused_by_name(cluster, tmp_path):
    package = Path(torchtune_ext.__file__).parent
    copy = shutil.copytree(package, tmp_path / "torchtune_ext", ignore=shutil.ignore_patterns("__pycache__"))
    with open(copy / "measured" / "verify.py", "a", encoding="utf-8") as file:
        file.write("\n# Another version.\n")
    code = f"from torchtune_ext.measured.ray_bench import RayBench; RayBench({cluster.address!r})"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=END_S)
    assert re.search(
        r"BenchError: no machine can measure: .*torchtune_ext .* is installed there, but .* here", ended.stderr
    )


def test_ray_bench_machine_error_includes_its_name(cluster):
    with pytest.raises(BenchError, match=r"no machine can measure: .*\) does not measure: .*4711"):
        RayBench(cluster.address, cores=[4711])
