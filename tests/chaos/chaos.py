"""Fault injection at random moments into real runs of the recipe, with checks of fault tolerance.

    python tests/chaos/chaos.py --rounds 100 --seed 1 --table chaos.md
    python tests/chaos/chaos.py --rounds 100 --seed 1 --list         # the drawn rounds
    python tests/chaos/chaos.py --rounds 100 --seed 1 --only 17      # repeat one round
    python tests/chaos/chaos.py --rounds 100 --seed 1 --agents       # with an agent in place of a grader

A round is a run of four small steps (a random model, a real vLLM) with one fault in a drawn phase, and the expected reaction:
either the run continues, or it exits in time with the right status and a message that names the cause, and resumes with
`resume_from_checkpoint=True`. At the end weights, metrics and rollouts are bit-identical to an undisturbed run, and no
process, temporary folder or half-written file is left. Completed rounds are stored in OUT/rounds.jsonl, and a later call
continues after them; a failed round keeps its folder. The exit status is 1 if a round failed.

The phase is observed from outside: task and optimizer of these runs are user components that write a journal of their calls,
and the rest follows from the files of the run. "Hit" is the phase at the fault, "drawn" the intended phase.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from chaos_play import NAMES, RUN_S, Drawn, Play, draw, last_line  # noqa: E402 (it imports helpers)
from chaos_run import Round, make_workspace  # noqa: E402

HEAD = ("fault", "rounds", "passed", "repeated steps", "longest recovery, s", "phases hit", "worst message")
MESSAGE_CHARS = 160


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def reference(out: Path, ranks: int) -> Path:
    """Return the folder of an undisturbed run, made once per OUT and commit."""
    folder, mark = out / f"reference_{ranks}", out / f"reference_{ranks}" / "commit.txt"
    if mark.exists() and mark.read_text() == commit():
        return folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    home = Round(out / "workspace", folder)
    try:
        run = home.start(ranks=ranks)
        if (code := run.wait(RUN_S)) != 0:
            sys.exit(f"the reference run with {ranks} ranks ended with {code}: {last_line(run)}; see {run.log}")
    finally:
        home.end()
    mark.write_text(commit())
    return folder / "run"


def play(drawn: Drawn, out: Path) -> dict[str, Any]:
    """Play a round and return its record."""
    undisturbed, folder = reference(out, drawn.fault.ranks), out / f"round_{drawn.number:04d}"
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    result = Play(drawn, out / "workspace", undisturbed, folder).run()
    seconds = round(time.monotonic() - started, 1)
    if not result.problems:
        shutil.rmtree(folder)
    names = {"round": drawn.number, "fault": drawn.fault.name, "phase": drawn.phase, "step": drawn.step}
    return {**names, "drawn": str(drawn), **asdict(result), "seconds": seconds, "commit": commit()}


def show(record: dict[str, Any], again: str, folder: Path) -> None:
    verdict = "skipped" if record["skipped"] else "FAILED" if record["problems"] else "survived"
    print(
        f"round {record['round']:3d}  {record['fault']:18s} {record['hit'] or '-':26s} {verdict:9s} lost {record['lost']}, "
        f"recovered in {record['recovery_s']:.1f} s, {record['seconds']:.0f} s in all  {record['allowed']}{record['skipped']}"
    )
    for problem in record["problems"]:
        print(f"    {problem}")
    if record["problems"]:
        print(f"    kept in {folder}; again: {again}")
    sys.stdout.flush()


def kept(file: Path, drawn: list[Drawn]) -> dict[int, dict[str, Any]]:
    """Return number -> completed round. Rounds whose drawing has changed since are ignored."""
    lines = file.read_text().splitlines() if file.exists() else []
    records = {record["round"]: record for record in map(json.loads, lines)}  # the last record of a number is valid
    return {d.number: records[d.number] for d in drawn if records.get(d.number, {}).get("drawn") == str(d)}


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Linux {platform.release()}"


def table(seed: int, records: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: one row per fault, failed rounds, losses by design, and faults that could not be tried."""
    rows = [_row(name, [r for r in records if r["fault"] == name]) for name in NAMES]
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *(row for row in rows if row)]
    played = [r for r in records if not r["skipped"]]
    failed = [r for r in played if r["problems"]]
    commits = ", ".join(sorted({r["commit"] for r in records}))
    minutes = sum(r["seconds"] for r in records) / 60
    intro = (
        f"Seed {seed}, commit {commits}, {machine()}. {len(played)} rounds in {minutes:.0f} minutes, "
        f'{len(played) - len(failed)} passed. "Repeated steps" is the maximum in one round; recovery is the '
        "time from the fault to the next new line of metrics, including exits and starts of processes."
    )
    notes = [f"- Round {r['round']} failed ({_where(r)}): {'; '.join(r['problems'])}" for r in failed]
    notes += [f"- By design, round {r['round']} ({_where(r)}): {r['allowed']}." for r in played if r["allowed"]]
    notes += [f"- Not tried, round {r['round']} ({r['fault']}): {r['skipped']}" for r in records if r["skipped"]]
    return "\n".join([intro, "", *lines, *([""] if notes else []), *notes]) + "\n"


