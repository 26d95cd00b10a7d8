"""What holds for the timeline of any run (`trace.json`), after Chrome's "Trace Event Format"."""

import json

from torchtune_ext.telemetry.timeline import read_trace

# The fields that the document and the importers of Perfetto and chrome://tracing need, by the kind of an event.
NEEDED = {
    "X": {"name": str, "cat": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
    "b": {"name": str, "cat": str, "ts": int, "id2": dict, "pid": int, "tid": int, "args": dict},
    "e": {"name": str, "cat": str, "ts": int, "id2": dict, "pid": int, "tid": int},
    "i": {"name": str, "ts": int, "s": str, "pid": int, "tid": int},
    "M": {"name": str, "ts": int, "pid": int, "tid": int, "args": dict},
}


def events_of(path):
    return list(read_trace(path))


def as_chrome_reads(path):
    """The events as the importer of chrome://tracing makes them of a file without the last bracket: it drops a comma at the
    end, adds the bracket, and parses."""
    return json.loads(path.read_text().rstrip().removesuffix(",") + "]")


def require_valid(events):
    """Raises AssertionError where an event lacks a field, spans of the trainer overlap without nesting, or a begin and an end
    do not pair up."""
    for event in events:
        for field, kind in NEEDED[event["ph"]].items():
            assert type(event[field]) is kind, (field, event)
    require_nested([e for e in events if e["ph"] == "X"])
    spans(events)


def require_nested(complete):
    around = []
    for event in sorted(complete, key=lambda e: (e["ts"], -e["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if around:
            assert event["ts"] + event["dur"] <= around[-1]["ts"] + around[-1]["dur"], (event, around[-1])
        around.append(event)


def spans(events):
    """The pairs of b and e as (track, begin, end, args), times in seconds, in the order of their ends in the file."""
    begun, found = {}, []
    for event in events:
        if event["ph"] not in "be":
            continue
        key = event["cat"], *event["id2"].items()
        if event["ph"] == "b":
            assert key not in begun, event
            begun[key] = event
        else:
            begin = begun.pop(key)
            assert begin["name"] == event["name"] and begin["ts"] <= event["ts"], (begin, event)
            found.append((event["name"], begin["ts"] / 1e6, event["ts"] / 1e6, begin["args"]))
    assert not begun, f"without an end: {list(begun.values())}"
    return found


def phases(events, name):
    """Step -> begin and end of each phase of that name, in seconds."""
    found = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "phase" and event["name"] == name:
            begin = event["ts"] / 1e6
            found.setdefault(event["args"]["step"], []).append((begin, begin + event["dur"] / 1e6))
    return found
