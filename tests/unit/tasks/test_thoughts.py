"""A thought that the template opens: the text of a completion, and what graders make of it."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

pytest.importorskip("math_verify")

from helpers.loop_engine import LoopEngine, sample_index
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading import Grader
from torchtune_ext.pipeline.rollout import collect_in_order, sample_groups
from torchtune_ext.sampling.engine import Completion, SamplingConfig
from torchtune_ext.tasks.answers import MathGrader
from torchtune_ext.tasks.arithmetic import Arithmetic
from torchtune_ext.tasks.guess_number import GuessNumber
from torchtune_ext.tasks.skyrl_gym import SkyRLGym
from torchtune_ext.tasks.task import Problem
from torchtune_ext.tasks.temporal_clue.task import TemporalClue

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As Qwen3-Thinking-2507 and the R1 distills.
THINKS = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SWITCHED_OFF = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")

CUT = "Let me think. ... maybe \\boxed{3}, wait"
ENDED = "Let me think. ... maybe \\boxed{3}, no.\n</think>\n\nIt is \\boxed{4}."


class Thoughtful:
    """Answers that come with the problems, and the format of thoughts."""

    grader = MathGrader(format="think")

    def grade(self, problem, text):
        return self.grader(problem.answer, text)


class Recorded(LoopEngine):
    """An engine that samples the same texts for every prompt."""

    def __init__(self, tokenizer, texts):
        super().__init__(max_model_len=10_000)
        self.completions = []
        for text in texts:
            ids = np.asarray(tokenizer.encode(text + "<|im_end|>"), dtype=np.int32)
            self.completions.append(Completion(ids, np.zeros(len(ids)), np.zeros(len(ids), dtype=np.int32), "stop", 0))

    async def generate(self, request, affinity_key=None):
        return self.completions[sample_index(request)]


def model_dir(path, special):
    """A byte-level tokenizer; the marks of thoughts are tokens of their own, special ones or not."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ends])
    if special is not None:
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in ("<think>", "</think>")])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return path


@pytest.fixture(scope="module")
def grader():
    with Grader(Thoughtful(), timeout_s=60.0) as grader:
        yield grader


def graded(grader, tokenizer, texts):
    """{(answer, text sampled): (text read, reward, format)}"""
    problems = [Problem(answer, ({"role": "user", "content": "?"},), answer) for answer in ("3", "4")]
    engine = Recorded(tokenizer, texts)
    groups = collect_in_order(
        sample_groups(problems, len(texts), SamplingConfig(max_tokens=99, seed=1), engine, tokenizer, grader)
    )
    return {
        (group.problem.answer, text): (s.text, s.score.reward, s.score.parts["format"])
        for group in groups
        for text, s in zip(texts, group.samples, strict=True)
    }


@pytest.mark.parametrize("special", [None, False, True], ids=["characters", "tokens", "special tokens"])
def test_thinking_opened_by_template_excluded_from_answer(grader, tmp_path, special):
    tokenizer = ChatTokenizer(model_dir(tmp_path, special), THINKS)
    grades = graded(grader, tokenizer, [CUT, ENDED])
    assert grades["3", CUT] == (f"<think>\n{CUT}", 0.0, 0.0)
    assert grades["4", ENDED] == (f"<think>\n{ENDED}", 1.0, 1.0)
    assert grades["3", ENDED][1:] == (0.0, 1.0)


@pytest.mark.parametrize("template", [PLAIN, SWITCHED_OFF], ids=["plain", "switched off"])
def test_templates_without_thinking_leave_sampled_text_unchanged(grader, tmp_path, template):
    tokenizer = ChatTokenizer(model_dir(tmp_path, False), template)
    grades = graded(grader, tokenizer, [CUT, f"<think>{ENDED}"])
    assert grades["3", CUT] == (CUT, 1.0, 0.0)
    assert grades["4", f"<think>{ENDED}"] == (f"<think>{ENDED}", 1.0, 1.0)


def test_question_mentioning_think_tags_opens_no_thinking(tmp_path):
    tokenizer = ChatTokenizer(model_dir(tmp_path, False), PLAIN)
    assert tokenizer.thought_prefix(tokenizer.prompt_ids([{"role": "user", "content": "What is <think>"}])) == ""
    assert tokenizer.thought_prefix(tokenizer.encode("Think first.\n<think>\n\n")) == "<think>\n\n"


def played(task, problem, text):
    """The reward of a text, or of the first turn of a conversation."""
    if not hasattr(task, "environment"):
        return task.grade(problem, text).reward
    return task.environment(problem, 0).step({"role": "assistant", "content": text}).reward


def test_graders_read_text_after_thinking():
    guess, clue = GuessNumber(count=1), TemporalClue(seed=0, count=1)
    tasks = [Arithmetic(level=3, count=1), clue, TemporalClue(seed=0, count=1, grader="published"), guess]
    solutions = [task.solution(task[0]) for task in tasks[:3]] + [str(guess[0].answer["number"])]
    if find_spec("skyrl_gym"):
        tasks += [SkyRLGym("gsm8k", [{"prompt": "2+2?", "reward_spec": {"ground_truth": "4"}}])]
        solutions += ["#### 4"]
    for task, solution in zip(tasks, solutions, strict=True):
        problem, name = task[0], type(task).__name__
        assert played(task, problem, solution) > 0, name
        for thought in ("<think>\nI see.\n</think>\n\n", "I see.</think>\n", f"<think>{solution} no</think>"):
            assert played(task, problem, thought + solution) == played(task, problem, solution), (name, thought)
        for text in (f"<think>{solution}", f"a <think> b\n{solution}", f"<think>a</think> b <think>\n{solution}"):
            assert played(task, problem, text) == 0, (name, text)
