"""All tested usage errors. `python tests/mistakes/table.py` runs each case and prints its message."""

import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    # As in tests/conftest.py: one thread, so that a fork is safe, and no network.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root / "tests"))

from trying import Mistake, attempt, import_all, in_fork, make_place
from wrong_folders import FOLDERS
from wrong_parts import CLASSES, MODELS
from wrong_words import COMMANDS, KEYS, VALUES

GROUPS: dict[str, dict[str, Mistake]] = {
    "arguments": COMMANDS,
    "keys": KEYS,
    "values": VALUES,
    "classes and data": CLASSES,
    "model directories": MODELS | FOLDERS,
}
MISTAKES = {f"{group}: {name}": mistake for group, rows in GROUPS.items() for name, mistake in rows.items()}


def main() -> None:
    """Print name, command and message of each case whose name contains one of the arguments."""
    words = sys.argv[1:]
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        place = make_place(Path(folder) / "right")
        for number, (name, mistake) in enumerate(MISTAKES.items(), 1):
            if not words or any(word in name for word in words):
                result = attempt(mistake, place, Path(folder) / str(number), in_fork)
                print(
                    f"{number} {name}\n    $ torchtune-ext {mistake.typed}\n    {result.text.replace(chr(10), chr(10) + '    ')}"
                )
                print(
                    f"    [status {result.status}]{' changed: ' + ', '.join(result.changed) if result.changed else ''}\n"
                )


if __name__ == "__main__":
    main()
