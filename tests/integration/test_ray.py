"""`torchtune-ext ray` on a real Ray cluster: two raylets on this machine, each of which stands for a machine."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import torchtune_ext
from helpers import recipe_runs as runs
from helpers.ray_cluster import RayCluster
from helpers.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
# On the command line of every process of a run; Ray's own workers, which wait for the next one, have none of it.
OURS = ("torchtune_ext", "vllm", "EngineCore", "VLLM")
ASKED = ["--train-cpus", "1", "--engine-cpus", "1"]
ENDLESS = ["max_steps=4000", "checkpoints={every: 1, stop_grace_s: 2}"]


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two machines with a core each, so that a trainer and its server do not share one. They have different
    addresses, so that the weights of all these runs travel over gloo."""
    cluster = RayCluster()
    try:
        cluster.raylets = [cluster.add("CPU"), cluster.add("CPU")]
        yield cluster
    finally:
        processes = cluster.processes()
        cluster.close()
        assert psutil.wait_procs(processes, timeout=20)[1] == []


def words(cluster, *more, config="run.yaml"):
    command = [sys.executable, "-m", "torchtune_ext", "ray", "--config", config, "--recipe", "grpo_full"]
    return [*command, "--address", cluster.address, *more]


def environment():
    return {name: value for name, value in runs.environment().items() if name != "RAY_ADDRESS"}


def ray(folder, cluster, *more):
    """Runs the command to its end, and returns its status and what it said."""
    done = subprocess.run(
        words(cluster, *more), cwd=folder, env=environment(), capture_output=True, text=True, timeout=500
    )
    return done.returncode, done.stdout + done.stderr


def command_of(process, words=None):
    """What a process was started with, or the first words of it; "" once it has ended."""
    try:
        return " ".join(process.cmdline()[:words])
    except psutil.NoSuchProcess:
        return ""


def of_runs(cluster):
    """The processes of runs on the cluster."""
    return [each for each in cluster.processes() if any(word in command_of(each) for word in OURS)]


def fds(process):
    """What the descriptors of a process are."""
    targets = []
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            targets.append(os.readlink(each))
    return targets


class Started:
    """The command in the background, once its run has made some steps."""

    def __init__(self, folder, cluster, name, *more, steps=3):
        self.cluster, self.log, self.run_dir = cluster, folder / f"{name}.txt", folder / name
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                words(cluster, f"output_dir={name}", *ENDLESS, *more),
                cwd=folder,
                env=environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            runs.wait_for_steps(self.run_dir, steps, self.process)
        except BaseException:
            print(self.log.read_text())
            self.end()
            raise
        self.began = [psutil.Process(self.process.pid), *of_runs(cluster)]

    def one(self, words):
        """The process of the run with the words on its command line."""
        matches = [each for each in self.began if words in command_of(each, 5)]
        assert len(matches) == 1, [command_of(each) for each in self.began]
        return matches[0]

    def raylet_of(self, process):
        """The place in `cluster.raylets` of the raylet whose actor holds the other end of the pipe to a process's guard."""
        pipe = os.readlink(f"/proc/{process.ppid()}/fd/0")
        (actor,) = [each for each in self.cluster.processes() if each.name().startswith("ray::") and pipe in fds(each)]
        above = {each.pid for each in actor.parents()}
        (index,) = [i for i, pid in enumerate(self.cluster.raylets) if pid in above]
        return index

    def ended(self, within=240.0):
        """Waits for the end, and returns the status and what was said. Nothing is left of the run."""
        begin = time.monotonic()
        status = self.process.wait(within)
        left = psutil.wait_procs(self.began, timeout=max(1.0, within - (time.monotonic() - begin)))[1]
        assert not left, [command_of(each) for each in left]
        return status, self.log.read_text()

    def end(self):
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not of_runs(self.cluster), 120.0)


