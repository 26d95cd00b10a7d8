"""The planned machine: parsed from a text, or this machine."""

import pytest

from torchtune_ext.policy.memory import GIB
from torchtune_ext.setup.dry_run import main_memory, parse_machine, this_machine


@pytest.mark.parametrize("text", ["4x80", "4 x 80 GB", "4X80gb", "4 x 80"])
def test_plan_machine_parses_gpu_description(text):
    machine = parse_machine(text)
    assert machine.gpus == 4 and not machine.is_local and machine.host_bytes is None
    assert 78 < machine.gpu_bytes / GIB < 80  # an 80 GB GPU has slightly less than 80 GiB
    assert str(machine) == "4 x 80 GB (78.8 GiB each)"


def test_plan_machine_parses_cpu_description():
    machine = parse_machine("CPU, 4 GB")
    assert machine.gpus == 0 and machine.host_bytes == 4 * GIB


@pytest.mark.parametrize("text", ["yes", "4", 4, "80x", "x80", "0x80", "4x0", "4x80x2", "-1x80", [4, 80], "8x80+4x80", "2x8x80", "2 nodes"])  # fmt: skip
def test_plan_machine_invalid_text_is_refused_by_value(text):
    with pytest.raises(ValueError, match="dry_run=.* 4x80 "):
        parse_machine(text)


def test_main_memory_is_free_memory_within_container_limit(tmp_path):
    limit = tmp_path / "memory.max"
    assert main_memory(limit) > 6000
    limit.write_text("max\n")
    assert main_memory(limit) > 6000
    limit.write_text("5000\n")
    assert main_memory(limit) == 5000


def test_this_machine_has_main_memory():
    machine = this_machine("cpu")
    assert machine.is_local and machine.gpus == 0 and machine.host_bytes > GIB // 4
