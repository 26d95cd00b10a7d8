"""An independent parser of Temporal Clue prompts: text -> pieces and clues, tested on every possible night."""

import itertools
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from torchtune_ext.tasks.temporal_clue import clues as statements
from torchtune_ext.tasks.temporal_clue.scenario import MURDER_WEAPON, MURDERER, Scenario, World, motive_role

DATA = Path(os.environ.get("TORCHTUNE_EXT_DATA", Path(__file__).parents[2] / "../shared/data")) / "temporal-clue"


def public_puzzles() -> list[dict]:
    if not (DATA / "val.json").exists():
        return []
    snapshot = json.loads((DATA / "puzzle_snapshot_seed42.json").read_text())
    return [*json.loads((DATA / "val.json").read_text()), snapshot]


needs_public = pytest.mark.skipif(not public_puzzles(), reason=f"no public puzzles in {DATA}")


@dataclass
class Reading:
    suspects: list[str]
    weapons: list[str]
    rooms: list[str]
    cell: dict[str, tuple[int, int]]  # room -> (row, column) of the drawing
    times: list[str]  # [""] when the puzzle does not mention time
    motives: dict[str, int]  # motive -> number of suspects
    clues: list[tuple]
    questions: dict[str, tuple]  # letter -> what is asked
    main: int  # number of main questions
    kinds: dict[str, str] = field(default_factory=dict)  # letter -> kind of answer

    def beside(self, room: str, other: str, direction: str) -> bool:
        """Whether `room` is just `direction` of `other` in the drawing."""
        down, right = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}[direction]
        row, column = self.cell[other]
        return self.cell[room] == (row + down, column + right)


def read(text: str) -> Reading:
    parts = text.split("\n\n")
    after = {paragraph.split(":")[0]: parts[n + 1] for n, paragraph in enumerate(parts[:-1])}

    def block(start: str) -> list[str]:
        values = [value for key, value in after.items() if key.startswith(start)]
        return values[0].split("\n") if values else []

    suspects = [line.removeprefix("• ") for line in parts[1].split("\n")]
    weapons = [line.removeprefix("• ") for line in block("And the following weapons")]
    numbered = dict(line.split(". ") for line in block("The murder could only have occured"))
    cell = {}
    drawing = block("The rooms are laid out")[1:-1]
    for row, line in enumerate(drawing):
        for column, number in enumerate(line.removeprefix("W ").removesuffix(" E").split("|")):
            if number != "-":
                cell[numbered[number]] = (row, column)
    times = [line.removeprefix("• ") for line in block("The exact time")] or [""]
    motives = {}
    for line in block("Each suspect"):
        motive, count = re.fullmatch(r"• (\w+)(?: \((\d+) suspects?\))?", line).groups()
        motives[motive] = int(count or 1)
    who = Namer(suspects, weapons, list(numbered.values()), times, list(motives))
    lines = [line.removeprefix("- ") for line in block("The available clues")]
    questions = [line.split(". ", 1) for line in block("Please answer")]
    bonus = [line.split(". ", 1) for line in block("And the following bonus")]
    reading = Reading(suspects, weapons, list(numbered.values()), cell, times, motives, [], {}, len(questions))
    reading.clues = [who.clue(line) for line in lines]
    reading.questions = {letter: who.question(words) for letter, words in questions + bonus}
    reading.kinds = dict(line.split(". ") for line in block("Fill out"))
    return reading


