"""The machine that a run is planned for: asked for by a name, or this one."""

import pytest
from tables import every_row

from torchtune_ext.host.dry_run import asked_machine, main_memory, this_machine
from torchtune_ext.policy.memory import GIB


@pytest.mark.parametrize("text", ["4x80", "4 x 80 GB", "4X80gb", "4 x 80"])
def test_a_machine_is_asked_for(text):
    machine = asked_machine(text)
    assert machine.gpus == 4 and not machine.here and machine.host_bytes is None
    assert 78 < machine.gpu_bytes / GIB < 80  # a card that is sold as 80 GB has a little less than 80 GiB
    assert str(machine) == "4 x 80 GB (78.8 GiB each)"


def test_a_cpu_is_asked_for():
    machine = asked_machine("CPU, 4 GB")
    assert machine.gpus == 0 and machine.host_bytes == 4 * GIB


@pytest.mark.parametrize("text", ["2x8x80", "2 x 8 x 80 GB", "2 nodes of 8 x 80 GB", "2 NODES of 8x80"])
def test_two_nodes_are_asked_for(text):
    machine = asked_machine(text)
    assert (machine.nodes, machine.gpus, machine.serving) == (2, 8, None)
    assert str(machine) == "2 nodes of 8 x 80 GB (78.8 GiB each)"


@pytest.mark.parametrize("text", ["8x80+2x4x40", "8 x 80 GB + 2 nodes of 4 x 40 GB that serve"])
def test_gpus_that_serve_elsewhere_are_asked_for(text):
    machine = asked_machine(text)
    assert (machine.nodes, machine.gpus, machine.serving) == (1, 8, asked_machine("2x4x40"))
    assert machine.name == "8 x 80 GB + 2 nodes of 4 x 40 GB that serve"


@every_row("text", ["yes", "4", 4, "80x", "x80", "0x80", "4x0", "4x80x2", "-1x80", [4, 80], "8x80+", "+8x80", "8x80+8x80+8x80",
                    "8x80+CPU 8", "CPU 8+8x80", "0x8x80", "2 nodes"])  # fmt: skip
def test_what_is_no_machine_or_half_a_one_is_refused_by_its_name(text):
    with pytest.raises(ValueError, match="dry_run=.* is neither True nor a machine: 4x80 asks for 4 GPUs of 80 GB"):
        asked_machine(text)


def test_main_memory_is_what_is_free_within_the_limits_of_cgroups(tmp_path):
    proc, groups = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup"
    proc.mkdir(parents=True)
    (groups / "a/b").mkdir(parents=True)
    free = main_memory(tmp_path)
    assert free > 6000
    (proc / "cgroup").write_text("0::/a/b\n")
    (groups / "a/b/memory.max").write_text("max\n")
    assert main_memory(tmp_path) > 6000
    (groups / "a/memory.max").write_text("5000\n")
    assert main_memory(tmp_path) == 5000
    # In a container the path of the host is not there.
    (proc / "cgroup").write_text("0::/docker/123\n")
    (groups / "memory.max").write_text("6000\n")
    assert main_memory(tmp_path) == 6000


def test_this_machine_has_main_memory():
    machine = this_machine("cpu")
    assert machine.here and machine.gpus == 0 and machine.host_bytes > GIB // 4
