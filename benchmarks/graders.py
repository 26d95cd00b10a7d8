"""False positives and false negatives of mathematical graders.

    python benchmarks/graders.py [FILE] [--list]

FILE holds one JSON row a line: `gold`, `text`, `want` (1 or 0) and `kind`. The default is the table of the tests. Two
graders are compared by kind: `MathGrader`, and math-verify as its README uses it.
"""

import argparse
import collections
import json
import logging
import time
from pathlib import Path

from torchtune_ext.tasks.answers import MathGrader

TABLE = Path(__file__).parents[1] / "tests" / "data" / "math_answers.jsonl"
LIMIT_S = 5


def plain_math_verify(gold: str, text: str) -> float:
    import math_verify

    def parse(written: str) -> list:
        return math_verify.parse(written, parsing_timeout=LIMIT_S)

    return float(math_verify.verify(parse(f"\\boxed{{{gold}}}"), parse(text), timeout_seconds=LIMIT_S))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--list", action="store_true", help="print each row that MathGrader grades wrongly")
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    ours = MathGrader()
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    wrong, slowest = [], (0.0, "")
    for line in args.file.read_text().splitlines():
        row = json.loads(line)
        begin = time.monotonic()
        try:
            reward = ours(row["gold"], row["text"]).reward
        except Exception as error:  # noqa: BLE001 (it is printed)
            print("raises:", row, error)
            reward = 1.0 - row["want"]
        slowest = max(slowest, (time.monotonic() - begin, row["text"]))
        for name, paid in (("ours", reward), ("math-verify", plain_math_verify(row["gold"], row["text"]))):
            for kind in (row["kind"], "all"):
                counts[kind]["rows"] += name == "ours"
                counts[kind][f"{name} pays wrong"] += paid > 0.5 and not row["want"]
                counts[kind][f"{name} denies right"] += paid < 0.5 and bool(row["want"])
        if (reward > 0.5) != bool(row["want"]):
            wrong.append(row)
    columns = [
        "rows",
        *(f"{name} {what}" for name in ("ours", "math-verify") for what in ("pays wrong", "denies right")),
    ]
    print(f"{'kind':24s}", *columns)
    for kind in sorted(counts, key=lambda kind: (kind == "all", kind)):
        print(f"{kind:24s}", *(f"{counts[kind][column]:{len(column)}d}" for column in columns))
    print(f"slowest text of MathGrader: {slowest[0]:.2f} s: {slowest[1][:80]!r}")
    for row in wrong if args.list else []:
        print(
            "denied right" if row["want"] else "PAID WRONG  ",
            row["kind"],
            "gold",
            repr(row["gold"]),
            "text",
            repr(row["text"]),
        )


if __name__ == "__main__":
    main()
