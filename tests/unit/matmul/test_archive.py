"""The archive: noise replaces nothing."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from torchtune_ext.measured.matmul.archive import Archive, ArchiveEntry

HERE, THERE = "processor A, 2 cores", "processor B, 64 cores"


def entry(ratio=2.0, spread=0.02, found=0, source="x", techniques=(), machine=HERE, kernel="dgemm", size=256):
    return ArchiveEntry(
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
def test_archive_elite_replaced_only_beyond_timing_spread(entries, added):
    archive = Archive(entries)
    before = {each.cell: each for each in archive}.get(added.cell)
    became = archive.add(replace(added, source="new"))
    assert became == (before is None or added.speedup_low > before.speedup_high)
    assert {each.cell: each for each in archive}[added.cell] == (replace(added, source="new") if became else before)


@given(entries=ENTRIES)
def test_archive_text_round_trips(entries):
    archive = Archive(entries)
    assert list(Archive.loads(archive.dumps())) == list(archive)
    assert all(json.loads(line) for line in archive.dumps().splitlines())


def test_archive_matches_hand_computed_examples():
    archive = Archive()
    assert archive.add(entry(1.50, 0.02, found=1, source="first"))
    assert not archive.add(entry(1.55, 0.02, found=2, source="a little faster, within the spread"))
    assert [each.source for each in archive] == ["first"]
    assert archive.add(entry(1.90, 0.02, found=4, source="surely"))
    assert archive.add(entry(4.2, 0.02, found=5, source="another band"))
    assert not archive.add(entry(1.1, 0.02, found=6, source="slower"))
    assert {each.cell[-1]: each.source for each in archive} == {0: "surely", 2: "another band"}
    assert [entry(ratio).cell[-1] for ratio in (0.4, 0.5, 0.99, 1.0, 1.99, 2.0, 64.0)] == [-2, -1, -1, 0, 0, 1, 6]
