"""`dry_run=`: each config fits the machine in its first lines; invalid or oversized settings are reported."""

import json
import math
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from helpers.nodes import component
from helpers.public_configs import PUBLIC, write_config
from helpers.stand_ins import nf4_in_one_piece, write_stand_in
from torchtune_ext.grading import self_check
from torchtune_ext.policy.memory import GIB
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.recipes import grpo
from torchtune_ext.run.catalog import config_files, package_folder
from torchtune_ext.setup import dry_run as dry
from torchtune_ext.setup.plan import Machine
from torchtune_ext.tasks.temporal_clue.files import generate_puzzles, write_jsonl
from torchtune_ext.tasks.temporal_clue.size import Size

pytestmark = pytest.mark.slow

CONFIGS = {name: path for name, path in config_files(package_folder("configs")).items() if name.startswith("grpo/")}
# A row with the fields of all data sets in the configs.
QUESTION = {
    **dict.fromkeys(("question", "problem", "prompt"), "What is 2 + 2?"),
    "answer": "2 + 2 = 4\n#### 4",
    "solution": "It is \\boxed{4}.",
    "final_answer": "4",
}
GPU_SIZES = (16, 24, 40, 48, 80, 141)  # GB
# (config, model, overrides, machine) for other model sizes in the first lines of a config.
OTHER_SIZES = [
    ("qwen2_5_7B_full", "Llama-3.1-8B-Instruct", "", "5x80"),
    ("qwen2_5_7B_full", "Qwen3-8B", "", "5x80"),
    ("qwen2_5_7B_full", "Qwen2.5-3B-Instruct", "engine.devices=2", "3x80"),
    ("qwen2_5_7B_node", "Llama-3.1-8B-Instruct", "", "8x80"),
    ("qwen2_5_7B_node", "Qwen3-8B", "", "8x80"),
    ("qwen2_5_7B_lora", "Llama-3.1-8B-Instruct", "", "2x80"),
    ("qwen2_5_7B_lora", "Qwen3-8B", "", "2x80"),
    ("qwen2_5_7B_lora", "Qwen2.5-14B-Instruct", "engine.devices=2", "3x80"),
    ("qwen3_1_7B_atr_grpo_lora", "Qwen3-8B", "", "2x80"),
    ("qwen2_5_7B_fp8", "Qwen2.5-32B", "engine.tensor_parallel_size=2 engine.devices=6,7", "8x141"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data; models are added on demand."""
    path = tmp_path_factory.mktemp("place")
    puzzles = list(generate_puzzles(0, 128, Size(suspects=2, weapons=2, rooms=2)))
    write_jsonl(path / "puzzles.jsonl", puzzles[:64])
    write_jsonl(path / "held_out.jsonl", puzzles[64:])
    (path / "questions.jsonl").write_text(f"{json.dumps(QUESTION)}\n" * 200)
    (path / "others.jsonl").write_text(json.dumps(QUESTION | {"question": "What is 3 + 1?"}))
    check, checked = self_check._check_grader, []

    def check_once(task, *args):
        # Most configs have the same few graders, and each check starts a process.
        kind = (type(task), vars(task).get("grade"), str(vars(task).get("options")), *args)
        if kind not in checked:
            check(task, *args)
            checked.append(kind)

    with nf4_in_one_piece(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "_check_grader", check_once)
        yield path


def write_tiny(path, cfg):
    """Write a small model with a tokenizer for its task, like the warm-up recipe."""
    task = component(cfg.task).instantiate()
    texts = [message["content"] for i in range(min(16, len(task))) for message in task[i].messages]
    write_model(path, make_tokenizer(texts, ["x"], [], 1024), ModelShape(), seed=1)
    return path


def settings_in(place, name, model=None, words=(), **changes):
    """Return the settings of a config with data and a stand-in model below `place`."""
    cfg = OmegaConf.load(CONFIGS[f"grpo/{name}"])
    tiny = "tiny" in name
    # The configs for a CPU start from a warmed-up model.
    warmed_up = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "gemma-3-270m"}
    public = next((model for short, model in warmed_up.items() if short in name), Path(cfg.model_dir).name)
    path = place / (name if tiny else model or public)
    if not path.exists():
        path = write_tiny(path, cfg) if tiny else write_stand_in(place, path.name)
    held_out = cfg.evaluation.get("task") if "evaluation" in cfg else None
    for node, puzzles in (cfg.task, "puzzles.jsonl"), (held_out, "held_out.jsonl"):
        if node is not None and ("path" in node or node._component_.endswith(".Math")):
            node.path = str(place / (puzzles if node._component_.endswith("Clue") else "questions.jsonl"))
    if cfg.task._component_.endswith("Jsonl"):
        cfg.task.grader, held_out.path = "helpers.scripted_task.same", str(place / "others.jsonl")
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(words)), {"logging": {"to": []}}, changes)
    cfg.model_dir, cfg.output_dir = str(path), str(place / "runs")
    return cfg


def ran(capsys, cfg):
    """Return the exit status and the output of a dry run."""
    with pytest.raises(SystemExit) as left:
        grpo.recipe_main.__wrapped__(cfg)
    return left.value.code, capsys.readouterr().out


def refused(capsys, cfg, message):
    """Check that a dry run with invalid settings fails with the message and without a table."""
    with pytest.raises(ValueError, match=message):
        grpo.recipe_main.__wrapped__(cfg)
    assert "GiB" not in capsys.readouterr().out


def launched(config):
    """Return the start command in the first lines of a config, or None."""
    lines = [line.removeprefix("# ") for line in CONFIGS[config].read_text().splitlines() if line.startswith("#")]
    return next((line for line in lines if "tune run" in line and line.endswith(f"--config {config}")), None)


def ranks_of(command):
    """Return the number of ranks that a command starts on all machines."""
    words = command.split()
    counts = [int(words[words.index(option) + 1]) for option in ("--nnodes", "--nproc_per_node") if option in words]
    return math.prod(counts)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_fits_the_machine_that_it_names(name, place, capsys):
    first = CONFIGS[name].read_text().splitlines()[0]
    assert first.startswith("# for: "), f"{name}: say first for which machine it is, as in `# for: 5 x 80 GB`"
    machine = first.removeprefix("# for: ")
    cfg = settings_in(place, name.removeprefix("grpo/"), dry_run=machine)
    if cfg.dtype == "auto":
        # `auto` takes bfloat16 on a CPU with its instructions; the config must fit on one without them, too.
        cfg.dtype = "float32"
    status, out = ran(capsys, cfg)
    assert status == 0, out
    assert "\nfits on " in out and "problem:" not in out and "does NOT" not in out
    table = [line for line in out.splitlines() if not line.startswith("problems: ")]
    assert len(table) < len(out.splitlines()) and all(len(line) <= 120 for line in table), out
    if machine.startswith("CPU"):
        return
    # The command in the first lines starts the planned ranks, and no GPU both trains and samples without `engine.sleep`.
    command = launched(name)
    ranks = ranks_of(command)
    assert re.search(rf"^GPUs: {ranks} trains?\b", out, re.MULTILINE) and "idle" not in out
    engine = OmegaConf.load(CONFIGS[name]).engine
    own = engine.get("devices")
    if own and engine.get("sleep"):
        assert own == ",".join(map(str, range(ranks))) and "CUDA_VISIBLE_DEVICES" not in command
    elif own:
        visible = command.removeprefix("CUDA_VISIBLE_DEVICES=").split()[0].split(",")
        assert len(visible) == ranks and not set(visible) & set(own.split(","))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith("G")])
def test_dry_run_card_configs_fit_with_ecc(name, place, capsys):
    """Error correction takes a sixteenth of the memory of an L4, A10 or L40S: 22.0 and 44.4 GiB are left."""
    size = 0.935 * int(name.removesuffix("G").rpartition("_")[2])
    status, out = ran(capsys, settings_in(place, name.removeprefix("grpo/"), dry_run=f"1x{size:.1f}"))
    assert status == 0, out


@pytest.mark.parametrize("name, model, words, machine", OTHER_SIZES)
def test_each_other_size_that_a_config_names_fits(name, model, words, machine, place, capsys):
    comment = " ".join(line for line in CONFIGS[f"grpo/{name}"].read_text().splitlines() if line.startswith("#"))
    assert f"model_dir=models/{model}" in comment and all(word in comment for word in words.split())
    status, out = ran(capsys, settings_in(place, name, model, words.split(), dry_run=machine))
    assert status == 0, out


def launches():
    """Return (number of GPUs, GB of the smallest GPU, command) for each launch command of the page gpu_run.md."""
    page = (Path(__file__).parents[3] / "docs" / "getting_started" / "gpu_run.md").read_text()
    table = page.partition("## Launch commands")[2].partition("\n## ")[0]
    return re.findall(r"^\| (\d+) \| (\d+) GB \| `([^`]+)` \|$", table, re.MULTILINE)


def launch_settings(place, gpus, size, command):
    """Return the settings of a launch command in a dry run for GPUs of a size in GB."""
    words = command.split()
    name = words[words.index("--config") + 1].removeprefix("grpo/")
    changes = words[words.index("--config") + 2 :]
    model = next((Path(word).name for word in changes if word.startswith("model_dir=")), None)
    return settings_in(place, name, model, words=changes, dry_run=f"{gpus} x {size}")


@pytest.mark.parametrize("gpus, size, command", launches())
def test_dry_run_page_commands_fit_with_matching_ranks(gpus, size, command, place, capsys):
    status, out = ran(capsys, launch_settings(place, gpus, size, command))
    assert status == 0, out
    ranks = ranks_of(command)
    assert re.search(rf"^GPUs: {ranks} train", out, re.MULTILINE) and ("start it" in out) == (ranks > 1)
    assert ranks == 1 or f"--nproc_per_node {ranks}" in out


@pytest.mark.rest
@pytest.mark.parametrize("gpus, size, command", [launch for launch in launches() if int(launch[1]) > min(GPU_SIZES)])
def test_dry_run_page_commands_need_the_size_named(gpus, size, command, place, capsys):
    smaller = max(each for each in GPU_SIZES if each < int(size))
    status, out = ran(capsys, launch_settings(place, gpus, smaller, command))
    assert status == 2 and "does NOT fit" in out, out


def test_every_row_of_the_table_was_read():
    names = [command.split()[command.split().index("--config") + 1] for *_, command in launches()]
    on_gpus = {name for name, path in CONFIGS.items() if not path.read_text().startswith("# for: CPU")}
    assert set(names) == on_gpus


def test_dry_run_32b_does_not_fit_eight_80gb(place, capsys):
    status, out = ran(capsys, settings_in(place, "qwen2_5_32B_full", dry_run="8x80"))
    assert status == 2 and "does NOT fit on 8 x 80 GB (78.8 GiB each):" in out
    # 16 bytes for 32.76 billion parameters on four GPUs are 122 GiB each, plus activations and gathered weights.
    assert (
        "training takes" in out
        and "settings that need less, cheapest first:" in out
        and "    more GPUs for training" in out
    )


def test_dry_run_lists_only_remedies_that_are_missing(place, capsys):
    """A LoRA run with checkpointing, a sleeping engine and short rows: what is left concerns the engine."""
    words = ["engine.devices=null", "engine.sleep=true", "engine.max_model_len=4096", "row_tokens=4096"]
    words += ["sampling.max_tokens=2048", "engine.gpu_memory_utilization=0.99"]
    status, out = ran(capsys, settings_in(place, "qwen2_5_7B_lora", words=words, dry_run="1x24"))
    listed = out.partition("settings that need less, cheapest first:\n")[2].splitlines()
    assert status == 2 and "the same GPU while the engine is awake" in out and "sampling takes" in out
    assert [line.strip() for line in listed if line.startswith("    ")][:4] == [
        "a lower engine.gpu_memory_utilization or engine.kv_cache_bytes",
        "another GPU for the engine (engine.devices)",
    ], out


@pytest.mark.parametrize(
    "name, machine, message",
    [
        ("qwen2_5_7B_full", "1x80", "^1 x 80 GB: sampling needs 2 GPUs .*, which leaves no GPU for training"),
        ("qwen2_5_7B_node", "7x80", "^engine.devices=4,5,6,7 names GPU 7, but 7 x 80 GB has 7, from 0 to 6"),
        ("qwen2_5_7B_colocated", "3x80", "^engine.devices=0,1,2,3 names GPU 3, but 3 x 80 GB has 3, from 0 to 2"),
        ("qwen2_5_7B_node", "4x80", "^4 x 80 GB: sampling needs 4 GPUs .*, which leaves no GPU"),
        (
            "qwen2_5_32B_full",
            "4x80",
            "sampling needs 4 GPUs \\(2 servers, tensor_parallel_size=2\\), which leaves no GPU for training",
        ),
    ],
)
def test_dry_run_indivisible_machine_is_refused(name, machine, message, place, capsys):
    refused(capsys, settings_in(place, name, dry_run=machine), message)


@pytest.mark.parametrize(
    "name, machine, message",
    [
        ("qwen2_5_32B_full", "16x24", "the KV cache of each replica would hold 0 tokens"),
        ("qwen2_5_32B_full", "8x80", "training takes"),
        ("qwen2_5_32B_lora", "8x40", "the KV cache of each replica would hold"),
    ],
)
def test_gpus_that_are_not_there_are_refused(name, machine, message, place, capsys):
    status, out = ran(capsys, settings_in(place, name, dry_run=machine))
    assert status == 2 and message in out, out


def test_gpus_that_engines_cannot_share_out_are_refused(place, capsys):
    cfg = settings_in(place, "qwen2_5_7B_node", words=["engine.tensor_parallel_size=3"], dry_run="8x80")
    refused(capsys, cfg, "names 4 GPUs, but engine.tensor_parallel_size=3 needs 3 for each replica: name 3 or 6")


def test_several_machines_under_torchrun_are_to_be_named(place, monkeypatch, capsys):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 12), ("LOCAL_WORLD_SIZE", 6)):
        monkeypatch.setenv(name, str(value))
    message = "^dry_run=True under torchrun on several machines. Fix: name the GPUs of all machines, for instance dry_run=16x80"
    refused(capsys, settings_in(place, "qwen2_5_32B_full", dry_run=True), message)


def test_dry_run_gpu_training_and_sampling_is_refused(place, monkeypatch, capsys):
    monkeypatch.setattr(dry, "this_machine", lambda device: Machine(8, 79 * GIB, 500 * GIB, "the 8 GPUs here", True))
    monkeypatch.setattr("torchtune_ext.setup.machine_checks.on_cpu", lambda: False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 4000 * GIB}))
    monkeypatch.setenv("RANK", "0")
    message = "engine.devices='4,5,6,7': GPU 4, 5, 6, 7 of this machine would also be used for training"
    for visible, ranks, fits in ((None, 8, False), (None, 4, True), ("4,5,6,7", 4, False), ("0,1,2,3", 4, True)):
        for name, value in (("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks), ("CUDA_VISIBLE_DEVICES", visible)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))
        cfg = settings_in(place, "qwen2_5_7B_node", dry_run=True)
        if fits:
            assert ran(capsys, cfg)[0] == 0
        else:
            refused(capsys, cfg, message)
    # Without torchrun the plan chooses the number of ranks, which start at 0.
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cfg = settings_in(place, "qwen2_5_7B_node", words=["engine.devices=0"], dry_run=True)
    refused(capsys, cfg, "engine.devices='0': ")


def test_dry_run_needs_only_config_json_lists_gaps(place, tmp_path, capsys):
    cfg = settings_in(place, "qwen2_5_7B_full", dry_run=True)
    cfg.model_dir = str(write_config(tmp_path, "Qwen2.5-7B-Instruct"))
    status, out = ran(capsys, OmegaConf.merge(cfg, {"dry_run": "5x80"}))
    assert status == 2 and "7.616 B parameters" in out and "\nfits on 5 x 80 GB" in out
    assert "problem: " in out and "A start would fail with this error" in out


def test_dry_run_missing_data_is_listed_after_plan(place, capsys):
    cfg = settings_in(place, "qwen2_5_7B_full", dry_run="5x80")
    cfg.task.path = str(place / "later.jsonl")
    status, out = ran(capsys, cfg)
    assert status == 2 and "\nfits on 5 x 80 GB" in out and "\nproblem: task.path=" in out


def test_dry_run_invalid_setting_is_reported_without_table(place, capsys):
    cfg = settings_in(place, "qwen2_5_7B_full", words=["sampling.max_tokens=100000"], dry_run="5x80")
    refused(capsys, cfg, "sampling.max_tokens=100000")
    cfg = settings_in(place, "tiny", words=["optimizer.lr=fast"], dry_run=True)
    refused(capsys, cfg, "optimizer.lr='fast'")


@pytest.mark.parametrize("name", ["qwen2_5_7B_full", "qwen3_8B_fp8", "qwen2_5_7B_lora"])
def test_dry_run_public_model_needs_no_download(name, place, tmp_path, capsys):
    cfg = settings_in(place, name, dry_run="5x80")
    with_files = ran(capsys, cfg)[1]
    cfg.model_dir = str(tmp_path / Path(cfg.model_dir).name)
    status, out = ran(capsys, cfg)
    assert (
        status == 2
        and "sizes: from the published config of Qwen" in out
        and "problem: " in out
        and ": folder not found" in out
    )

    def table(text):
        # The published sizes do not include the length of the RoPE table.
        begin, end = (text.index(f"\n  {name}") for name in ("weights, float32 master", "RoPE table"))
        return text[begin:end]

    assert table(out) == table(with_files)


def test_dry_run_torchtune_builder_needs_no_files(place, tmp_path, capsys):
    cfg = settings_in(place, "qwen2_5_7B_full", dry_run="5x80")
    cfg.model_dir = str(tmp_path / "nothing")
    cfg.model = {"_component_": "torchtune.models.qwen2_5.qwen2_5_7b_instruct"}
    status, out = ran(capsys, cfg)
    assert (
        status == 2
        and "7.616 B parameters" in out
        and "\nfits on 5 x 80 GB" in out
        and "/nothing': folder not found" in out
    )


def test_dry_run_errors_in_several_sections_reported_together(place, capsys):
    cfg = settings_in(place, "tiny", dry_run=True)
    cfg.schedule, cfg.checkpoints.keep_last = {"decay": "zz"}, 0
    with pytest.raises(ValueError, match=r"'zz'.*\ncheckpoints.keep_last=0 must be"):
        ran(capsys, cfg)


@pytest.mark.parametrize("value", ["yes", 4, "4x", "fast"])
def test_dry_run_invalid_machine_is_refused(value, place):
    cfg = settings_in(place, "qwen2_5_7B_full", dry_run=value)
    with pytest.raises(ValueError, match=f"dry_run='?{value}'? "):
        grpo.recipe_main.__wrapped__(cfg)


def test_dry_run_gpus_for_cpu_run_are_refused(place):
    with pytest.raises(ValueError, match="dry_run='4x80' .*device=cpu"):
        grpo.recipe_main.__wrapped__(settings_in(place, "tiny", dry_run="4x80"))


def test_dry_run_without_gpu_plans_for_cpu(place, monkeypatch, capsys):
    monkeypatch.setattr(dry, "this_machine", lambda device: Machine(0, 0, 8 * GIB, "main memory", True))
    words = ["engine.devices=null"]
    status, out = ran(capsys, settings_in(place, "qwen2_5_7B_full", words=words, dry_run=True))
    assert status == 2 and "does NOT fit into main memory (8.0 GiB)" in out
    assert "no GPU is visible, so the run would use the CPU; dry_run=4x80 plans" in out
    for device, named in (("cuda", "device=cuda"), ("auto", "engine.devices=3,4")):
        cfg = settings_in(place, "qwen2_5_7B_full", dry_run=True, device=device)
        refused(capsys, cfg, f"dry_run=True with {named}: this machine has no GPU. Fix: name a machine")


def test_with_gpus_here_they_and_the_disk_count(place, monkeypatch, capsys):
    monkeypatch.setattr(dry, "this_machine", lambda device: Machine(5, 79 * GIB, 500 * GIB, "the 5 GPUs here", True))
    monkeypatch.setattr("torchtune_ext.setup.machine_checks.on_cpu", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # The checkpoints that a 7B run keeps take 397 GiB.
    for free, expected in ((1000 * GIB, 0), (100 * GIB, 2)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        status, out = ran(capsys, settings_in(place, "qwen2_5_7B_full", dry_run=True))
        assert status == expected, out
        assert ("fits on the 5 GPUs here (79.0 GiB each)" if not status else "but 100.0 GiB are free") in out


def test_dry_run_single_rank_prints_with_world_size(place, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    assert ran(capsys, settings_in(place, "tiny", dry_run=True)) == (0, "")
    monkeypatch.setenv("RANK", "0")
    status, out = ran(capsys, settings_in(place, "qwen2_5_7B_full", dry_run="5x80"))
    assert "GPUs: 3 train" in out and status == 0


def test_dry_run_teacher_checked_and_listed_as_excluded(place, capsys):
    cfg = settings_in(place, "tiny", words=["preset=distill"], dry_run="CPU 16")
    cfg.teacher = {"model_dir": cfg.model_dir}
    status, out = ran(capsys, cfg)
    assert status == 0 and f"the plan excludes the teacher's engine ({cfg.model_dir})" in out
    cfg.teacher.model_dir = str(place / "nowhere")
    status, out = ran(capsys, cfg)
    assert status == 2 and "problem: teacher.model_dir=" in out


def test_dry_run_leaves_no_files(place, capsys):
    cfg = settings_in(place, "tiny", dry_run=True)
    before = sorted(place.rglob("*"))
    ran(capsys, cfg)
    assert sorted(place.rglob("*")) == before


def test_the_stand_ins_are_the_published_models(place):
    assert {Path(OmegaConf.load(path).model_dir).name for path in CONFIGS.values()} - {"model"} <= set(PUBLIC)
