"""The archive: replaced by noise never, and whole after kill -9."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_ext.measured.matmul.archive import Archive, Entry

HERE, THERE = "processor A, 2 cores", "processor B, 64 cores"


def entry(ratio=2.0, spread=0.02, found=0, source="x", techniques=(), machine=HERE, kernel="dgemm", size=256):
    return Entry(
        machine, kernel, {"m": size, "n": size, "k": size}, techniques, source, ratio, spread, 2 * ratio, found
    )


# Few different numbers, so that intervals touch, ages repeat and cells are shared.
ENTRIES = st.lists(
    st.builds(
        entry,
        ratio=st.one_of(st.sampled_from([1.0, 1.01, 1.03, 1.1, 1.5, 1.9, 2.0, 4.1]), st.floats(0.1, 50.0)),
        spread=st.sampled_from([0.0, 0.01, 0.05, 0.3]),
        found=st.integers(0, 6),
        source=st.sampled_from(["a", "b", "c", "d\n\u00e4"]),
        techniques=st.sampled_from([(), ("blocking",), ("blocking", "threads")]),
        machine=st.sampled_from([HERE, THERE]),
    ),
    max_size=12,
)


@given(
    entries=ENTRIES,
    added=st.builds(entry, ratio=st.floats(1.0, 1.99), spread=st.sampled_from([0.0, 0.02, 0.2]), found=st.just(9)),
)
def test_an_elite_gives_way_only_to_what_is_faster_beyond_its_spread(entries, added):
    archive = Archive(entries)
    before = {each.cell: each for each in archive}.get(added.cell)
    became = archive.add(replace(added, source="new"))
    assert became == (before is None or added.low > before.high)
    assert {each.cell: each for each in archive}[added.cell] == (replace(added, source="new") if became else before)


@given(entries=ENTRIES)
def test_a_file_holds_what_was_saved(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("archive") / "archive.jsonl"
    archive = Archive(entries)
    archive.save(path)
    assert Archive.load(path).dumps() == archive.dumps()
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_figures_worked_by_hand():
    archive = Archive()
    assert archive.add(entry(1.50, 0.02, found=1, source="first"))
    assert not archive.add(entry(1.55, 0.02, found=2, source="a little faster, within the spread"))
    assert [each.source for each in archive] == ["first"]
    assert archive.add(entry(1.90, 0.02, found=4, source="surely"))
    assert archive.add(entry(4.2, 0.02, found=5, source="another band"))
    assert not archive.add(entry(1.1, 0.02, found=6, source="slower"))
    assert {each.cell[-1]: each.source for each in archive} == {0: "surely", 2: "another band"}
    assert [entry(ratio).cell[-1] for ratio in (0.4, 0.5, 0.99, 1.0, 1.99, 2.0, 64.0)] == [-2, -1, -1, 0, 0, 1, 6]


def test_damage_is_named(tmp_path):
    path = tmp_path / "archive.jsonl"
    Archive([entry(2.0, source=str(number), techniques=[f"t{number}"]) for number in range(5)]).save(path)
    whole = path.read_text()
    for damaged in (whole[:-30], whole.replace('"ratio"', '"rate"'), "[]", whole.replace("2.0", "0.0")):
        path.write_text(damaged)
        with pytest.raises(ValueError, match="archive.jsonl: damaged"):
            Archive.load(path)


WRITER = """
import sys
from pathlib import Path
from torchtune_ext.measured.matmul.archive import Archive, Entry
archive, path = Archive(), Path(sys.argv[1])
for number in range(1, 1000000):
    archive.add(Entry("m", "dgemm", {"m": 8}, [f"t{number % 40}"], "x" * 3000, 1.0 + number, 0.01, 1.0, number))
    archive.save(path)
    print(number, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_readable_file(tmp_path):
    path, rng = tmp_path / "archive.jsonl", random.Random(1)
    for _ in range(6):
        path.unlink(missing_ok=True)
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        try:
            child.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.15))
            os.kill(child.pid, signal.SIGKILL)
            numbers = [1, *map(int, child.stdout.read().split())]
        finally:
            child.kill()
            child.wait()
        newest = max(each.found for each in Archive.load(path))
        # What was said to be saved is there; one more may have been saved and not said.
        assert newest in (numbers[-1], numbers[-1] + 1)
