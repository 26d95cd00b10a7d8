"""examples/quickstart.ipynb, run cell by cell by a real kernel: the tiny model, and in the long tests SmolLM2, too."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from helpers.tiny_runs import metrics


@pytest.fixture
def run(repo_root, tmp_path, monkeypatch):
    """run(tags): executes all cells without these tags in an empty folder. Returns the text that each command printed."""
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))

    def execute(*without):
        notebook = nbformat.read(repo_root / "examples" / "quickstart.ipynb", as_version=4)
        notebook.cells = [cell for cell in notebook.cells if not {*without} & {*cell.metadata.get("tags", ())}]
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for cell in cells:
            if "report" in cell.metadata.get("tags", ()):
                assert any("iframe" in output.get("data", {}).get("text/html", "") for output in cell.outputs)
        return {cell.source: "".join(output.get("text", "") for output in cell.outputs) for cell in cells}

    return execute


def require_steps(printed, command, steps):
    """Asserts that the command printed a line per step, and nothing that redraws a line."""
    text = printed[command].replace("\r\n", "\n")
    assert "\r" not in text, text
    assert re.findall(rf"^ +(\d+)/{steps} ", text, re.MULTILINE) == [str(step) for step in range(steps + 1)], text


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_notebook_tiny_model_trains_with_edited_reward(run, tmp_path):
    printed = run("install", "smollm2")
    tiny = "!tune run grpo_full --config grpo/tiny"
    require_steps(printed, f"{tiny} max_steps=20", 20)
    require_steps(printed, f"{tiny} task.grader=my_strict.all_right output_dir=runs/tiny/mine max_steps=5", 5)
    # `all_right` pays 0 or 1, the task's own grader also the fractions between.
    own, edited = (metrics(tmp_path / "runs" / "tiny" / name)[1:] for name in ("grpo", "mine"))
    assert [len(lines) for lines in (own, edited)] == [20, 5]
    assert all(line["reward/mean"] < own[0]["reward/mean"] for line in edited)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_notebook_smollm2_trains_on_own_rows(run, repo_root, tmp_path):
    env = os.environ | {"VENV": sys.prefix}
    made = subprocess.run([repo_root / "scripts" / "pretrained.sh"], env=env, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(made.stderr)
    (tmp_path / "models").symlink_to(repo_root / "models")
    printed = run("install")
    require_steps(printed, "!tune run grpo_full --config grpo/smollm2_jsonl max_steps=3", 3)
    assert [line["step"] for line in metrics(tmp_path / "runs" / "smollm2" / "jsonl")] == [0, 1, 2, 3]
