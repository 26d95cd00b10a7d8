"""Small tests of chaos.py: three faults on real runs, even drawing, and detection of differences."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch
from chaos_play import FAULTS, PHASES, draw
from chaos_run import STEPS, Round, differences, last_checkpoint, left_in, left_outside
from safetensors.torch import save_file

from torchtune_ext.pipeline.rollout_store import RolloutStore


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("faults", "options"),
    # Killed and signaled runs have their own tests (test_grpo_full.py, test_agents.py, test_stopping.py).
    [
        (["damage_flip"], []),
        pytest.param(["trainer_kill", "sigterm", "damage_flip"], [], marks=pytest.mark.long),
        pytest.param(["trainer_kill", "engine_kill", "grader_kill"], ["--agents"], marks=pytest.mark.long),
    ],
    ids=["damage", "three faults", "agents"],
)
def test_faults_are_survived(repo_root, tmp_path, faults, options):
    command = [
        sys.executable,
        str(repo_root / "tests" / "chaos" / "chaos.py"),
        "--rounds",
        str(len(faults)),
        "--seed",
        "293",
    ]
    command += [*options, "--out", str(tmp_path / "out"), "--table", str(tmp_path / "table.md"), "--faults", *faults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert {r["fault"]: r["problems"] for r in records} == {name: [] for name in faults}
    # Training lasts 0.05 s here, so on a slow machine the kill may come a phase later, but never earlier.
    for kill in [r for r in records if r["fault"] == "trainer_kill"]:
        phase, step = kill["hit"].split(", step ")
        assert kill["phase"] == "training"
        assert (int(step), PHASES.index(phase)) >= (kill["step"], PHASES.index("training"))
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    assert [row[1:3] for row in rows] == [["rounds", "passed"], *[["1", "1"]] * len(faults)]


def test_all_faults_and_phases_come_up_evenly():
    block = sum(fault.weight for fault in FAULTS)
    drawn = [draw(7, number) for number in range(1, 4 * block + 1)]
    assert (
        drawn
        == [draw(7, number) for number in range(1, 4 * block + 1)]
        != [draw(8, n) for n in range(1, 4 * block + 1)]
    )
    assert Counter(d.fault.name for d in drawn[block : 2 * block]) == {f.name: f.weight for f in FAULTS}
    assert len({d.fault.name for d in drawn[: len(FAULTS)]}) == len(FAULTS)
    for fault in FAULTS:
        phases = Counter(d.phase for d in drawn if d.fault is fault)
        assert max(phases.values()) - min(phases.get(p, 0) for p in fault.phases) <= 1, fault.name
    assert all(0 <= d.step <= STEPS for d in drawn)


def write_run(folder, metrics):
    """Write the compared files of an undisturbed run."""
    checkpoint = folder / "checkpoints" / f"step_{STEPS:06d}"
    checkpoint.mkdir(parents=True)
    save_file({"w": torch.arange(4.0)}, checkpoint / "model.safetensors")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    store = RolloutStore(folder, resume_step=1)
    for step in range(1, STEPS + 1):
        store.write(step, [])
    return folder


def test_chaos_diverged_run_is_detected(tmp_path):
    metrics = [{"step": step, "loss/total": 0.5, "time/total": 1.0} for step in range(STEPS + 1)]
    want = write_run(tmp_path / "want", metrics)
    same = write_run(tmp_path / "same", [{**line, "time/total": 2.0} for line in metrics])
    assert differences(same, want) == []

    save_file({"w": torch.tensor([0.0, 1.0, 2.0, 3.0000002])}, last_checkpoint(same) / "model.safetensors")
    (same / "metrics.jsonl").write_text((same / "metrics.jsonl").read_text().replace("0.5", "0.25", 1))
    (same / "rollouts" / "step_000002.jsonl.gz").write_bytes(b"other")
    (same / "rollouts" / "step_000003.jsonl.gz").unlink()
    wrong = differences(same, want)
    assert [text.split(" ")[0] for text in wrong] == ["weights", "metrics", "no", "rollouts"], wrong
    shutil.rmtree(last_checkpoint(same))
    assert "not found" in differences(same, want)[0]


def test_chaos_round_leftover_processes_found_and_ended(tmp_path):
    home = Round(tmp_path, tmp_path / "round")
    child = subprocess.Popen(["sleep", "60"], env={"CHAOS_MARK": home.mark})
    stranger = subprocess.Popen(["sleep", "60"])
    (home.temp / "tte-1").mkdir()
    (home.output_dir / "checkpoints" / ".partial_000001").mkdir(parents=True)
    try:
        assert [p.pid for p in home.left_running(patience_s=0)] == [child.pid]
        assert left_outside(home.temp, home.shared) == [f"left over: {home.temp / 'tte-1'}"]
        assert left_in(home.output_dir) == ["left over: checkpoints/.partial_000001"]
        home.end()
        assert child.wait(5) == -9 and stranger.poll() is None and not home.temp.exists()
        assert home.left_running(patience_s=0) == []
    finally:
        stranger.kill()
        stranger.wait()
