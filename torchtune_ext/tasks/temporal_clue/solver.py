"""Searches for counterexamples: other worlds that fit the clues (OR-Tools CP-SAT, extra `clue`)."""

from collections.abc import Iterable
from importlib import import_module
from itertools import product
from types import ModuleType

from torchtune_ext.run.errors import DeadlineExceeded, RunFailure
from torchtune_ext.tasks.temporal_clue.clues import (
    Either,
    HasMotive,
    Iff,
    Moved,
    Murder,
    NextTo,
    Place,
    SameRoom,
    Statement,
    Together,
)
from torchtune_ext.tasks.temporal_clue.scenario import MURDER_WEAPON, MURDERER, STEPS, Scenario, World

# Time limit of one solver call; the public sizes take much less than one second.
SOLVE_TIMEOUT_S = 120.0


def ortools() -> ModuleType:
    """Imports `cp_model` of OR-Tools. Raises RunFailure if it is not installed."""
    # Imported late, because reading and grading puzzles works without OR-Tools.
    try:
        return import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise RunFailure(
            "OR-Tools is not installed, which generates Temporal Clue puzzles (reading them works without it). "
            "Fix: pip install 'torchtune-ext[clue]'"
        ) from error


class Solver:
    """Searches for a world that fits some clues but differs from the truth in a goal."""

    def __init__(self, scenario: Scenario) -> None:
        # A scenario has one model: the rules as clauses over "piece p was in room r at time t", the
        # motives and the facts of the murder. A query assumes literals of clues.
        cp_model = ortools()
        self.scenario = scenario
        self.model = cp_model.CpModel()
        self._literals: dict = {}  # literals of the statements and conjunctions used so far
        self._add_variables()
        self._add_murder()
        self._add_walks()
        # The search tries true facts first. A counterexample that violates few clues is more
        # informative about the necessary clues.
        self.model.add_decision_strategy(self._truths(), cp_model.CHOOSE_FIRST, cp_model.SELECT_MAX_VALUE)
        self.cp_solver = cp_model.CpSolver()
        parameters = {
            "num_workers": 1,
            # Otherwise CP-SAT replaces Python's handler of Ctrl-C permanently.
            "catch_sigint_signal": False,
            "search_branching": cp_model.FIXED_SEARCH,
            "cp_model_presolve": False,
            "cp_model_probing_level": 0,
            "linearization_level": 0,
            "symmetry_level": 0,
            "max_time_in_seconds": SOLVE_TIMEOUT_S,
        }
        for key, value in parameters.items():
            setattr(self.cp_solver.parameters, key, value)

    def difference_literal(self, truths: Iterable[Statement]):
        """Returns a literal that implies that at least one of these statements does not hold."""
        # One direction is sufficient, since the literal is only assumed to be true.
        goal = self.model.new_bool_var("")
        self.model.add_bool_or(goal.negated(), *(self.literal(truth).negated() for truth in truths))
        return goal

    def find_world(self, clues: Iterable[Statement], goal) -> World | None:
        """Returns a world in which all the clues and the goal hold, or None if no world exists.

        Raises:
            DeadlineExceeded: the solver found no answer within `SOLVE_TIMEOUT_S`.
        """
        literals = [self.literal(clue) for clue in clues]
        self.model.clear_assumptions()
        self.model.add_assumptions([goal, *literals])
        # Without an objective, CP-SAT calls any solution optimal.
        name = self.cp_solver.status_name(self.cp_solver.solve(self.model))
        if name == "INFEASIBLE":
            return None
        if name not in ("OPTIMAL", "FEASIBLE"):
            raise DeadlineExceeded(
                f"CP-SAT returned {name} within {SOLVE_TIMEOUT_S:.0f} s. Fix: draw smaller puzzles (size)"
            )
        return self._world(list(self.cp_solver.response_proto.solution))

    # ---- the rules

    def _one_of(self, count: int) -> list:
        literals = [self.model.new_bool_var("") for _ in range(count)]
        self.model.add_exactly_one(literals)
        return literals

    def _add_variables(self) -> None:
        # These variables must be the first of the model, in the order in which `_world` reads them.
        s = self.scenario
        # [piece][time][room]
        self.at = [[self._one_of(len(s.rooms)) for _ in s.times] for _ in s.truth.places]
        self.motive = [self._one_of(len(s.motives)) for _ in s.suspects] if s.motives else []
        self.murderer = self._one_of(len(s.suspects))
        self.weapon = self._one_of(len(s.weapons))
        self.room = self._one_of(len(s.rooms))
        self.time = self._one_of(len(s.times))
        # The prompt states how many suspects have each motive.
        for motive in range(len(s.motives)):
            self.model.add(sum(row[motive] for row in self.motive) == s.count_holders(motive))

    def _truths(self) -> list:
        truth, suspects = self.scenario.truth, len(self.scenario.suspects)
        facts = [self.murderer[truth.murderer], self.weapon[truth.weapon - suspects]]
        facts += [self.room[truth.room], self.time[truth.time]]
        facts += [row[motive] for row, motive in zip(self.motive, truth.motives, strict=True)]
        ways = zip(self.at, truth.places, strict=True)
        return facts + [at[time][room] for at, way in ways for time, room in enumerate(way)]

    def _world(self, values: list[int]) -> World:
        s = self.scenario
        position = 0

        # A choice is a one-hot run of values.
        def chosen(count: int) -> int:
            nonlocal position
            choice = values.index(1, position, position + count) - position
            position += count
            return choice

        places = tuple(tuple(chosen(len(s.rooms)) for _ in s.times) for _ in s.truth.places)
        motives = tuple(chosen(len(s.motives)) for _ in s.suspects) if s.motives else ()
        murderer, weapon = chosen(len(s.suspects)), len(s.suspects) + chosen(len(s.weapons))
        return World(places, motives, murderer, weapon, chosen(len(s.rooms)), chosen(len(s.times)))

    def _add_murder(self) -> None:
        s, clause = self.scenario, self.model.add_bool_or
        for time, room in product(range(len(s.times)), range(len(s.rooms))):
            elsewhere = [self.time[time].negated(), self.room[room].negated()]
            # The murderer is in the room, and no other suspect.
            for suspect, is_murderer in enumerate(self.murderer):
                here = self.at[suspect][time][room]
                clause(*elsewhere, is_murderer.negated(), here)
                clause(*elsewhere, is_murderer, here.negated())
            # The murder weapon is in the room, possibly with other weapons.
            for weapon, is_weapon in zip(s.weapon_pieces, self.weapon, strict=True):
                clause(*elsewhere, is_weapon.negated(), self.at[weapon][time][room])
            # After the murder, Mr. Boddy stays in the room.
            for later in range(time, len(s.times)):
                clause(*elsewhere, self.at[s.boddy][later][room])

    def _add_walks(self) -> None:
        s, clause = self.scenario, self.model.add_bool_or
        rooms = range(len(s.rooms))
        next_to = [[n for n in (s.neighbor(room, d) for d in STEPS) if n is not None] for room in rooms]
        for time in range(1, len(s.times)):
            for piece, room in product(range(len(self.at)), rooms):
                # A piece stays or moves to a neighboring room. The second clause follows from the
                # first, but lets the solver propagate backwards in time.
                before, now = self.at[piece][time - 1], self.at[piece][time]
                clause(before[room].negated(), now[room], *(now[near] for near in next_to[room]))
                clause(now[room].negated(), before[room], *(before[near] for near in next_to[room]))
            # A weapon moves only with a suspect.
            for start in rooms:
                for end in next_to[start]:
                    suspects = self.at[: len(s.suspects)]
                    moves = [self.all_of(at[time - 1][start], at[time][end]) for at in suspects]
                    for weapon in s.weapon_pieces:
                        way = self.at[weapon]
                        clause(way[time - 1][start].negated(), way[time][end].negated(), *moves)

    # ---- clues as literals

    def all_of(self, *literals):
        """Returns a literal that is true if and only if all `literals` are true."""
        if len(literals) == 1:
            return literals[0]
        key = ("all", tuple(literal.index for literal in literals))
        if key not in self._literals:
            whole = self._literals[key] = self.model.new_bool_var("")
            for literal in literals:
                self.model.add_implication(whole, literal)
            self.model.add_bool_or(whole, *(literal.negated() for literal in literals))
        return self._literals[key]

    def any_of(self, literals: list):
        """Returns a literal that is true if and only if at least one of `literals` is true."""
        if len(literals) == 1:
            return literals[0]
        return self.all_of(*(literal.negated() for literal in literals)).negated()

    def _options(self, who: int) -> list[tuple[list, int]]:
        """Returns (conditions, piece) for each piece that `who` may be. Conditions are literals."""
        s = self.scenario
        if who >= 0:
            return [([], who)]
        if who == MURDERER:
            return [([literal], suspect) for suspect, literal in enumerate(self.murderer)]
        if who == MURDER_WEAPON:
            return [([literal], weapon) for weapon, literal in zip(s.weapon_pieces, self.weapon, strict=True)]
        return [([row[-3 - who]], suspect) for suspect, row in enumerate(self.motive)]

    def _presence_literal(self, who: int, time: int, room: int):
        return self.any_of([self.all_of(*so, self.at[piece][time][room]) for so, piece in self._options(who)])

    def literal(self, statement: Statement):
        """Returns a literal that is true if and only if the statement holds."""
        if statement not in self._literals:
            self._literals[statement] = self._encode(statement)
        return self._literals[statement]

    def _encode(self, statement: Statement):
        rooms = range(len(self.scenario.rooms))
        match statement:
            case Place(who, time, room):
                return self._presence_literal(who, time, room)
            case Either(first, second):
                return self._same(self.literal(first), self.literal(second)).negated()
            case Iff(first, second):
                return self._same(self.literal(first), self.literal(second))
            case SameRoom(who, other, time):
                return self.any_of(
                    [self.all_of(self._presence_literal(who, time, r), self.at[other][time][r]) for r in rooms]
                )
            case Together(who, other, room):
                times = range(len(self.scenario.times))
                return self.any_of(
                    [self.all_of(self._presence_literal(who, t, room), self.at[other][t][room]) for t in times]
                )
            case NextTo(who, other, time, _, pairs):
                return self.any_of([self.all_of(self.at[who][time][a], self.at[other][time][b]) for a, b in pairs])
            case Moved(who, cargo, time, start, end):
                return self._moved(who, cargo, time, start, end)
            case HasMotive(suspect, motive):
                return self.motive[suspect][motive]
            case Murder(fact, value):
                return self._murder(fact, value)
        raise TypeError(f"unknown statement: {statement!r}")

    def _same(self, first, second):
        return self.any_of([self.all_of(first, second), self.all_of(first.negated(), second.negated())])

    def _moved(self, who: int, cargo: int | None, time: int, start: int, end: int):
        cargoes = [([], None)] if cargo is None else self._options(cargo)
        # If several suspects share a motive, a single suspect must make the whole move.
        ways = []
        for (so, piece), (with_so, weapon) in product(self._options(who), cargoes):
            steps = [self.at[piece][time - 1][start], self.at[piece][time][end]]
            if weapon is not None:
                steps += [self.at[weapon][time - 1][start], self.at[weapon][time][end]]
            ways.append(self.all_of(*so, *with_so, *steps))
        return self.any_of(ways)

    def _murder(self, fact: str, value: int):
        if fact == "motive":
            return self.any_of([self.all_of(m, row[value]) for m, row in zip(self.murderer, self.motive, strict=True)])
        if fact == "weapon":
            return self.weapon[value - len(self.scenario.suspects)]
        return {"murderer": self.murderer, "room": self.room, "time": self.time}[fact][value]
