"""The check of an agent at the start of a run: what it refuses, what it prints, what it lets pass."""

import json
import sys
import time

import pytest

from helpers.tiny_runs import write_tiny_model
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.agents import AgentConfig
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.types import SamplingConfig
from torchtune_ext.setup import agent_check
from torchtune_ext.setup.checks import check_agents
from torchtune_ext.tasks.jsonl import Jsonl

ASK = """
import os
import openai

def ask(problem, client, **options):
    client = openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
    return client.chat.completions.create(model="policy", messages=problem.messages, **options).choices[0].message.content
"""
AGENTS = {
    "missing package": ("import no_such_package", "No module named 'no_such_package'"),
    "dies": ("os._exit(3)", "exit code 3"),
    "no request": ("return 1.0", "it returns a reward without a request"),
    "refused": ("return float(ask(problem, client, temperature=0.3))", "temperature=0.3: expected 1"),
    "other server": (
        "openai.OpenAI(base_url='http://127.0.0.1:9/v1', api_key='x', max_retries=0).models.list()",
        "Connection",
    ),
}
PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"messages": json.load(sys.stdin)["messages"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check an agent with this body, or a program with this source."""
    write_tiny_model(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": 2}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def check(body="", program="", module="my_agent", **config):
        if program:
            (tmp_path / "agent.py").write_text(program)
            task = Jsonl(path="rows.jsonl", command=[sys.executable, "agent.py"])
        else:
            (tmp_path / f"{module}.py").write_text(f"{ASK}\ndef run(problem, client):\n    {body}\n")
            task = Jsonl(path="rows.jsonl", agent=f"{module}.run")
        check_agents([task], ChatTokenizer(tmp_path), SamplingConfig(max_tokens=8), 128, AgentConfig(**config))

    return check


@pytest.mark.parametrize(("body", "words"), AGENTS.values(), ids=AGENTS)
def test_agent_without_a_response_is_refused(check, request, body, words):
    module = "agent_" + request.node.callspec.id.replace(" ", "_")
    with pytest.raises(UsageError, match="task: the agent of Jsonl gets no response on problem") as caught:
        check(body, module=module)
    assert words in str(caught.value)


def test_program_without_a_response_shows_its_output(check):
    with pytest.raises(UsageError, match=r"exited with status 1") as caught:
        check(program="import no_such_package")
    assert "No module named 'no_such_package'" in str(caught.value).partition("end of its output")[2]


@pytest.mark.parametrize(
    "agent", [{"body": "return float(ask(problem, client))", "module": "good"}, {"program": PROGRAM}]
)
def test_agent_with_a_response_passes_silently(check, capsys, agent):
    check(**agent)
    assert capsys.readouterr().out == ""


def test_error_after_a_response_is_a_warning(check, capsys):
    check("raise KeyError('rejects ' + ask(problem, client))", module="rejects")
    assert "agent:" in (out := capsys.readouterr().out) and "KeyError: 'rejects 1'" in out


def test_slow_agent_is_not_refused(check, capsys, monkeypatch):
    monkeypatch.setattr(agent_check, "TIME_LIMIT_S", 1.0)
    started = time.monotonic()
    check("import time; time.sleep(60)", module="slow")
    assert "no answer within 1 s" in capsys.readouterr().out and time.monotonic() - started < 30


def test_limit_of_the_run_is_not_an_error(check, capsys):
    """The agent's own system prompt does not fit beside this problem."""
    problem = "import dataclasses; long = [{'role': 'user', 'content': 'x ' * 500}]; "
    check(problem + "ask(dataclasses.replace(problem, messages=long), client)", module="long")
    assert "exceed engine.max_model_len=128" in capsys.readouterr().out


def test_foreign_host_is_refused_at_the_start(check):
    with pytest.raises(UsageError, match="agent.host='192.0.2.1'"):
        check("return float(ask(problem, client))", module="hosted", host="192.0.2.1")