@pytest.fixture
def started(full_workspace, cluster):
    """Makes a `Started`, which does not outlive its test."""
    instances = []

    def start(name, *more, **settings):
        instances.append(Started(full_workspace, cluster, name, *more, **settings))
        return instances[-1]

    yield start
    for each in instances:
        if each.process.poll() is None:
            each.end()


def newest(run_dir):
    return sorted((run_dir / "checkpoints").glob("step_*"))[-1]


def require_same(one, other):
    want, result = (load_file(newest(each) / "model-00001-of-00001.safetensors") for each in (one, other))
    assert newest(one).name == newest(other).name and want.keys() == result.keys()
    assert all(torch.equal(want[name], result[name]) for name in want)
    assert runs.metrics(one) == runs.metrics(other)


@pytest.mark.rest
def test_ray_command_weights_equal_run_without_ray(full_workspace, cluster):
    status, text = ray(full_workspace, cluster, "--train-cpus", "1", "--engine-cpus", "1", "output_dir=placed")
    assert status == 0, text
    assert f"ray:       {cluster.address}, 2 cores on 2 machines" in text
    assert re.search(r"server 0:  http://127\.0\.0\.[23]:\d+ on 127\.0\.0\.[23], its log there: .*\.out\n", text), text
    assert "done:      3 of 3 steps" in text and text.count("engine:    ready after") == 1
    assert not of_runs(cluster)
    require_same(full_workspace / "reference", full_workspace / "placed")
    assert "test_ray" not in (log := Path(re.search(r"its log there: (\S+)", text)[1]).read_text()) and "vLLM" in log


@pytest.mark.rest
def test_ray_trainer_raylet_killed_run_ends_with_checkpoint(cluster, started):
    run = started("lost", *ASKED)
    index = run.raylet_of(run.one("-m torchtune_ext run"))
    os.kill(cluster.raylets[index], signal.SIGKILL)
    status, text = run.ended()
    cluster.lose(cluster.raylets[index])
    cluster.raylets[index] = cluster.add("CPU")
    assert status == 1 and "Traceback" not in text, text
    assert re.search(r"error: the trainer on \S+ crashed: ", text), text
    kept = newest(run.run_dir)
    assert f"The newest checkpoint is lost/checkpoints/{kept.name}; resume from it with resume_from_checkpoint" in text
    load_file(kept / "model-00001-of-00001.safetensors")


def test_ray_cluster_without_gpus_reports_available_resources(full_workspace, cluster):
    began_at = time.monotonic()
    status, text = ray(
        full_workspace, cluster, "--train-gpus", "8", "--engine-gpus", "8", "--wait", "2", "output_dir=nowhere"
    )
    assert status == 2 and time.monotonic() < began_at + 60, text
    assert (
        "error: --train-gpus 8 --engine-gpus 8: 8, 1, 1, 1, 1, 1, 1, 1, 1 GPUs (each number on one machine) were not free within 2 s"
        in text
    )
    assert "has 0 GPUs on 0 machines; 0 are free. Request less" in text and not (full_workspace / "nowhere").exists()


@pytest.mark.long
def test_ray_server_raylet_killed_run_ends_and_resumes(full_workspace, cluster, started):
    run = started("served", *ASKED)
    index = run.raylet_of(run.one("-m vllm"))
    assert index != run.raylet_of(run.one("-m torchtune_ext run"))
    os.kill(cluster.raylets[index], signal.SIGKILL)
    status, text = run.ended()
    cluster.lose(cluster.raylets[index])
    cluster.raylets[index] = cluster.add("CPU")
    assert status == 1 and "Traceback" not in text, text
    assert re.search(r"error: server 0 on \S+ crashed: ", text), text
    step = int(newest(run.run_dir).name.removeprefix("step_"))
    status, text = ray(
        full_workspace, cluster, *ASKED, "output_dir=served", f"max_steps={step + 1}", "resume_from_checkpoint=True"
    )
    assert status == 0 and f"done:      {step + 1} of {step + 1} steps" in text, text


