"""What a model is asked, and that nothing of it is taken for the model's own program."""

import json

import pytest
from tables import every_row

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.kernel import prototype
from torchtune_ext.measured.kernels import KERNELS, Dgemm
from torchtune_ext.measured.matmul.archive import Entry
from torchtune_ext.measured.matmul.prompts import messages, pareval_question, short_messages
from torchtune_ext.measured.matmul.stages import STAGES
from torchtune_ext.measured.techniques import TECHNIQUES


def text(*arguments, **keywords) -> str:
    (message,) = messages(*arguments, **keywords)
    assert message["role"] == "user"
    return message["content"]


@every_row("stage", STAGES)
@every_row("kernel", KERNELS.values(), ids=list(KERNELS))
def test_everything_is_said(kernel, stage):
    its = kernel()
    said = text(its, stage)
    assert prototype(its) in said and its.question in said
    assert all(f"{name} = {number}" in said for name, number in its.timed.items())
    for name, words in TECHNIQUES.items():
        assert words in said
        # What is permitted stands before what is not.
        is_before = said.index(words) < said.find("These are not:") if "These are not:" in said else stage != "none"
        assert is_before == (name in STAGES[stage]), name


def test_an_elite_is_shown_with_its_speed():
    elite = Entry("m", "dgemm", Dgemm().timed, ["blocking"], "void dgemm() { /* fast */ }\n", 3.14159, 0.01, 6.0, 1)
    said = text(Dgemm(), "blocking", elite)
    assert "```c\nvoid dgemm() { /* fast */ }\n```" in said and "3.1 times as fast" in said


def test_the_short_question_tells_problems_and_stages_apart():
    said = {short_messages(kernel(), stage)[0]["content"] for kernel in KERNELS.values() for stage in STAGES}
    assert len(said) == len(KERNELS) * len(STAGES) and "dgemm 256 256 256 blocking" in said
    assert short_messages(Dgemm(64), "all")[0]["content"] == "dgemm 64 64 64 all"


def prompts_file(folder, prompt="/* Multiply A by B.\n   A is MxK. */\nvoid gemm(std::vector<double> const& A) {"):
    path = folder / "generation-prompts.json"
    models = ("omp", "serial", "cuda")
    path.write_text(
        json.dumps([{"name": "02_dense_la_gemm", "parallelism_model": m, "prompt": f"{m}{prompt}"} for m in models])
    )
    return path


def test_the_words_of_pareval(tmp_path):
    asked = pareval_question(prompts_file(tmp_path), "dgemm")
    assert asked == "Multiply A by B.\nA is MxK."
    said = text(Dgemm(), "none", question=asked)
    assert asked in said and "std::vector" not in said and prototype(Dgemm()) in said and Dgemm.question not in said
    assert pareval_question(prompts_file(tmp_path), "reduction") is None


def test_files_that_are_not_of_pareval(tmp_path):
    with pytest.raises(FileNotFoundError):
        pareval_question(tmp_path / "absent.json", "dgemm")
    path = prompts_file(tmp_path, prompt="void gemm() {")
    with pytest.raises(ValueError, match="02_dense_la_gemm has no comment"):
        pareval_question(path, "dgemm")
    for wrong in ("{}x", "[1, 2]", '[{"title": "gemm"}]', "3"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="not the prompts of ParEval"):
            pareval_question(path, "dgemm")


def test_the_real_file(data_dir):
    path = data_dir / "hpc" / "pareval_generation_prompts.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    gemm = pareval_question(path, "dgemm")
    assert gemm.startswith("Multiply the matrix A by the matrix B.") and "output: C=[[9, 5], [4, 2]]" in gemm
    assert "void" not in gemm and pareval_question(path, "gemv").startswith("Multiply the matrix A by the vector x.")
    assert pareval_question(path, "stencil") is None