def _where(record: dict[str, Any]) -> str:
    return f"{record['fault']}, {record['hit'] or record['phase']}"


def _row(name: str, records: list[dict[str, Any]]) -> str:
    played = [r for r in records if not r["skipped"]]
    if not played:
        return f"| {name} | 0 | not tried |" + " |" * (len(HEAD) - 3) if records else ""
    worst = max(played, key=lambda r: (bool(r["problems"]), r["recovery_s"]))
    phases = sorted({r["hit"].split(",")[0] for r in played if r["hit"]})
    message = " ".join((worst["problems"] or [worst["message"]])[0].split()).replace("|", "\\|")
    survived = sum(not r["problems"] for r in played)
    cells = [
        name, str(len(played)), str(survived), str(max(r["lost"] for r in played)),
        f"{max(r['recovery_s'] for r in played):.1f}", ", ".join(phases), message[:MESSAGE_CHARS],
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the runs (runs/chaos, or runs/chaos_agents)")
    parser.add_argument("--agents", action="store_true", help="runs whose task is an agent at the endpoint")
    parser.add_argument(
        "--faults", nargs="+", choices=NAMES, default=NAMES, metavar="FAULT", help="draw from these only"
    )
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="play these rounds, even if they are complete")
    parser.add_argument("--table", type=Path, metavar="FILE", help="file for the table (OUT/table.md)")
    parser.add_argument("--list", action="store_true", help="print the drawn rounds and stop")
    args = parser.parse_args()
    drawn = [draw(args.seed, number, tuple(args.faults)) for number in range(1, args.rounds + 1)]
    if args.list:
        print("\n".join(map(str, drawn)))
        return 0
    # The runs would inherit an ignored signal.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    args.out = (args.out or Path("runs/chaos_agents" if args.agents else "runs/chaos")).absolute()
    if not (args.out / "workspace").exists():
        make_workspace(args.out / "workspace", args.agents)
    if ("LettersAgent" in (args.out / "workspace" / "run.yaml").read_text()) != args.agents:
        parser.error(
            f"--out {args.out} has runs {'without' if args.agents else 'with'} --agents. Fix: choose another folder"
        )
    file = args.out / "rounds.jsonl"
    records = kept(file, drawn)
    if args.only:
        records = {number: record for number, record in records.items() if number not in args.only}
    faults = f" --faults {' '.join(args.faults)}" if tuple(args.faults) != NAMES else ""
    faults += " --agents" if args.agents else ""
    for d in drawn:
        if d.number in records or (args.only and d.number not in args.only):
            continue
        records[d.number] = record = play(d, args.out)
        with open(file, "a") as lines:
            lines.write(json.dumps(record) + "\n")
        again = f"python tests/chaos/chaos.py --rounds {args.rounds} --seed {args.seed} --out {args.out}{faults}"
        show(record, f"{again} --only {d.number}", args.out / f"round_{d.number:04d}")
    done = [records[number] for number in sorted(records)]
    text = table(args.seed, done)
    print(f"\n{text}")
    (args.table or args.out / "table.md").write_text(text)
    return 1 if any(record["problems"] for record in done) else 0


if __name__ == "__main__":
    sys.exit(main())