class Namer:
    """Matches names in a sentence. "A suspect" may be several; "the suspect" is one."""

    def __init__(self, suspects: list[str], weapons: list[str], rooms: list[str], times: list[str], motives: list[str]):
        def any_of(names: list[str]) -> str:
            return "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"

        motivated = rf"(?:[Tt]he|[Aa]) suspect motivated by (?:{any_of(motives)})"
        self.suspect = rf"(?:{any_of(suspects)}|[Tt]he murderer|{motivated})"
        self.weapon = rf"(?:[Tt]he (?:{any_of(weapons)})|[Tt]he murder weapon)"
        self.piece = rf"({self.suspect}|{self.weapon}|Mr\. Boddy)"
        self.place = rf"(?:at (?=the Fountain)|in (?!the Fountain))the ({any_of(rooms)})"
        self.room = rf"the ({any_of(rooms)})"
        self.time = "" if times == [""] else rf" at ({any_of(times)})"
        self.named, self.motive = any_of(suspects), any_of(motives)
        self.arms = any_of(weapons)

    def match(self, pattern: str, words: str) -> list[str] | None:
        match = re.fullmatch(pattern, words)
        return None if match is None else [re.sub("^(The|A) ", lambda m: m[0].lower(), g) for g in match.groups()]

    def clue(self, line: str) -> tuple:
        assert line[0].isupper(), line
        for word, name in ((" if and only if ", "iff"), (" or ", "or")):
            if word in line:
                first, second = line.split(word)
                assert not re.match("The |A ", second), line
                return name, self.simple(first), self.simple(second)
        return self.simple(line)

    def simple(self, words: str) -> tuple:
        at = self.time
        forms = {
            "place": rf"{self.piece} was {self.place}{at}",
            "same room": rf"{self.piece} was in the same room as {self.piece}{at}",
            "together": rf"{self.piece} and {self.piece} were {self.place} together at least once",
            "beside": rf"{self.piece} was in the room just (north|south|east|west) of {self.piece}{at}",
            "moved": rf"({self.suspect}) moved from {self.room} to {self.room}{at}",
            "carried": rf"({self.suspect}) moved ({self.weapon}) from {self.room} to {self.room}{at}",
            "motive": rf"({self.named}) is motivated by ({self.motive})",
            "murdered by": rf"Mr\. Boddy was murdered by ({self.suspect})",
            "murdered with": rf"Mr\. Boddy was killed with (the (?:{self.arms}))",
            "murdered in": rf"Mr\. Boddy was murdered {self.place}",
        }
        if self.time:
            forms["murdered at"] = rf"Mr\. Boddy was murdered{at}"
        matched = [(name, *groups) for name, form in forms.items() if (groups := self.match(form, words)) is not None]
        assert len(matched) == 1, (words, matched)
        if matched[0][0] in ("place", "same room", "beside", "moved", "carried") and not self.time:
            return (*matched[0], "")
        return matched[0]

    def question(self, words: str) -> tuple:
        forms = {
            "murderer": r"Who murdered Mr\. Boddy\?",
            "weapon": r"What weapon did the murderer use\?",
            "room": r"Where was the murder committed\?",
            "time": r"When did the murder occur\?",
            "motive": r"Why did the murderer do it\?",
            "where": rf"Where was ({self.suspect}|{self.weapon}){self.time}\?",
            "motive of": rf"What motivates ({self.named})\?",
            "who has": rf"Who is motivated by ({self.motive})\?",
        }
        matched = [(name, *groups) for name, form in forms.items() if (groups := self.match(form, words)) is not None]
        assert len(matched) == 1, (words, matched)
        return (*matched[0], "") if matched[0][0] == "where" and not self.time else matched[0]


@dataclass
class Night:
    at: dict[tuple[str, str], str]  # (piece as the clues name it, time) -> room
    motive: dict[str, str]  # suspect -> motive
    murderer: str
    weapon: str  # "the Rope"
    room: str
    time: str

    def pieces(self, name: str) -> list[str]:
        if name == "the murderer":
            return [self.murderer]
        if name == "the murder weapon":
            return [self.weapon]
        if " suspect motivated by " in name:
            motive = name.split(" motivated by ")[1]
            return [suspect for suspect, other in self.motive.items() if other == motive]
        return [name]


def holds(r: Reading, night: Night, clue: tuple) -> bool:
    kind, *rest = clue
    if kind in ("iff", "or"):
        first, second = (holds(r, night, part) for part in rest)
        return (first == second) if kind == "iff" else (first != second)  # "or" is exclusive
    if kind == "place":
        who, room, time = rest
        return any(night.at[p, time] == room for p in night.pieces(who))
    if kind == "same room":
        who, other, time = rest
        return any(night.at[p, time] == night.at[q, time] for p in night.pieces(who) for q in night.pieces(other))
    if kind == "together":
        who, other, room = rest
        pairs = itertools.product(night.pieces(who), night.pieces(other), r.times)
        return any(night.at[p, t] == night.at[q, t] == room for p, q, t in pairs)
    if kind == "beside":
        who, direction, other, time = rest
        (p,), (q,) = night.pieces(who), night.pieces(other)
        return r.beside(night.at[p, time], night.at[q, time], direction)
    if kind in ("moved", "carried"):
        who, *cargo, start, end, time = rest
        before = r.times[r.times.index(time) - 1]
        weapons = night.pieces(cargo[0]) if cargo else []
        went = {x for x in [*r.suspects, *weapons] if (night.at[x, before], night.at[x, time]) == (start, end)}
        return any({p, *weapons} <= went for p in night.pieces(who))
    if kind == "motive":
        return night.motive[rest[0]] == rest[1]
    if kind == "murdered by":
        return night.murderer in night.pieces(rest[0])
    return rest[0] == {"murdered with": night.weapon, "murdered in": night.room, "murdered at": night.time}[kind]


