"""The benchmark service as a whole: what a checker says alone, also with processes that are killed, and nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from helpers.calm_kernels import HONEST, SUM, CalmReduction, fenced
from helpers.waiting import wait_until

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.bench import Bench, Result
from torchtune_ext.measured.check import Checker, Deadlines
from torchtune_ext.measured.kernels import Reduction
from torchtune_ext.measured.sandbox import SandboxError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]

ROOT = Path(__file__).resolve().parents[2]
DEADLINES = Deadlines(screen_s=10.0, compile_s=20.0, load_s=2.0, verify_s=1.5)
WAIT_S = 250.0  # others may time on these cores, too
# What a model may write, by how it ends.
PROGRAMS = {
    "right": HONEST,
    "right in another way": SUM.format("double s = 0, t = 0; int i = 0; for (; i + 1 < n; i += 2) s += x[i], t += x[i + 1]; for (; i < n; i++) s += x[i]; *total = s + t;"),
    "nothing": SUM.format(""),
    "single precision": HONEST.replace("double s", "float s"),
    "off by one": HONEST.replace("i < n", "i < n - 1"),
    "never ends": SUM.format("for (volatile int i = 0;; i++);"),
    "sleeps while it loads": "#include <unistd.h>\n__attribute__((constructor)) static void linger(void) { for (;;) sleep(1); }\n" + HONEST,
    "crashes": SUM.format("*total = x[-1000000];"),
    "writes beside": HONEST.replace("*total = s", "*total = s, total[-1] = 0"),
    "divides by zero": SUM.format("volatile int zero = 0; *total = 1 / zero;"),
    "aborts": SUM.format("__builtin_trap();"),
    "fork bomb": "#include <unistd.h>\n" + SUM.format("for (;;) fork();"),
    "a shell": "#include <stdlib.h>\n" + SUM.format('system("kill -9 -1");'),
    "no C": "def reduction(n, x): return sum(x)",
    "another function": HONEST.replace("reduction", "sum"),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[str, str]]:
    """What a checker says of each program."""
    try:
        with Checker(Reduction(20_011), deadlines=DEADLINES) as checker:
            verdicts = {name: checker.check(fenced(source)) for name, source in PROGRAMS.items()}
            verdicts["prose"] = checker.check("I would use vector instructions.")
    except SandboxError as error:
        pytest.skip(str(error))
    pairs = {name: (verdict.outcome, verdict.stage) for name, verdict in verdicts.items()}
    assert {outcome for outcome, _ in pairs.values()} >= {"ok", "wrong_result", "timeout", "runtime_error", "forbidden", "compile_error", "format"}  # fmt: skip
    return {name: (outcome, "time" if outcome == "ok" else stage) for name, (outcome, stage) in pairs.items()}


def outcomes(results: dict[str, Result]) -> dict[str, tuple[str, str]]:
    return {name: (result.outcome, result.stage) for name, result in results.items()}


def test_bench_process_crashes_keep_all_results(alone, caplog, monkeypatch):
    """Both kinds, again and again, at moments that nobody chose."""
    names = [name for name in PROGRAMS if alone[name][0] != "timeout"]
    ended, attempted = Counter(), Bench._call_with_retries

    async def counted(bench, stage, *what):
        answer = await attempted(bench, stage, *what)
        ended[stage] += 1
        return answer

    monkeypatch.setattr(Bench, "_call_with_retries", counted)
    with Bench(workers=2, budget_s=0.4, deadlines=DEADLINES) as bench:
        futures = {
            (name, i): bench.submit(CalmReduction(), fenced(f"/* {i} */ {PROGRAMS[name]}"))
            for i in range(2)
            for name in names
        }
        last = bench.submit(CalmReduction(), fenced("/* last */ " + HONEST))
        for kind in ("check", "check", "time") * 2:
            # Further ones of this kind have ended, so that the processes have started since the last kill.
            before, deadline = ended[kind], time.monotonic() + WAIT_S
            while (ended[kind] == before or not bench._scheduler.running[kind]) and not last.done():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(bench._pools[kind].pids()[0], signal.SIGKILL)
        results = {name: future.result(timeout=WAIT_S) for name, future in futures.items()}
        assert {name: outcome for (name, _), outcome in outcomes(results).items()} == {
            name: alone[name] for name in names
        }
        assert last.result(timeout=WAIT_S).outcome == "ok"
        assert 1 <= caplog.text.count("is repeated") <= 6


def test_a_killed_owner_leaves_no_process(tmp_path):
    """In the middle of a check and of a timing."""
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from helpers.calm_kernels import HONEST, SUM, CalmReduction, fenced
            from torchtune_ext.measured.bench import Bench

            bench = Bench(workers=2, budget_s=600.0)
            hanging = bench.submit(CalmReduction(), fenced(SUM.format("for (volatile int i = 0;; i++);")))
            # Its own noise keeps it from being narrow, and so it is timed until the budget ends.
            noisy = HONEST.replace("*total = s", "for (volatile int j = 0; j < (int)(1e6 * x[0]); j++); *total = s")
            timed = bench.submit(CalmReduction(), fenced(noisy))
            while not bench._scheduler.running["time"]:
                time.sleep(0.01)
            print(bench._pools["time"].folder, flush=True)
            time.sleep(600)
            """
        )
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    owner = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        folder = Path(owner.stdout.readline().strip())
        assert folder.is_dir()
        processes = psutil.Process(owner.pid)
        wait_until(lambda: len(processes.children(recursive=True)) >= 4)  # those of the timing have started, too
        below = processes.children(recursive=True)
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=30)
        _, alive = psutil.wait_procs(below, timeout=20)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
        wait_until(lambda: not folder.exists())
    finally:
        owner.kill()
        owner.stdout.close()
