"""Draws a `World` (who was where, the murder) and its `Scenario` (board, names, true world)."""

import random
from dataclasses import dataclass

from torchtune_ext.tasks.temporal_clue.size import Dims

SUSPECTS = (
    "Miss Scarlet", "Colonel Mustard", "Mrs. White", "Mr. Green", "Mrs. Peacock",
    "Professor Plum", "Madame Rose", "Sgt. Gray", "Monsieur Brunette", "Miss Peach",
)  # fmt: skip
WEAPONS = ("Candlestick", "Rope", "Wrench", "Lead Pipe", "Revolver", "Knife", "Horseshoe", "Poison")
ROOMS = (
    "Kitchen", "Ballroom", "Conservatory", "Dining Room", "Billiard Room", "Library", "Lounge", "Hall", "Study",
    "Carriage House", "Cloak Room", "Trophy Room", "Drawing Room", "Gazebo", "Courtyard", "Fountain", "Studio",
)  # fmt: skip
MOTIVES = ("Anger", "Betrayal", "Fear", "Greed", "Hatred", "Jealousy", "Power", "Pride", "Revenge", "Ambition")

# Pieces are numbers: first the suspects, then the weapons, then Mr. Boddy. Roles are negative
# numbers: these two, and `motive_role(m)`, all suspects with motive m. Rooms, times and motives are
# indices of the scenario's tuples.
MURDERER = -1
MURDER_WEAPON = -2
# (column, row). Rows are counted from the north.
STEPS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
MOVE_CHANCE = 0.5  # probability that a character changes rooms between two times
CARRY_CHANCE = 0.8  # probability that a suspect in the room of a weapon carries it


def motive_role(motive: int) -> int:
    """Returns the number of the role "a suspect motivated by `motive`"."""
    return -3 - motive


@dataclass(frozen=True, slots=True)
class World:
    """One possible course of the night."""

    places: tuple[tuple[int, ...], ...]  # room, indexed [piece][time]
    motives: tuple[int, ...]  # motive, indexed [suspect]; empty without motives
    murderer: int  # suspect
    weapon: int  # piece number of the murder weapon
    room: int  # room of the murder
    time: int  # time of the murder

    def members(self, who: int) -> list[int]:
        """Returns the pieces that a piece number or a role stands for."""
        if who >= 0:
            return [who]
        if who == MURDERER:
            return [self.murderer]
        if who == MURDER_WEAPON:
            return [self.weapon]
        return [suspect for suspect, motive in enumerate(self.motives) if motive == -3 - who]

    def room_mask(self, who: int, time: int) -> int:
        """Returns the rooms of `who` at `time`, as a bit mask."""
        # Only a motive, which several suspects may share, can have more than one room.
        if who >= 0:
            return 1 << self.places[who][time]
        return sum({1 << self.places[piece][time] for piece in self.members(who)})


@dataclass(frozen=True, slots=True)
class Scenario:
    """The board, the names, and the true world."""

    suspects: tuple[str, ...]
    weapons: tuple[str, ...]
    rooms: tuple[str, ...]
    columns: int  # columns of the board; rooms fill it row by row from the north-west
    times: tuple[str, ...]  # ("12:00 AM",) if the puzzle does not mention time
    motives: tuple[str, ...]  # empty without motives
    truth: World

    @property
    def boddy(self) -> int:
        """The piece number of Mr. Boddy."""
        return len(self.suspects) + len(self.weapons)

    @property
    def weapon_pieces(self) -> range:
        """The piece numbers of the weapons."""
        return range(len(self.suspects), self.boddy)

    def count_holders(self, motive: int) -> int:
        """Returns the number of suspects with this motive."""
        return self.truth.motives.count(motive)

    def has_unique_motives(self) -> bool:
        """Tells whether every suspect has a different motive."""
        return len(self.motives) == len(self.suspects)

    def neighbor(self, room: int, direction: str) -> int | None:
        return neighbor(len(self.rooms), self.columns, room, direction)


def neighbor(num_rooms: int, columns: int, room: int, direction: str) -> int | None:
    """Returns the room adjacent to `room` in a direction, or None at the edge of the board."""
    column, row = room % columns, room // columns
    dx, dy = STEPS[direction]
    column, row = column + dx, row + dy
    # The last row of the board may be incomplete.
    other = row * columns + column
    return other if 0 <= column < columns and row >= 0 and other < num_rooms else None


