"""docs/how_to/reward_function.md and dataset.md: their files are written to a folder, and used as the pages say."""

import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from omegaconf import OmegaConf

from helpers.nodes import component
from helpers.own_files import shown_commands, shown_files, working_in, write_files
from helpers.page_commands import blocks
from torchtune_ext.grading import Grader
from torchtune_ext.tasks.arithmetic import Arithmetic
from torchtune_ext.tasks.task import Problem


@pytest.fixture(scope="module")
def page(repo_root):
    return repo_root / "docs" / "how_to" / "reward_function.md"


@pytest.fixture
def folder(page, tmp_path):
    """The folder of someone who has written the files of both pages and run the first command."""
    write_files(shown_files(page.with_name("dataset.md")) | shown_files(page), tmp_path)
    with working_in(tmp_path):
        runpy.run_path("make_questions.py")
        yield tmp_path


def rewards(task, items):
    with Grader(task, workers=2) as grader:
        outcomes = grader.grade(items)
    assert {outcome.kind for outcome in outcomes} <= {"scored", "policy_failed"}, outcomes
    return [outcome.reward for outcome in outcomes]


def test_reward_page_begins_with_function_and_complete_run(page):
    files = ["my_reward.py", "my_run.yaml", "make_questions.py", "my_warmup.yaml"]
    assert list(shown_files(page))[:4] == files
    assert shown_commands(page, "python make_questions.py") == [
        ["python", "make_questions.py"],
        ["tune", "run", "warmup_sft", "--config", "my_warmup.yaml"],
        ["tune", "run", "grpo_full", "--config", "my_run.yaml"],
        ["torchtune-ext", "report", "runs/mine/grpo"],
    ]


def test_reward_page_function_grades_arbitrary_text(folder):
    cfg = OmegaConf.load("my_run.yaml")
    task, held_out = component(cfg.task).instantiate(), component(cfg.evaluation.task).instantiate()
    assert (len(task), len(held_out)) == (9700, 300)
    questions = [{t[n].messages[0]["content"] for n in range(len(t))} for t in (task, held_out)]
    assert not questions[0] & questions[1], "no sum of the evaluation is trained on"
    problem = task[0]
    texts = {str(problem.answer): 1.0, f"(1 2) {problem.answer + 1}": 0.5, f"{problem.answer - 2}.": 1 / 3}
    texts |= dict.fromkeys(("", " \n", "(", "seven", "\ud800"), 0.0)
    assert rewards(task, [(problem, text) for text in texts]) == list(texts.values())
    odd = rewards(task, [(problem, text) for text in ("12 -3)", "--5", "9" * 5000, "١٢ x")])
    assert all(0 < reward <= 1 for reward in odd)


def test_reward_page_warmup_solutions_get_expected_reward(folder):
    """Half of its solutions are right; the guesses are 0 to 3 away, on both sides."""
    task = component(OmegaConf.load("my_warmup.yaml").task).instantiate()
    assert len(task) >= OmegaConf.load("my_warmup.yaml").num_problems
    items = [(task[n], task.solution(task[n])) for n in range(2000)]
    values = rewards(task, items)
    # 1/2 + 1/2 (1 + 2/2 + 2/3 + 2/4)/7 = 0.726; the standard deviation of a reward is below 1/2, so that of the mean below 0.0112.
    assert sum(values) / len(values) == pytest.approx(0.726, abs=4 * 0.0112)
    assert {len(text.split()) for _, text in items} == {1, 3}


def test_reward_page_score_parts_and_custom_grade_work(folder):
    import my_rewards

    problem = Problem("p", (), 24)
    score = my_rewards.right_and_short(problem, "(12 21) 24")
    assert score.reward == pytest.approx(0.9) and score.parts == {"right": 1.0, "characters": 10}
    (folder / "my_brief.py").write_text(
        "def brief(problem, text):\n"
        "    return float(text.split()[-1:] == [str(problem.answer[-1])]) - 0.01 * len(text)\n"
    )
    task = Arithmetic(grader="my_brief.brief", level=3)
    assert rewards(task, [(task[0], task.solution(task[0]))]) == [pytest.approx(1 - 0.01 * len(task.solution(task[0])))]


def test_the_prompt_of_the_page(folder, page, capsys):
    (block,) = [text for language, text in blocks(page) if language == "python" and "with Grader(" in text]
    exec(block, {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Score(reward=1.0") and second.startswith("Score(reward=0.0")


def test_a_judge_that_compares(folder, page):
    (command,) = shown_commands(page, "tune run grpo_full --config my_run.yaml task.grader=null")
    cfg = OmegaConf.merge(OmegaConf.load(command[4]), OmegaConf.from_dotlist(command[5:]))
    task, held_out = component(cfg.task).instantiate(), component(cfg.evaluation.task).instantiate()
    problem, answer = task[0], task[0].answer
    texts = [f"(1 2) {answer}", str(answer), str(answer), str(answer + 1), ""]
    with Grader(task, workers=2) as judge, Grader(held_out) as alone:
        assert judge.grades_groups and not alone.grades_groups
        outcomes = judge.submit(problem, *texts).result(timeout=60)
        assert [outcome.reward for outcome in outcomes] == [0.6, 1.0, 1.0, 0.4, 0.2]
        assert judge.submit(problem, str(answer)).result(timeout=60)[0].reward == 1.0
        assert alone.grade([(held_out[0], str(held_out[0].answer))])[0].reward == 1.0


class Judge(BaseHTTPRequestHandler):
    """A server with OpenAI's interface, whose model puts answers in the order of the alphabet, and does not like "nonsense"."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        listed = body["messages"][0]["content"].split("Answers:\n\n")[1].rpartition("\n\n")[0].split("\n\n")
        texts = dict(entry.split("\n", 1) for entry in listed)
        content = json.dumps([int(name[1:-1]) for name in sorted(texts, key=texts.get)])
        if "nonsense" in texts.values():
            content = "The second one."
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    server.shutdown()
    thread.join()
    server.server_close()


def test_reward_page_server_judge_scores_and_reports_errors(repo_root, folder, server):
    text = (repo_root / "examples" / "server_judge.py").read_text()
    assert text.count("http://localhost:8000/v1/chat/completions") == 1
    (folder / "server_judge.py").write_text(text.replace("http://localhost:8000/v1/chat/completions", server))
    task = Arithmetic(group_grader="server_judge.ranked")
    with Grader(task, workers=2) as judge:
        good = judge.submit(task[0], "b", "c", "a")
        bad = judge.submit(task[0], "b", "nonsense")
        one = judge.submit(task[0], "b")
        assert [outcome.reward for outcome in good.result(timeout=60)] == [0.5, 0.0, 1.0]
        assert [outcome.reward for outcome in one.result(timeout=60)] == [1.0]
        for outcome in bad.result(timeout=60):
            assert outcome.kind == "infra_failed"
            # json.loads raises, so the line of the file that calls it is named.
            assert outcome.cause.startswith("json.decoder.JSONDecodeError") and "server_judge.py:" in outcome.cause


def test_reward_page_custom_task_works(folder):
    from my_task import Sums

    task = Sums(largest=20)
    assert task[7] == task[7] and len(task) == 1000
    nonsense = ["", "42", "\\boxed{}", "\\boxed{x}"]
    assert rewards(task, [(task[n], task.solution(task[n])) for n in range(5)]) == [1.0] * 5
    assert (
        rewards(task, [(task[0], f"\\boxed{{{task[0].answer + 1}}}")] + [(task[0], t) for t in nonsense])
        == [0.1] + [0.0] * 4
    )
