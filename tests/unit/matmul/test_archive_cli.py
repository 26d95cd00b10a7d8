"""`torchtune-ext archive`: a table, files that compile, and one line for each thing that is wrong."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from archives import MACHINE, made_up_entries

from torchtune_ext.host.cli import main
from torchtune_ext.measured.matmul.archive import FILE, Archive
from torchtune_ext.telemetry import report as archive_in_report


def test_the_report_reads_the_file_that_a_task_writes():
    assert archive_in_report.ARCHIVE == FILE


def make_run(folder, entries):
    folder.mkdir(parents=True, exist_ok=True)
    Archive(entries).save(folder / FILE)
    return folder


def run_main(*words):
    return main(["archive", *map(str, words)])


def test_prints_the_fastest_of_each_kernel(tmp_path, capsys):
    entries = made_up_entries(40, kernels=("dgemm", "gemv"))
    run = make_run(tmp_path / "run", entries)
    assert run_main(run, "--best", 3) == 0
    out = capsys.readouterr().out
    archive = Archive(entries)
    assert out.startswith(f"{len(archive)} cells hold a program, timed on {MACHINE}\n")
    blocks = re.findall(r"^(\w+)\n#.*\n((?:\d.*\n)+)", out, re.MULTILINE)
    assert [kernel for kernel, _ in blocks] == ["dgemm", "gemv"]
    for kernel, rows in blocks:
        best = sorted(
            (entry for entry in archive.cells().values() if entry.kernel == kernel), key=lambda entry: -entry.low
        )
        for number, (row, entry) in enumerate(zip(rows.splitlines(), best[:3], strict=True), 1):
            size = " ".join(f"{name}={length}" for name, length in entry.size)
            techniques = ", ".join(entry.techniques).replace("_", " ") or "none"
            assert re.split(r"  +", row) == [str(number), size, techniques, f"{entry.ratio:.2f}",
                f"{entry.low:.2f} to {entry.high:.2f}", f"{entry.gflops:.3g}", str(entry.found)]  # fmt: skip
    assert run_main(run / FILE, "--best", 3) == 0 and capsys.readouterr().out == out


def test_writes_programs_as_they_were_and_they_compile(tmp_path, capsys):
    run = make_run(tmp_path / "run", made_up_entries(40))
    assert run_main(run, "--best", 5, "--out", tmp_path / "a" / "b") == 0
    index = (tmp_path / "a" / "b" / "index.md").read_text()
    best = Archive.load(run / FILE).best(5, MACHINE)
    names = [f"dgemm_256x256x256_0{number}.c" for number in range(1, 6)]
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [*names, "index.md"]
    assert re.findall(r"\]\((.*?)\)", index) == names and MACHINE in index
    for name, entry in zip(names, best, strict=True):
        text = (tmp_path / "a" / "b" / name).read_bytes().decode()
        head, source = text[: -len(entry.source)], text[-len(entry.source) :]
        assert source == entry.source and all(line.startswith("// ") for line in head.splitlines())
        for said in (
            MACHINE,
            f"step {entry.found}",
            f"{entry.ratio:.2f} times",
            f"± {entry.spread:.1%}",
            f"{entry.low:.2f} to {entry.high:.2f}",
        ):
            assert said in head
        assert ", ".join(entry.techniques).replace("_", " ") in head
        if compiler := shutil.which("gcc"):
            subprocess.run(
                [compiler, "-c", "-fopenmp", "-march=native", tmp_path / "a" / "b" / name, "-o", tmp_path / "out.o"],
                check=True,
            )
    assert f"{tmp_path / 'a' / 'b' / 'index.md'}: 5 programs beside it" in capsys.readouterr().out


def test_files_that_are_there_stay(tmp_path, capsys):
    run, out = make_run(tmp_path / "run", made_up_entries(40)), tmp_path / "out"
    for name in ("index.md", "dgemm_256x256x256_02.c"):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / name).symlink_to("nowhere")  # a link that leads nowhere is somebody's, too
        assert run_main(run, "--out", out) == 2
        ended = capsys.readouterr()
        assert (
            ended.out == ""
            and ended.err
            == f"torchtune-ext archive: {out / name} is there already and stays; name another folder with --out\n"
        )
        assert [path.name for path in out.iterdir()] == [name]
    (out / "dgemm_256x256x256_02.c").rename(out / "mine.c")
    assert run_main(run, "--best", 2, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "dgemm_256x256x256_01.c",
        "dgemm_256x256x256_02.c",
        "index.md",
        "mine.c",
    ]


def test_names_from_a_file_reach_neither_terminal_nor_compiler_nor_path(tmp_path, capsys):
    entry = made_up_entries(1)[0]
    evil = "../x\x1b[31m\n#error\n|??/\\"
    entries = [
        replace(entry, kernel=f"{evil}{end}", machine=f"CPU {evil}", source="int a;\r\n\ud800") for end in ("a", "\na")
    ]
    run = make_run(tmp_path / "run", entries)
    assert run_main(run, "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.count("#error") == 3  # the machine, once, and two kernels: each within its line
    assert not re.search("^#error", out, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    files = sorted((tmp_path / "out").glob("*.c"))
    assert len(files) == 2, "two kernels whose names differ only in what a file cannot have"
    for file in files:
        lines = file.read_bytes().split(b"\n")
        assert [line.startswith(b"// ") for line in lines] == [True] * 4 + [False] * 2
        assert not any(line.endswith((b"\\", b"??/")) for line in lines) and lines[4:] == [b"int a;\r", b"?"]
    table = (tmp_path / "out" / "index.md").read_text().splitlines()[-2:]
    assert [line.count("|") for line in table] == [9, 9]


def test_of_several_machines_one_is_named(tmp_path, capsys):
    other = MACHINE.replace("2 cores", "64 cores")
    run = make_run(tmp_path / "run", made_up_entries(10) + made_up_entries(10, seed=1, machine=other))
    assert run_main(run) == 2
    assert capsys.readouterr().err == (
        f"torchtune-ext archive: 2 machines, whose speeds cannot be compared; name one with --machine: {MACHINE}; {other}\n"
    )
    counts = {}
    for words in ("2 cores", "64 cores", MACHINE):
        assert run_main(run, "--machine", words) == 0
        counts[words] = capsys.readouterr().out.splitlines()[0]
    assert counts["64 cores"].endswith(f"timed on {other}") and counts["2 cores"] == counts[MACHINE]
    assert counts[MACHINE].startswith(f"{len(Archive(made_up_entries(10)))} cells")
    for words, message in (("Imaginary", "several machines have"), ("other", "no machine has")):
        assert run_main(run, "--machine", words) == 2
        assert re.fullmatch(
            rf"torchtune-ext archive: --machine '{words}': {message} this in its name; choose of: .*\n",
            capsys.readouterr().err,
        )


def test_what_is_wrong_is_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "run", made_up_entries(10))
    whole = (run / FILE).read_text()
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "young", [])
    damages = {
        "cut": whole[:-40],
        "missing": whole.rsplit("\n", 2)[0] + "\n",
        "format": whole.replace('"format": 1', '"format": 2'),
        "deep": "[" * 100_000,
        "number": re.sub('"machine": "[^"]*"', '"machine": 5', whole, count=1),
        "program": re.sub('"source": "', '"source": 7, "other": "', whole, count=1),
        "huge": re.sub(r'\["m", 256\]', '["m", Infinity]', whole, count=1),
        "nan": re.sub(r'"ratio": [\d.]+', '"ratio": NaN', whole, count=1),
        "bytes": "\udcff" + whole,
    }
    for name, text in damages.items():
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    (tmp_path / "file").touch()
    for words, message in (
        ((tmp_path / "nowhere",), "no such file or folder; name the folder of a run"),
        ((tmp_path / "empty",), "no such file; a run writes it"),
        ((tmp_path / "young",), "holds no program yet; let the run go on"),
        ((tmp_path / "file" / "x",), "cannot be read: Not a directory"),
        ((run, "--best", 0), "--best 0: ask for at least 1 program"),
        ((run, "--best", -3), "--best -3: ask for at least 1 program"),
        ((run, "--out", tmp_path / "file"), f"cannot write into {tmp_path / 'file'}"),
        *(((tmp_path / name,), f"{tmp_path / name}: damaged or cut off") for name in damages),
    ):
        assert run_main(*words) == 2, words
        ended = capsys.readouterr()
        assert ended.out == "" and message in ended.err and ended.err.count("\n") == 1, words


@pytest.mark.parametrize("word", ["x", "1.5"])
def test_a_number_must_be_one(tmp_path, word):
    with pytest.raises(SystemExit) as ended:
        run_main(tmp_path, "--best", word)
    assert ended.value.code == 2
