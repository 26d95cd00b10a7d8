"""docs/how_to/reward_function.md as a newcomer follows it, cut short: a function, a warm-up, a run; then the page's judge.

The whole path, until the reward has risen: tests/learns/test_newcomer_learns.py.
"""

import pytest

from helpers.newcomer import typed, walk
from helpers.own_files import shown_commands, shown_files, working_in, write_files
from helpers.tiny_runs import metrics, write_tiny_model
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHORTER = {"warmup_sft": ["epochs=0.4"], "grpo_full": ["max_steps=2", "evaluation.samples=1"]}


@pytest.fixture(scope="module")
def page(repo_root):
    return repo_root / "docs" / "how_to" / "reward_function.md"


@pytest.fixture(scope="module")
def folder(page, tmp_path_factory):
    """A folder in which the commands of the page have been typed."""
    folder = tmp_path_factory.mktemp("newcomer")
    walk(page, folder, SHORTER)
    return folder


def groups(run):
    return [group for _, path in sorted(rollout_paths(run).items()) for group in read_rollouts(path)]


@pytest.mark.rest
def test_newcomer_reward_function_values_are_trained_on(folder):
    run = folder / "runs" / "mine" / "grpo"
    lines = metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["mismatch/mean_abs"] < 1e-5 for line in lines[1:])
    with working_in(folder):
        from my_reward import near

        grades = [[near(group.problem, sample.text) for sample in group.samples] for group in groups(run)]
    assert [[sample.score.reward for sample in group.samples] for group in groups(run)] == grades
    assert [len(rewards) for rewards in grades] == [8] * 64
    assert all(0 < line["reward/mean"] < 1 and line["groups/used"] > 0 for line in lines[1:])
    assert 0 < lines[0]["eval/reward_sampled"] < 1
    assert (run / "report.html").stat().st_size > 10_000


@pytest.mark.rest
def test_newcomer_page_judge_replaces_grader(folder):
    """With refills, whose samples are compared among themselves, and a held-out task that is graded text by text."""
    words = ["task.grader=null", "task.group_grader=my_judge.as_good", "output_dir=runs/judged", "refill_rounds=1"]
    typed(folder, "tune", "run", "grpo_full", "--config", "my_run.yaml", *words, *SHORTER["grpo_full"], timeout=300)
    run = folder / "runs" / "judged"
    with working_in(folder):
        from my_judge import as_good

        grades = [as_good(group.problem, [sample.text for sample in group.samples]) for group in groups(run)]
    assert [[sample.score.reward for sample in group.samples] for group in groups(run)] == grades
    assert len(grades) >= 64 and all(line["groups/infra_failed"] == 0 for line in metrics(run)[1:])
    assert len({reward for rewards in grades for reward in rewards}) > 2


def test_the_path_with_rows_and_a_pretrained_model(repo_root, page, tmp_path):
    """As docs/how_to/dataset.md shows it, but for its last, whole run; a tiny model lies where `make pretrained` puts SmolLM2."""
    dataset_page = page.with_name("dataset.md")
    write_files(shown_files(page) | shown_files(dataset_page), tmp_path)
    write_tiny_model(tmp_path / "models" / "SmolLM2-135M-Instruct")
    *typed_words, whole_run = shown_commands(dataset_page, "python make_rows.py")
    readme = shown_commands(repo_root / "README.md", "tune cp -n grpo/smollm2_jsonl")
    assert all(words in [*typed_words, whole_run] for words in readme)
    printed = [typed(tmp_path, *words) for words in typed_words]
    assert (
        "\nfits into the free main memory" in printed[2] and "held out: Jsonl held_out by my_reward.near" in printed[3]
    )
    run = tmp_path / "runs" / "smollm2" / "jsonl"
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3] and (run / "report.html").exists()
