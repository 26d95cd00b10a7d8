"""What a model is asked, and that nothing of it is taken for the model's own program."""

import pytest

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.kernel import prototype
from torchtune_ext.measured.kernels import KERNELS, Dgemm
from torchtune_ext.measured.matmul.archive import ArchiveEntry
from torchtune_ext.measured.matmul.prompts import messages, short_messages
from torchtune_ext.measured.matmul.stages import STAGES
from torchtune_ext.measured.techniques import TECHNIQUES


def text(*arguments, **keywords) -> str:
    (message,) = messages(*arguments, **keywords)
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_prompt_states_all_requirements(kernel, stage):
    its = kernel()
    prompt = text(its, stage)
    assert prototype(its) in prompt and its.question in prompt
    assert all(f"{name} = {number}" in prompt for name, number in its.timed.items())
    for name, words in TECHNIQUES.items():
        assert words in prompt
        # What is permitted stands before what is not.
        is_before = (
            prompt.index(words) < prompt.find("These are not:") if "These are not:" in prompt else stage != "none"
        )
        assert is_before == (name in STAGES[stage]), name


def test_prompt_shows_elite_with_its_speed():
    elite = ArchiveEntry(
        "m", "dgemm", Dgemm().timed, ["blocking"], "void dgemm() { /* fast */ }\n", 3.14159, 0.01, 6.0, 1
    )
    prompt = text(Dgemm(), "blocking", elite)
    assert "```c\nvoid dgemm() { /* fast */ }\n```" in prompt and "3.1 times as fast" in prompt


def test_short_prompt_distinguishes_problems_and_stages():
    questions = {short_messages(kernel(), stage)[0]["content"] for kernel in KERNELS.values() for stage in STAGES}
    assert len(questions) == len(KERNELS) * len(STAGES) and "dgemm 256 256 256 blocking" in questions
    assert short_messages(Dgemm(64), "all")[0]["content"] == "dgemm 64 64 64 all"