def answer(night: Night, question: tuple) -> str:
    kind, *rest = question
    if kind == "weapon":
        return night.weapon.removeprefix("the ")
    if kind == "motive":
        return night.motive[night.murderer]
    if kind == "where":
        (piece,) = night.pieces(rest[0])
        return night.at[piece, rest[1]]
    if kind == "motive of":
        return night.motive[rest[0]]
    if kind == "who has":
        return next(suspect for suspect, motive in night.motive.items() if motive == rest[0])
    return getattr(night, kind)


def all_nights(r: Reading):
    """Yield every night that satisfies the rules of the prompt."""
    directions = ("north", "south", "east", "west")
    near = {(a, b) for a in r.rooms for b in r.rooms if a == b or any(r.beside(a, b, d) for d in directions)}
    ways = list(itertools.product(r.rooms, repeat=len(r.times)))
    walks = [way for way in ways if all(step in near for step in itertools.pairwise(way))]
    shares = [motive for motive, count in r.motives.items() for _ in range(count)]
    motives = sorted(set(itertools.permutations(shares))) or [()]
    arms = [f"the {weapon}" for weapon in r.weapons]
    for steps in itertools.product(walks, repeat=len(r.suspects)):
        carried = []  # a weapon stays, or goes where a suspect goes at the same time
        for way in ways:
            pairs = enumerate(itertools.pairwise(way))
            if all(a == b or any(walk[t : t + 2] == (a, b) for walk in steps) for t, (a, b) in pairs):
                carried.append(way)
        for load in itertools.product(carried, repeat=len(r.weapons)):
            ways_of = dict(zip([*r.suspects, *arms], [*steps, *load], strict=True))
            at = {(n, t): room for n, way in ways_of.items() for t, room in zip(r.times, way, strict=True)}
            for t, time in enumerate(r.times):
                here = [walk[t] for walk in steps]
                for murderer, room in zip(r.suspects, here, strict=True):
                    for weapon in arms if here.count(room) == 1 else ():
                        if at[weapon, time] == room:
                            for boddy in walks:
                                if all(place == room for place in boddy[t:]):
                                    his = {("Mr. Boddy", u): place for u, place in zip(r.times, boddy, strict=True)}
                                    for motive in motives:
                                        held = dict(zip(r.suspects, motive, strict=False))
                                        yield Night(at | his, held, murderer, weapon, room, time)


def check_by_trying(text: str, solution: dict[str, str], minimal: bool, whole: bool = False) -> int:
    """Check that the clues leave one set of answers, `solution` (`whole`: one night), and that each clue is needed.

    Returns the number of tested nights.
    """
    r = read(text)
    nights = list(all_nights(r))
    fits = np.array([[holds(r, night, clue) for clue in r.clues] for night in nights]).reshape(
        len(nights), len(r.clues)
    )
    left = [nights[n] for n in np.flatnonzero(fits.all(1))]
    assert left, "no night fits the clues"
    assert all({k: answer(n, q) for k, q in r.questions.items()} == solution for n in left)
    if whole:
        assert len(left) == 1
    words = {"SUSPECT": r.suspects, "WEAPON": r.weapons, "ROOM": r.rooms, "TIME": r.times, "MOTIVE": list(r.motives)}
    assert list(r.kinds) == list(r.questions) == list(solution)
    assert all(gold in words[r.kinds[letter]] for letter, gold in solution.items())
    if minimal:
        for drop in range(len(r.clues)):
            others = np.delete(fits, drop, axis=1).all(1)
            left = [nights[n] for n in np.flatnonzero(others)]
            if whole:
                assert len(left) > 1, r.clues[drop]
            else:
                assert len({tuple(answer(n, q) for q in r.questions.values()) for n in left}) > 1, r.clues[drop]
    return len(nights)


