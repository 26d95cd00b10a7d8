"""What the strip "What ran when" of the report shows: the timeline of a run, cut into bins of equal length.

For each bin: with how many groups engine and graders were busy, and which share of it each phase of the trainer took. What
lies between the end of one process and the first work of the next one, which goes on with the run, is left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_BINS = 20_000  # So the strip adds at most 0.25 MiB to a page: that is with another value in each bin of nine rows.
_LEAST_S = 0.001  # A bin is at least so long.
_WORKS = ("engine", "graders")

_Spans = dict[str, list[tuple[float, float]]]  # name -> begin and end of each, in seconds


@dataclass(slots=True)
class _Life:
    """What one process has noted."""

    works: _Spans = field(default_factory=lambda: defaultdict(list))
    phases: _Spans = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, list[float]] = field(default_factory=dict)  # step -> its begin and its end

    @property
    def bounds(self) -> tuple[float, float]:
        times = [
            time for spans in (self.works, self.phases) for each in spans.values() for span in each for time in span
        ]
        return min(times), max(times)


def strip_of(events: Iterable[Mapping[str, Any]], max_bins: int = MAX_BINS) -> dict[str, Any] | None:
    """Returns what the page needs, JSON-able, or None where the events show no phase of the trainer.

    Args:
        events: of `timeline.read_trace`, in the order of the file.

    Returns:
        `seconds`: length of a bin. `bins`: how many there are. `works`: for "engine" and "graders" the mean number of groups
        of each bin, in percent of the highest one, which is in `most`. `phases`: for each phase of the trainer its share of
        each bin, in percent. `steps`: number, first bin and the bin behind the last one of each stretch of a step. `cuts`:
        the bins at which time was left out.

    Raises:
        KeyError, TypeError, ValueError: an event lacks what it should have.
    """
    lives = [life for life in _lives(events) if life.phases]
    if not lives:
        return None
    works, phases = defaultdict(list), defaultdict(list)
    steps, cuts, length = [], [], 0.0
    for life in lives:
        begin, end = life.bounds
        later = length - begin  # Each life begins where the one before it ends.
        for all_spans, spans in ((works, life.works), (phases, life.phases)):
            for name, found in spans.items():
                all_spans[name] += [(since + later, until + later) for since, until in found]
        steps += [(step, since + later, until + later) for step, (since, until) in life.steps.items()]
        length += end - begin
        cuts.append(length)
    seconds = max(length / max_bins, _LEAST_S)
    bins = max(1, round(length / seconds))
    edges = np.arange(bins + 1) * seconds
    levels = {name: _mean_count(works.get(name, []), edges) for name in _WORKS}
    most = {name: float(level.max()) for name, level in levels.items()}
    return {
        "seconds": seconds,
        "bins": bins,
        "works": {name: _percent(level / (most[name] or 1.0)) for name, level in levels.items()},
        "most": {name: round(value, 1) for name, value in most.items()},
        "phases": {name: _percent(_mean_count(spans, edges)) for name, spans in phases.items()},
        "steps": [[step, *_bins_of(since / seconds, until / seconds, bins)] for step, since, until in steps],
        "cuts": [round(cut / seconds) for cut in cuts[:-1]],
    }


def _lives(events: Iterable[Mapping[str, Any]]) -> list[_Life]:
    lives, begins = [_Life()], {}
    for event in events:
        kind, at = event["ph"], event["ts"] / 1e6
        if kind == "i":
            lives.append(_Life())
        elif kind == "X" and event["cat"] == "phase":
            until = at + event["dur"] / 1e6
            lives[-1].phases[event["name"]].append((at, until))
            stretch = lives[-1].steps.setdefault(event["args"]["step"], [at, until])
            stretch[:] = min(at, stretch[0]), max(until, stretch[1])
        elif kind == "b":
            begins[event["cat"], event["id2"]["local"]] = at
        elif kind == "e" and event["cat"] in _WORKS:
            lives[-1].works[event["cat"]].append((begins.pop((event["cat"], event["id2"]["local"])), at))
    return lives


def _mean_count(spans: Sequence[tuple[float, float]], edges: np.ndarray) -> np.ndarray:
    """Counts the spans that are open, as a mean over each bin between two edges."""
    if not spans:
        return np.zeros(len(edges) - 1)
    times = np.array(spans).T.ravel()  # all begins, then all ends
    changes = np.repeat([1.0, -1.0], len(spans))
    order = np.argsort(times, kind="stable")
    times, counts = times[order], np.cumsum(changes[order])
    # The integral of the count is linear between two of the times, and even outside them.
    integral = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])
    return np.diff(np.interp(edges, times, integral)) / np.diff(edges)


def _bins_of(since: float, until: float, bins: int) -> tuple[int, int]:
    """Returns the first bin of a stretch, and the one behind its last; what a rounding error has of a bin does not count."""
    first = min(int(since + 1e-3), bins - 1)
    return first, max(first + 1, min(math.ceil(until - 1e-3), bins))


def _percent(shares: np.ndarray) -> list[int]:
    return np.rint(100 * np.clip(shares, 0.0, 1.0)).astype(int).tolist()
