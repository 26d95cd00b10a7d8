"""Publications while the engine samples, and with the engine killed in their midst: benchmarks/publish_under_load.py in a
moderate size. In full: `python benchmarks/publish_under_load.py --publications 200 --requests 5000`."""

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("publications", "requests", "kills"), [(40, 600, 0), (12, 600, 2)])
def test_no_mixed_weights_no_invented_preemptions(repo_root, publications, requests, kills):
    """Every load has the checksums of the version that labels it, and every restart belongs to a kill."""
    script = str(repo_root / "benchmarks" / "publish_under_load.py")
    size = ["--publications", str(publications), "--requests", str(requests), "--kills", str(kills)]
    done = subprocess.run([sys.executable, script, *size], capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    table = dict(row for row in rows if len(row) == 2)
    assert table["mixed loads"] == "0" and table["preemptions counted"] == "0"
    assert table["restarts"] == str(kills) and int(table["loads whose checksums were compared"]) >= publications
    assert "WRONG" not in done.stdout