class Translator:
    def __init__(self, r: Reading):
        self.r = r
        self.names = [*r.suspects, *(f"the {weapon}" for weapon in r.weapons), "Mr. Boddy"]
        motives = [motive for motive, count in r.motives.items() for _ in range(count)]
        places = tuple((0,) * len(r.times) for _ in self.names)
        drawn = World(places, tuple(list(r.motives).index(m) for m in motives), 0, len(r.suspects), 0, 0)
        columns = 1 + max(column for _, column in r.cell.values())
        times = ("12:00 AM",) if r.times == [""] else tuple(r.times)
        self.scenario = Scenario(
            tuple(r.suspects), tuple(r.weapons), tuple(r.rooms), columns, times, tuple(r.motives), drawn
        )

    def who(self, name: str) -> int:
        if " suspect motivated by " in name:
            return motive_role(list(self.r.motives).index(name.split(" motivated by ")[1]))
        return {"the murderer": MURDERER, "the murder weapon": MURDER_WEAPON}.get(name) or self.names.index(name)

    def time(self, time: str) -> int:
        return self.r.times.index(time)

    def room(self, room: str) -> int:
        return self.r.rooms.index(room)

    def clue(self, clue: tuple) -> statements.Statement:
        kind, *rest = clue
        match kind:
            case "or":
                return statements.Either(*map(self.clue, rest))
            case "iff":
                return statements.Iff(*map(self.clue, rest))
            case "place":
                return statements.Place(self.who(rest[0]), self.time(rest[2]), self.room(rest[1]))
            case "same room":
                return statements.SameRoom(self.who(rest[0]), self.who(rest[1]), self.time(rest[2]))
            case "together":
                return statements.Together(self.who(rest[0]), self.who(rest[1]), self.room(rest[2]))
            case "beside":
                who, direction, other, time = rest
                pairs = itertools.product(self.r.rooms, repeat=2)
                pairs = tuple((self.room(a), self.room(b)) for a, b in pairs if self.r.beside(a, b, direction))
                return statements.NextTo(self.who(who), self.who(other), self.time(time), direction, pairs)
            case "moved" | "carried":
                who, *cargo, start, end, time = rest
                what = self.who(cargo[0]) if cargo else None
                return statements.Moved(self.who(who), what, self.time(time), self.room(start), self.room(end))
            case "motive":
                return statements.HasMotive(self.who(rest[0]), list(self.r.motives).index(rest[1]))
            case "murdered by":
                who = self.who(rest[0])
                return statements.Murder("motive", -3 - who) if who < 0 else statements.Murder("murderer", who)
            case "murdered with":
                return statements.Murder("weapon", self.who(rest[0]))
            case "murdered in":
                return statements.Murder("room", self.room(rest[0]))
            case "murdered at":
                return statements.Murder("time", self.time(rest[0]))
        raise AssertionError(clue)

    def world(self, night: Night) -> World:
        places = tuple(tuple(self.room(night.at[name, time]) for time in self.r.times) for name in self.names)
        motives = tuple(list(self.r.motives).index(night.motive[s]) for s in self.r.suspects if night.motive)
        murderer, weapon = self.names.index(night.murderer), self.names.index(night.weapon)
        return World(places, motives, murderer, weapon, self.room(night.room), self.time(night.time))

    def question(self, question: tuple, gold: str) -> tuple[statements.Statement, bool]:
        kind, *rest = question
        if kind == "where":
            return statements.Place(self.who(rest[0]), self.time(rest[1]), self.room(gold)), False
        if kind == "motive of":
            return statements.HasMotive(self.who(rest[0]), list(self.r.motives).index(gold)), False
        if kind == "who has":
            return statements.HasMotive(self.who(gold), list(self.r.motives).index(rest[0])), True
        name = f"the {gold}" if kind == "weapon" else gold
        value = {"room": self.r.rooms, "time": self.r.times, "motive": list(self.r.motives)}.get(kind, self.names)
        return statements.Murder(kind, value.index(name)), False
