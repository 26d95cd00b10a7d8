"""Read the file of an offline W&B run with W&B's own reader, the program behind `wandb leet inspect`."""

import json
import subprocess
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass
class Start:
    """Output of W&B's reader for one start of a run."""

    folder: Path
    records: list[dict[str, Any]]
    whole: dict[str, Any]  # run_id, project, tags, config, summary, state, exit_code, ...

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def run(self) -> dict[str, Any]:
        return self.of("run")[0]

    @property
    def history(self) -> dict[int, dict[str, Any]]:
        """Return step -> its merged scalars."""
        scalars: dict[int, dict[str, Any]] = {}
        for line in self.of("history"):
            item = {name: value for name, value in line["item"].items() if not name.startswith(("_", "samples/"))}
            scalars.setdefault(item.pop("step"), {}).update(item)
        return scalars

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """Return key -> columns and data, from the media files."""
        keys = {name: value for name, value in self.whole["summary"].items() if name.startswith("samples/")}
        assert all(value["_type"] == "table-file" for value in keys.values())
        return {name: json.loads((self.folder / "files" / value["path"]).read_text()) for name, value in keys.items()}

    @property
    def artifacts(self) -> dict[str, dict[str, Any]]:
        """Return name -> artifact, without the tables."""
        return {one["name"]: one for one in self.of("artifact") if one["type"] != "run_table"}


def starts(run_dir: Path, number: int, seconds: float = 20.0, ended: bool = True) -> list[Start]:
    """Wait for `number` starts of a run with complete files, and return them; W&B's process may lag on a busy machine."""
    deadline = time.monotonic() + seconds
    while True:
        folders = sorted((run_dir / "wandb").glob("offline-run-*"))
        result = [_start(folder) for folder in folders if list(folder.glob("*.wandb"))]
        if len(result) == number and (not ended or all(one.of("exit") for one in result)):
            return result
        assert time.monotonic() < deadline, (
            f"{run_dir}: {[(one.folder.name, one.whole.get('state')) for one in result]}"
        )
        time.sleep(0.2)


def _start(folder: Path) -> Start:
    (file,) = folder.glob("*.wandb")
    return Start(
        folder, [json.loads(line) for line in _inspect(file).splitlines()], json.loads(_inspect(file, "--summary"))
    )


def _inspect(file: Path, *options: str) -> str:
    # As the command starts it, which would import W&B for each file.
    program = Path(find_spec("wandb").origin).parent / "bin" / "wandb-core"
    command = [
        program,
        "leet",
        "inspect",
        "--no-observability",
        "--json",
        *options,
        "--run-file",
        file,
        file.parents[1],
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
