"""What a user copies out of the pages: commands that mean something, and messages that we do write."""

import argparse
import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest
from huggingface_hub.cli.download import download
from omegaconf import OmegaConf

from helpers.page_commands import blocks, commands, run_command
from torchtune_ext.cli import cli
from torchtune_ext.policy.families import FAMILIES
from torchtune_ext.recipes import evaluate, grpo, warmup_sft
from torchtune_ext.run.catalog import config_files, package_folder, recipe_files
from torchtune_ext.settings.config import load_config

RECIPES = {recipe.name: recipe for recipe in recipe_files(package_folder("recipes"), package_folder("configs"))}
CONFIGS = config_files(package_folder("configs"))
MODULES = {module.__name__.rpartition(".")[2]: module for module in (grpo, warmup_sft, evaluate)}
ROOT = Path(__file__).parents[3]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
PAGES += [
    str(path.relative_to(ROOT))
    for name in ("docs", "benchmarks/results")
    for path in sorted((ROOT / name).rglob("*.md"))
]
GETTING_STARTED = "docs/getting_started"
SHORTEST = 6  # characters of a piece of a message that is looked for


@pytest.fixture(scope="module")
def gpu_run(repo_root):
    return repo_root / GETTING_STARTED / "gpu_run.md"


# Pages with runs -> how many of shipped configs they show at least. Other pages may show runs, too.
RUNS = {"README.md": 2, f"{GETTING_STARTED}/quickstart.md": 3, f"{GETTING_STARTED}/pretrained_model.md": 5}
RUNS[f"{GETTING_STARTED}/gpu_run.md"] = 16


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith(("README", "docs/"))])
def test_every_run_that_a_page_shows_is_one(repo_root, name):
    count = 0
    for command in commands(repo_root / name):
        run = run_command(command)
        # A copy of the user's is not checked.
        if run is None or run.config not in CONFIGS or run.recipe not in RECIPES:
            continue
        module = MODULES[RECIPES[run.recipe].path.stem]
        cfg = OmegaConf.merge(OmegaConf.load(CONFIGS[run.config]), OmegaConf.from_dotlist(run.overrides))
        load_config(module.Config, cfg)
        count += 1
    assert count >= RUNS.get(name, 0)


def test_page_trainers_and_engines_use_separate_gpus(gpu_run):
    count = 0
    for command in commands(gpu_run):
        run = run_command(command)
        if run is None or not run.config.startswith("grpo/qwen"):
            continue
        if any(word.startswith("dry_run=") for word in run.overrides):
            continue
        cfg = OmegaConf.merge(OmegaConf.load(CONFIGS[run.config]), OmegaConf.from_dotlist(run.overrides))
        engine = [device for device in str(cfg.engine.get("devices") or "").split(",") if device]
        train = [device for device in command.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if cfg.engine.get("sleep"):
            shared = [str(i) for i in range(run.processes)] if run.processes > 1 else []
            assert engine == shared and not train, command.line
        else:
            assert len(train) == run.processes and not set(train) & set(engine), command.line
            assert bool(engine) != bool(cfg.engine.get("address")), command.line
            assert len(engine) % cfg.engine.get("tensor_parallel_size", 1) == 0, command.line
        count += 1
    assert count >= 16


def test_page_commands_use_accepted_subcommands(repo_root):
    words = set()
    pages = sorted((repo_root / GETTING_STARTED).glob("*.md"))
    for command in (command for page in pages for command in commands(page)):
        if command.words[0] == "torchtune-ext":
            parser = argparse.ArgumentParser()
            importlib.import_module(cli.OWN_COMMANDS[command.words[1]][0]).add_arguments(parser)
            parser.parse_args(command.words[2:])
        elif command.words[:2] == ("hf", "download"):
            options = {word.removeprefix("--").replace("-", "_") for word in command.words if word.startswith("--")}
            assert options <= set(inspect.signature(download).parameters), command.line
        else:
            continue
        words.add(command.words[1])
    assert words >= {"clue", "doctor", "install-engine", "report", "download"}


@pytest.mark.parametrize(
    ("mask", "train", "engine"), [("4,5,6,7", "4,5,6", "7"), (None, "0,1,2,3", "4"), ("2,0", "2", "0")]
)
def test_job_script_lines_use_allocated_gpus(gpu_run, tmp_path, mask, train, engine):
    (script,) = [text for language, text in blocks(gpu_run) if language == "bash"]
    for name, text in {
        "tune": 'echo "$CUDA_VISIBLE_DEVICES|$*"',
        "nvidia-smi": 'test "$*" = "--query-gpu=index --format=csv,noheader" && printf "0\\n1\\n2\\n3\\n4\\n"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=60, env=environ, check=True)
    processes = train.count(",") + 1
    expected = f"run --nproc_per_node {processes} grpo_full --config grpo/qwen2_5_7B_full engine.devices={engine}"
    assert done.stdout == f"{train}|{expected}\n"


def test_page_lists_all_supported_families(repo_root):
    page = repo_root / GETTING_STARTED / "pretrained_model.md"
    table = page.read_text().partition("## Supported model families")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == ["model_type", *FAMILIES]


def test_the_step_that_readme_shows_is_the_recipes(repo_root):
    (shown,) = [text for language, text in blocks(repo_root / "README.md") if text.startswith("with timer")]
    recipe = iter((repo_root / "recipes" / "grpo.py").read_text().splitlines())
    for line in shown.splitlines():
        assert any(line.strip() == theirs.strip() for theirs in recipe), line


def test_commands_page_lists_every_subcommand(repo_root):
    page = (repo_root / "docs" / "reference" / "cli.md").read_text()
    assert not [word for word in cli.OWN_COMMANDS if f"torchtune-ext {word}" not in page]


def literals(root: Path) -> str:
    """The literal texts of all Python files, each piece between two placeholders on a line of its own."""
    texts = []
    for path in [*(root / "torchtune_ext").rglob("*.py"), *(root / "recipes").glob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                # Messages of `logging` have placeholders of their own.
                texts += re.split(r"%[dsgr]", " ".join(node.value.split()))
    return "\n".join(texts)


def pieces(text: str) -> list[str]:
    """The pieces of a message between its "..."."""
    return [piece for line in text.splitlines() for part in line.split("...") if len(piece := part.strip()) >= SHORTEST]


def test_every_message_that_troubleshooting_quotes_is_written_somewhere(repo_root):
    known = literals(repo_root)
    quoted = [
        piece
        for language, text in blocks(repo_root / "docs" / "troubleshooting.md")
        if not language
        for piece in pieces(text)
    ]
    assert len(quoted) > 20
    unknown = [piece for piece in quoted if piece not in known and piece.strip(" ;:,.()") not in known]
    assert not unknown


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(repo_root, name):
    page = repo_root / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{name}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{name}: {target}"


def anchors(page: Path) -> set[str]:
    """The names by which GitHub finds the headings of a page."""
    outside = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
