"""Results that are kept: which ones, for how long, and in a file that somebody was killed in the middle of."""

import json
import logging
import os
from dataclasses import fields, replace

import pytest
from tables import every_row

from torchtune_ext.measured import cache as caches
from torchtune_ext.measured.cache import Cache
from torchtune_ext.measured.check import OUTCOMES
from torchtune_ext.measured.results import NOISY, Result
from torchtune_ext.measured.timing import Timing

TIMING = Timing(
    **{each.name: {float: 0.1, int: 30, bool: True}[each.type] for each in fields(Timing)} | {"disturbed": 0.0}
)


def result(outcome="ok", note="", timing=None) -> Result:
    return Result("dgemm", outcome, "time" if timing else "verify", note, timing, {"compile": 0.25}, "a machine")


def test_what_comes_back_is_equal_and_says_that_it_is_cached(tmp_path):
    kept = {
        "a": result(timing=TIMING),
        "b": result("wrong_result", "B[0] is 1\nand should be 2 \u2028 \ud800"),
        "c": result("format"),
    }
    first = Cache(tmp_path / "results.jsonl")
    for key, each in kept.items():
        first.put(key, each)
    later = Cache(tmp_path / "results.jsonl")
    for cache in (first, later):
        for key, each in kept.items():
            found = cache.get(key)
            assert found.is_cached and found != each
            assert Result(**{**{name: getattr(found, name) for name in Result.__slots__}, "is_cached": False}) == each
        assert cache.get("d") is None
        cache.close()


def test_what_was_measured_beside_a_neighbor_is_not_kept():
    cache = Cache()
    cache.put("a", result(timing=replace(TIMING, disturbed=0.5)))
    assert cache.get("a") is None


@every_row("outcome", [*OUTCOMES, NOISY])
def test_only_what_would_come_again_is_kept(outcome):
    cache = Cache()
    cache.put("a", result(outcome))
    assert (cache.get("a") is None) == (outcome in ("timeout", "noisy"))
    cache.put("b", result("runtime_error", "SIGKILL: it was killed, perhaps for memory (n = 3)"))
    assert cache.get("b") is None


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path, caplog):
    file = tmp_path / "results.jsonl"
    cache = Cache(file)
    for key in "abc":
        cache.put(key, result(timing=TIMING))
    cache.close()
    whole = file.read_bytes()
    for cut in (1, 2, 40, len(whole) // 3 - 1):  # bytes that are missing
        file.write_bytes(whole[:-cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            cache = Cache(file)
        assert cache.get("a") and cache.get("b")
        assert (cache.get("c") is None) == (cut > 1) == ("1 lines cannot be read" in caplog.text)
        cache.put("d", result())
        cache.close()
        again = Cache(file)
        assert again.get("a") and again.get("d")
        again.close()


def test_lines_of_another_version_are_left_out(tmp_path, caplog):
    file = tmp_path / "results.jsonl"
    lines = [{"key": "a", "result": {"outcome": "ok"}}, {"key": "b"}, [], 5]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cache = Cache(file)
    assert cache.get("a") is None and "4 lines cannot be read" in caplog.text
    cache.close()


def test_two_who_append_do_not_write_into_each_others_lines(tmp_path):
    file = tmp_path / "results.jsonl"
    first, second = Cache(file), Cache(file)
    for i in range(50):
        first.put(f"first {i}", result(note="x" * 100 * i))
        second.put(f"second {i}", result(note="y" * 100 * i))
    later = Cache(file)
    assert all(later.get(f"{who} {i}") for who in ("first", "second") for i in range(50))
    for cache in (first, second, later):
        cache.close()
        cache.close()


def test_memory_has_a_bound(monkeypatch):
    monkeypatch.setattr(caches, "MAX_RESULTS", 3)
    cache = Cache()
    for key in "abc":
        cache.put(key, result())
    cache.put("d", result())
    assert [cache.get(key) is not None for key in "abcd"] == [False, True, True, True]


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path):
    with pytest.raises(
        ValueError, match=r"bench.cache='.*nowhere.*': No such file or directory; name a file in a folder that exists"
    ):
        Cache(tmp_path / "nowhere" / "results.jsonl")
    with pytest.raises(ValueError, match="Is a directory"):
        Cache(tmp_path)


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path, caplog):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    file = tmp_path / "results.jsonl"
    cache = Cache(file)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, cache._out)
    os.close(full)
    for key in "ab":
        cache.put(key, result())
    assert cache.get("a") and cache.get("b") and "No space left" in caplog.text
    assert caplog.text.count("the cache of results is not written any more") == 1
