"""Statements of the public puzzles. Each statement can be evaluated in a `World` by `holds`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from torchtune_ext.tasks.temporal_clue.scenario import MURDER_WEAPON, MURDERER, STEPS, Scenario, World, motive_role


@dataclass(frozen=True, slots=True)
class Place:
    """`who` was in `room` at `time`: for a motive of several suspects, at least one of them."""

    who: int  # piece or role
    time: int
    room: int

    def holds(self, world: World) -> bool:
        return bool(world.room_mask(self.who, self.time) >> self.room & 1)


@dataclass(frozen=True, slots=True)
class Either:
    """Exactly one of the two places is true: "X or Y", exclusive."""

    first: Place
    second: Place

    def holds(self, world: World) -> bool:
        return self.first.holds(world) != self.second.holds(world)


@dataclass(frozen=True, slots=True)
class Iff:
    """Both places are true, or both are false: "X if and only if Y"."""

    first: Place
    second: Place

    def holds(self, world: World) -> bool:
        return self.first.holds(world) == self.second.holds(world)


@dataclass(frozen=True, slots=True)
class SameRoom:
    """`who` was in the same room as `other` at `time`."""

    who: int  # piece or role
    other: int  # piece
    time: int

    def holds(self, world: World) -> bool:
        return bool(world.room_mask(self.who, self.time) & world.room_mask(self.other, self.time))


@dataclass(frozen=True, slots=True)
class Together:
    """`who` and `other` were together in `room` at least once."""

    who: int  # piece or role
    other: int  # piece
    room: int

    def holds(self, world: World) -> bool:
        times = range(len(world.places[0]))
        return any(world.room_mask(self.who, t) & world.room_mask(self.other, t) & 1 << self.room for t in times)


@dataclass(frozen=True, slots=True)
class NextTo:
    """At `time`, `who` was in the room adjacent to the room of `other`, in `direction` from it."""

    who: int  # piece
    other: int  # piece
    time: int
    direction: str  # "north", "south", "east", "west"
    # All (room of who, room of other) on the board in this direction.
    pairs: tuple[tuple[int, int], ...]

    def holds(self, world: World) -> bool:
        return (world.places[self.who][self.time], world.places[self.other][self.time]) in self.pairs


@dataclass(frozen=True, slots=True)
class Moved:
    """`who` moved from `start` to `end` between `time` - 1 and `time`, with `cargo` if not None."""

    who: int  # suspect or role
    cargo: int | None  # weapon piece or MURDER_WEAPON
    time: int  # the time of arrival
    start: int  # room
    end: int  # room

    def holds(self, world: World) -> bool:
        return self._went(world, self.who) and (self.cargo is None or self._went(world, self.cargo))

    def _went(self, world: World, who: int) -> bool:
        # If `who` is a motive of several suspects, a single suspect must have made the whole move.
        ways = (world.places[piece] for piece in world.members(who))
        return any(way[self.time - 1] == self.start and way[self.time] == self.end for way in ways)


@dataclass(frozen=True, slots=True)
class HasMotive:
    """`suspect` is motivated by `motive`."""

    suspect: int
    motive: int

    def holds(self, world: World) -> bool:
        return world.motives[self.suspect] == self.motive


@dataclass(frozen=True, slots=True)
class Murder:
    """One fact of the murder is true."""

    fact: str  # "murderer", "weapon", "room", "time" or "motive"
    value: int  # suspect, weapon piece, room, time or motive

    def holds(self, world: World) -> bool:
        return murder_fact(world, self.fact) == self.value


Statement = Place | Either | Iff | SameRoom | Together | NextTo | Moved | HasMotive | Murder

# Clues are sorted by the weight of their kind (the public generator's values) plus a random number
# in [0, 1). A puzzle tries to drop them in this order: a larger weight is kept more often.
WEIGHTS = {"murder": -0.2, "place": -0.15, "role": -0.1, "motive": 0.0, "or": -0.05, "iff": 0.05, "same_room": 0.5}
WEIGHTS |= {"together": 0.8, "beside": 0.2, "moved": 0.1, "carried": 0.2, "role_moved": 0.2, "role_carried": 0.35}
ROLE_MEETING = 1.5  # added to the weight of a meeting with the murderer or the murder weapon


def murder_fact(world: World, fact: str) -> int:
    """Returns the value of one fact of the murder (`Murder.fact`)."""
    return world.motives[world.murderer] if fact == "motive" else getattr(world, fact)


def murder_facts(scenario: Scenario) -> list[Murder]:
    """Returns the facts of the main questions, in order."""
    facts = ["murderer", "weapon", "room"]
    # A puzzle with a single time does not mention it.
    facts += ["time"] if len(scenario.times) > 1 else []
    facts += ["motive"] if scenario.motives else []
    return [Murder(fact, murder_fact(scenario.truth, fact)) for fact in facts]


def piece_places(scenario: Scenario) -> list[Place]:
    places = scenario.truth.places
    return [Place(piece, time, room) for piece, way in enumerate(places) for time, room in enumerate(way)]


def has_motives(scenario: Scenario) -> list[HasMotive]:
    return [HasMotive(suspect, motive) for suspect, motive in enumerate(scenario.truth.motives)]


def draw_clues(rng: random.Random, scenario: Scenario, kinds: tuple[str, ...]) -> list[Statement]:
    """Returns true statements that determine the whole world, in the order of attempted removal."""
    ranked: list[tuple[float, Statement]] = [(WEIGHTS["murder"], clue) for clue in murder_facts(scenario)]
    ranked += [
        (WEIGHTS["role" if place.who in (MURDERER, MURDER_WEAPON) else "place"], place)
        for place in _all_places(scenario)
    ]
    ranked += [(WEIGHTS["motive"], clue) for clue in has_motives(scenario)]
    count = 2 * round(len(ranked) / 6)  # clues of each indirect kind
    for kind in ("or", "iff"):
        ranked += _compounds(rng, scenario, kind, count) if kind in kinds else []
    if "same_room" in kinds or "together" in kinds:
        ranked += _shuffled(rng, _meetings(rng, scenario, kinds))[:count]
    if "beside" in kinds:
        ranked += _neighbor_clues(rng, scenario, count)
    if "moved" in kinds:
        ranked += _shuffled(rng, _moves(scenario))[:count]
    if "carried" in kinds:
        ranked += _carries(scenario)
    ranked = [(weight + rng.random(), clue) for weight, clue in ranked]
    # A dict drops duplicates and keeps the order. Statements have no order of their own.
    return list(dict.fromkeys(clue for _, clue in sorted(ranked, key=itemgetter(0))))


def _shuffled(rng: random.Random, items) -> list:
    items = list(items)
    rng.shuffle(items)
    return items


def _names(scenario: Scenario, piece: int) -> list[int]:
    """Returns the number of the piece, and the roles of the piece."""
    truth = scenario.truth
    names = [piece]
    names += [MURDERER] if piece == truth.murderer else []
    names += [MURDER_WEAPON] if piece == truth.weapon else []
    names += [motive_role(truth.motives[piece])] if scenario.motives and piece < len(scenario.suspects) else []
    return names


def _all_places(scenario: Scenario) -> list[Place]:
    return [Place(who, p.time, p.room) for p in piece_places(scenario) for who in _names(scenario, p.who)]


def _false_place(rng: random.Random, scenario: Scenario, place: Place) -> Place | None:
    """Returns the place with another room, or None if the result is also true."""
    room = rng.choice([room for room in range(len(scenario.rooms)) if room != place.room])
    wrong = Place(place.who, place.time, room)
    # Another suspect with the same motive may be in that room.
    return None if wrong.holds(scenario.truth) else wrong


def _compounds(rng: random.Random, scenario: Scenario, kind: str, count: int) -> list[tuple[float, Statement]]:
    """Creates clues of two places.

    "or" joins a true and a false place; "if and only if" joins two true or two false places.
    """
    right = _all_places(scenario)
    clues: list[tuple[float, Statement]] = []
    for _ in range(count):
        first, second = rng.sample(right, 2)
        if kind == "or":
            first, second = _shuffled(rng, [first, _false_place(rng, scenario, second)])
        elif rng.random() < 0.5:
            first, second = _false_place(rng, scenario, first), _false_place(rng, scenario, second)
        if first is None or second is None or first == second:
            continue
        clues.append((WEIGHTS[kind], Either(first, second) if kind == "or" else Iff(first, second)))
    return clues


def _meetings(rng: random.Random, scenario: Scenario, kinds: tuple[str, ...]) -> Iterator[tuple[float, Statement]]:
    """Yields clues about two pieces in the same room. A clue names the time or the room."""
    places = scenario.truth.places
    suspects = len(scenario.suspects)
    forms = [kind for kind in ("same_room", "together") if kind in kinds]
    # With a single time, "together at least once" is equivalent to "in the same room".
    if len(scenario.times) == 1:
        forms = forms[:1] if "same_room" in forms else []
    for time in range(len(scenario.times)) if forms else ():
        for room in range(len(scenario.rooms)):
            here = [piece for piece, way in enumerate(places) if way[time] == room]
            if len(here) < 2:
                continue
            who, other = rng.sample(here, 2)
            name, weight = who, 0.0
            if who == scenario.truth.murderer and other >= suspects and rng.random() < 0.66:
                name, weight = MURDERER, ROLE_MEETING
            elif who < suspects <= other and scenario.motives and rng.random() < 0.5:
                name = motive_role(scenario.truth.motives[who])
            elif who == scenario.truth.weapon and other not in scenario.weapon_pieces and rng.random() < 0.66:
                name, weight = MURDER_WEAPON, ROLE_MEETING
            form = rng.choice(forms)
            clue = SameRoom(name, other, time) if form == "same_room" else Together(name, other, room)
            yield WEIGHTS[form] + weight, clue


def _neighbor_clues(rng: random.Random, scenario: Scenario, count: int) -> Iterator[tuple[float, Statement]]:
    """Yields clues about two pieces in neighboring rooms."""
    places = scenario.truth.places
    # A clue holds its pairs of rooms, since a `World` does not have the board.
    pairs = {
        direction: tuple(
            (beside, room)
            for room in range(len(scenario.rooms))
            if (beside := scenario.neighbor(room, direction)) is not None
        )
        for direction in STEPS
    }
    for _ in range(count):
        time = rng.randrange(len(scenario.times))
        who, other = rng.sample(range(len(places)), 2)
        for direction, neighbors in pairs.items():
            if (places[who][time], places[other][time]) in neighbors:
                yield WEIGHTS["beside"], NextTo(who, other, time, direction, neighbors)


def _moves(scenario: Scenario) -> Iterator[tuple[float, Statement]]:
    for suspect in range(len(scenario.suspects)):
        way = scenario.truth.places[suspect]
        for time in range(1, len(way)):
            if way[time] != way[time - 1]:
                for who in _names(scenario, suspect):
                    weight = WEIGHTS["role_moved" if who == MURDERER else "moved"]
                    yield weight, Moved(who, None, time, way[time - 1], way[time])


def _carries(scenario: Scenario) -> Iterator[tuple[float, Statement]]:
    """Yields clues about a suspect and a weapon that made the same move."""
    places = scenario.truth.places
    for weapon in scenario.weapon_pieces:
        way = places[weapon]
        for time in range(1, len(way)):
            if way[time] == way[time - 1]:
                continue
            step = way[time - 1 : time + 1]
            # A weapon moves only together with a suspect.
            suspect = next(s for s in range(len(scenario.suspects)) if places[s][time - 1 : time + 1] == step)
            for who in _names(scenario, suspect):
                weight = WEIGHTS["role_carried" if who == MURDERER else "carried"]
                yield weight, Moved(who, weapon, time, *step)
            if weapon == scenario.truth.weapon:
                yield WEIGHTS["role_carried"], Moved(suspect, MURDER_WEAPON, time, *step)
