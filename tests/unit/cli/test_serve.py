"""`torchtune-ext serve`: the command that it shows is the run's, and what it does not know goes to vLLM."""

import json
import shlex

import pytest

torch = pytest.importorskip("torch")

from helpers import fp8_models  # noqa: E402
from torchtune_ext.cli import cli, serve  # noqa: E402
from torchtune_ext.sampling.server_command import KEY_VARIABLE  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "model"
    fp8_models.write_model_dir(folder)
    return f"model_dir={folder}"


def shown(capsys, *words):
    """The words that `serve --print` shows."""
    assert cli.main(["serve", *words, "--print"]) == 0
    return shlex.split(capsys.readouterr().out)


def value(words, flag):
    return words[words.index(flag) + 1]


def test_the_command_of_a_config(capsys, model, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a-secret-key")
    address = "engine.address=http://node2:9000"
    words = shown(capsys, "--config", "grpo/tiny", model, address, "--tensor-parallel-size", "2", "--foo=3")
    assert f"{KEY_VARIABLE}=$" + KEY_VARIABLE in words and not any("a-secret-key" in word for word in words)
    assert value(words, "--model") == model.removeprefix("model_dir=") and value(words, "--port") == "9000"
    assert json.loads(value(words, "--weight-transfer-config"))["backend"] in ("gloo", "nccl")
    assert words[-3:] == ["--tensor-parallel-size", "2", "--foo=3"]
    words = shown(capsys, "--config", "grpo/tiny", model, "--port", "7000", "--host", "::1")
    assert value(words, "--port") == "7000" and value(words, "--host") == "::1"
    assert json.loads(value(words, "--weight-transfer-config")) == {"backend": "shm"}


def test_serve_passes_config_adapters_and_precision(capsys, model):
    words = shown(capsys, "--config", "grpo/tiny_lora", model)
    assert "--enable-lora" in words and "q_proj" in words
    fp8 = ("dtype=bfloat16", "engine.dtype=bfloat16", "precision=fp8_unified")
    words = shown(capsys, "--config", "grpo/tiny", model, *fp8)
    assert "quantization_config" in json.loads(value(words, "--hf-overrides"))


def test_serve_reports_invalid_arguments(capsys, model, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr(serve.os, "execve", lambda *words: pytest.fail("it started"))
    for words, message in (
        (["--config", "grpo/tiny", model], f"{KEY_VARIABLE} is not set"),
        (["--config", "grpo/tiny", model, "engine.transfer=rdma"], "engine.transfer='rdma' is unknown"),
        (["--config", "no/such"], "no/such"),
        (["--config", "warmup/tiny"], "is written for warmup_sft"),
        (["--config", "grpo/tiny", model, "engin.dtype=float32"], "engin"),
        (
            ["--endpoint", "--config", "grpo/tiny", model, "--print"],
            "--endpoint with --print: starts no server of vLLM",
        ),
        (["--endpoint", "--config", "grpo/tiny", model, "--foo=3"], "--endpoint with --foo=3"),
        (
            [
                "--endpoint",
                "--config",
                "grpo/tiny",
                model,
                "dtype=bfloat16",
                "engine.dtype=bfloat16",
                "precision=fp8_unified",
            ],
            "--endpoint with precision in FP8",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", *words])
        assert ended.value.code == 2 and message in capsys.readouterr().err