@pytest.mark.long
def test_ray_server_killed_run_ends_with_its_log(started):
    run = started("bereft", *ASKED)
    run.one("-m vllm").kill()
    status, text = run.ended()
    assert status == 1 and "Traceback" not in text.partition("its last output")[0], text
    assert re.search(r"error: server 0 on \S+ ended with status 137; its last output:\n", text), text
    assert "SIGTERM: the run stops after this step" in text and "with resume_from_checkpoint" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "name", "status"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_ray_signal_stops_trainer_and_all_processes(started, number, name, status):
    run = started(f"told_{status}", *ASKED)
    run.process.send_signal(number)
    code, text = run.ended()
    assert code == status and "Traceback" not in text and "error:" not in text, text
    assert f"Stopped by {name}. The run was at step " in text and "The newest checkpoint is" in text, text


@pytest.mark.long
def test_ray_command_killed_leaves_no_processes_saves_step(started):
    run = started("orphan", *ASKED, "checkpoints.stop_grace_s=30")
    run.process.kill()
    run.ended()
    lines = runs.metrics(run.run_dir)
    assert newest(run.run_dir).name == f"step_{lines[-1]['step']:06d}"


@pytest.mark.long
def test_ray_server_early_exit_ends_run_at_once(full_workspace, cluster):
    raylet = cluster.add("CPU")
    options = ["--train-cpus", "1", "--engine-cpus", "2", *ENDLESS, "output_dir=begun"]
    out = (full_workspace / "begun.txt").open("w+")
    run = subprocess.Popen(words(cluster, *options), cwd=full_workspace, env=environment(), stdout=out, stderr=out)
    try:
        processes = []

        def serves():
            processes[:] = [each for each in of_runs(cluster) if "-m vllm" in command_of(each, 5)]
            return processes

        wait_until(serves, 100.0)
        processes[0].kill()
        assert run.wait(60) == 1
        out.seek(0)
        text = out.read()
        assert re.search(r"error: server [01] on \S+ ended with status 137", text), text
    finally:
        run.kill()
        run.wait()
        out.close()
        cluster.lose(raylet)
        wait_until(lambda: not of_runs(cluster), 60.0)


@pytest.mark.long
def test_ray_cores_in_use_are_reported(full_workspace, cluster):
    code = f"""
import ray, time
ray.init({cluster.address!r}, log_to_driver=False)
group = ray.util.placement_group([{{"CPU": 1}}])
assert group.wait(60)
print("taken", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert "taken\n" in iter(other.stdout.readline, "")
            status, text = ray(full_workspace, cluster, *ASKED, "--wait", "2", "output_dir=nowhere")
        finally:
            other.kill()
    assert (
        status == 2
        and "--train-cpus 1 --engine-cpus 1: 1, 1 cores (each number on one machine) were not free within 2 s." in text
    ), text
    assert "2 cores on 2 machines" in text and "of which 1 are free" in text, text


@pytest.mark.long
def test_ray_version_differences_are_reported(full_workspace, cluster, tmp_path, monkeypatch):
    code = f"import sys, ray; ray.__version__ = '2.52.0'; sys.argv[0] = 'torchtune-ext'; from torchtune_ext.cli.cli import main; sys.exit(main({words(cluster, *ASKED, 'output_dir=mixed')[3:]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=full_workspace, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "Ray: 2.52.0" in done.stderr and "Ray: 2.6" in done.stderr, done.stderr
    package = Path(torchtune_ext.__file__).parent
    copy = shutil.copytree(package, tmp_path / "torchtune_ext", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__init__.py").write_text('__version__ = "0.0.9"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, text = ray(full_workspace, cluster, *ASKED, "output_dir=mixed")
    versions = rf"torchtune_ext {re.escape(torchtune_ext.__version__)} is installed there, but 0\.0\.9 here"
    assert status == 2 and re.search(rf"the trainer on \S+: {versions}; all machines", text), text
    assert not of_runs(cluster)