def draw_scenario(rng: random.Random, dims: Dims) -> Scenario:
    """Draws a night with a murder, by the rules in the prompt."""
    suspects = tuple(rng.sample(SUSPECTS, dims.suspects))
    weapons = tuple(rng.sample(WEAPONS, dims.weapons))
    rooms = tuple(rng.sample(ROOMS, dims.rooms))
    columns = _columns(rng, dims.rooms)
    motives, motive_of = _draw_motives(rng, dims)
    next_to = [
        [room, *(n for n in (neighbor(dims.rooms, columns, room, d) for d in STEPS) if n is not None)]
        for room in range(dims.rooms)
    ]
    # Almost every night has a possible murder. A night without a possible murder is drawn again.
    while True:
        walks = [_walk(rng, next_to, rng.randrange(dims.rooms), dims.times) for _ in suspects]
        carried = [_carry(rng, walks, dims) for _ in weapons]
        if chances := _possible_murders(walks, carried, dims):
            break
    murderer, weapon, room, time = rng.choice(chances)
    # Mr. Boddy stays in the room of the murder. His way to it is drawn backwards.
    boddy = _walk(rng, next_to, room, time + 1)[::-1] + [room] * (dims.times - time - 1)
    places = tuple(tuple(walk) for walk in [*walks, *carried, boddy])
    truth = World(places, motive_of, murderer, dims.suspects + weapon, room, time)
    return Scenario(suspects, weapons, rooms, columns, _draw_times(rng, dims.times), motives, truth)


def _columns(rng: random.Random, num_rooms: int) -> int:
    # As in the public puzzles, the board is almost a square.
    drawn = {2: (1, 2)} | dict.fromkeys((5, 6), (2, 3)) | dict.fromkeys((10, 11, 12), (3, 4))
    if num_rooms in drawn:
        return rng.choice(drawn[num_rooms])
    return 2 if num_rooms < 5 else 3 if num_rooms < 10 else 4


def _draw_times(rng: random.Random, count: int) -> tuple[str, ...]:
    """Draws times at equal intervals. They include midnight, but not as the first time."""
    if count == 1:
        return ("12:00 AM",)
    step = rng.choice((15, 30, 60))
    early = 1 + sum(rng.random() < 0.5 for _ in range(count - 2))
    minutes = [(index - early) * step % (24 * 60) for index in range(count)]
    return tuple(f"{(m // 60 + 11) % 12 + 1:02d}:{m % 60:02d} {'AM' if m < 720 else 'PM'}" for m in minutes)


def _draw_motives(rng: random.Random, dims: Dims) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the names of the motives, and the motive of each suspect."""
    names = rng.sample(MOTIVES, dims.motives)
    if dims.motives == dims.suspects:
        return tuple(names), tuple(rng.sample(range(dims.motives), dims.motives))
    drawn = [rng.randrange(dims.motives) for _ in range(dims.suspects)] if dims.motives > 1 else []
    # Unused motives are dropped.
    used = [motive for motive in range(dims.motives) if motive in drawn]
    # A motive that all suspects share has no information.
    if len(used) < 2:
        return (), ()
    return tuple(names[motive] for motive in used), tuple(used.index(motive) for motive in drawn)


def _walk(rng: random.Random, next_to: list[list[int]], room: int, steps: int) -> list[int]:
    """Draws the rooms of a character at `steps` times, starting with `room`."""
    walk = [room]
    while len(walk) < steps:
        if rng.random() < MOVE_CHANCE:
            # The first entry of the list is the room itself.
            room = rng.choice(next_to[room][1:])
        walk.append(room)
    return walk


def _carry(rng: random.Random, walks: list[list[int]], dims: Dims) -> list[int]:
    """Draws the rooms of a weapon."""
    # At each time, a suspect in the weapon's room may hold it, and takes it to the next room.
    places = [rng.randrange(dims.rooms)]
    for time in range(1, dims.times):
        room = places[-1]
        near = [walk for walk in walks if walk[time - 1] == room]
        if near and rng.random() < CARRY_CHANCE:
            room = rng.choice(near)[time]
        places.append(room)
    return places


def _possible_murders(walks: list[list[int]], carried: list[list[int]], dims: Dims) -> list[tuple[int, int, int, int]]:
    """Returns all (suspect, weapon, room, time) of a suspect alone in a room with a weapon."""
    murders = []
    for time in range(dims.times):
        rooms = [walk[time] for walk in walks]
        for suspect, room in enumerate(rooms):
            if rooms.count(room) == 1:
                murders += [(suspect, weapon, room, time) for weapon, way in enumerate(carried) if way[time] == room]
    return murders
