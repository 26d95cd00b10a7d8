"""Writes the text of a puzzle in exactly the wording of the public puzzles."""

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
from torchtune_ext.tasks.temporal_clue.scenario import MURDER_WEAPON, MURDERER, Scenario

OPENING = (
    "On a dark winter night, wealthy and enigmatic Mr. John Q. Boddy hosted a small, but lavish, dinner party for some "
    "of his closest associates. However, the night ended in tragedy when Mr. Boddy was found dead in one of the rooms "
    "of Tudor Mansion in the early hours of the morning. The following persons of interest have been identified as "
    "suspects:"
)
TIMES = "The exact time of the murder is a bit uncertain, but it has been narrowed down to one of the following times:"
MOVEMENT = (
    "At every time the suspects and Mr. Boddy either stayed in their current room or moved to an orthogonally adjacent "
    "room (north, south, east, or west). Weapons could be moved by suspects between rooms as well."
)
MURDER_RULE_TEXT = (
    "For the murder to occur, the murderer and Mr. Boddy must have been alone in a room with at least one weapon"
)
WHEREABOUTS = (
    " at some point in the night. Any clue about Mr. Boddy's whereabouts should be read as "
    '"Mr. Boddy (dead or alive) ..."'
)
MAIN_QUESTIONS = {
    "murderer": "Who murdered Mr. Boddy?",
    "weapon": "What weapon did the murderer use?",
    "room": "Where was the murder committed?",
    "time": "When did the murder occur?",
    "motive": "Why did the murderer do it?",
}


def piece_name(scenario: Scenario, who: int) -> str:
    """Returns the name of a piece or a role within a sentence."""
    if who == MURDERER:
        return "the murderer"
    if who == MURDER_WEAPON:
        return "the murder weapon"
    if who < 0:
        motive = -3 - who
        article = "the" if scenario.count_holders(motive) == 1 else "a"
        return f"{article} suspect motivated by {scenario.motives[motive]}"
    if who == scenario.boddy:
        return "Mr. Boddy"
    suspects = len(scenario.suspects)
    return scenario.suspects[who] if who < suspects else f"the {scenario.weapons[who - suspects]}"


def time_phrase(scenario: Scenario, time: int) -> str:
    """Returns a phrase such as " at 11:30 PM", or "" if the puzzle does not mention time."""
    return f" at {scenario.times[time]}" if len(scenario.times) > 1 else ""


def room_phrase(scenario: Scenario, room: int) -> str:
    """Returns a phrase such as "in the Library"."""
    room_name = scenario.rooms[room]
    return f"{'at' if room_name == 'Fountain' else 'in'} the {room_name}"


def sentence(scenario: Scenario, clue: Statement) -> str:
    """Returns a clue as a sentence of the prompt."""
    words = _words(scenario, clue)
    return words[0].upper() + words[1:]


def _words(scenario: Scenario, clue: Statement) -> str:
    match clue:
        case Place(who, time, room):
            return f"{piece_name(scenario, who)} was {room_phrase(scenario, room)}{time_phrase(scenario, time)}"
        case Either(first, second):
            return f"{_words(scenario, first)} or {_words(scenario, second)}"
        case Iff(first, second):
            return f"{_words(scenario, first)} if and only if {_words(scenario, second)}"
        case SameRoom(who, other, time):
            pair = f"{piece_name(scenario, who)} was in the same room as {piece_name(scenario, other)}"
            return pair + time_phrase(scenario, time)
        case Together(who, other, room):
            both = f"{piece_name(scenario, who)} and {piece_name(scenario, other)}"
            return f"{both} were {room_phrase(scenario, room)} together at least once"
        case NextTo(who, other, time, direction, _):
            there = f"was in the room just {direction} of"
            return f"{piece_name(scenario, who)} {there} {piece_name(scenario, other)}{time_phrase(scenario, time)}"
        case Moved(who, cargo, time, start, end):
            what = "" if cargo is None else f" {piece_name(scenario, cargo)}"
            way = f"from the {scenario.rooms[start]} to the {scenario.rooms[end]}"
            return f"{piece_name(scenario, who)} moved{what} {way}{time_phrase(scenario, time)}"
        case HasMotive(suspect, motive):
            return f"{piece_name(scenario, suspect)} is motivated by {scenario.motives[motive]}"
        case Murder():
            return f"Mr. Boddy was {_murder_words(scenario, clue)}"
    raise TypeError(f"unknown statement: {clue!r}")


def _murder_words(scenario: Scenario, clue: Murder) -> str:
    value = clue.value
    return {
        "murderer": lambda: f"murdered by {piece_name(scenario, value)}",
        "weapon": lambda: f"killed with {piece_name(scenario, value)}",
        "room": lambda: f"murdered {room_phrase(scenario, value)}",
        "time": lambda: f"murdered at {scenario.times[value]}",
        "motive": lambda: f"murdered by {piece_name(scenario, -3 - value)}",
    }[clue.fact]()


def fact_question(scenario: Scenario, statement: Statement, ask_who: bool = False) -> tuple[str, str, str]:
    """Returns (question, answer, kind of answer) for a fact.

    A motive has two questions; `ask_who` selects "Who is motivated by ...?".
    """
    match statement:
        case Murder(fact, value):
            answer = piece_name(scenario, value).removeprefix("the ") if fact in ("murderer", "weapon") else None
            answer = answer or {"room": scenario.rooms, "time": scenario.times, "motive": scenario.motives}[fact][value]
            return MAIN_QUESTIONS[fact], answer, "SUSPECT" if fact == "murderer" else fact.upper()
        case Place(who, time, room):
            return f"Where was {piece_name(scenario, who)}{time_phrase(scenario, time)}?", scenario.rooms[room], "ROOM"
        # This question requires a motive that only one suspect has.
        case HasMotive(suspect, motive) if ask_who:
            return f"Who is motivated by {scenario.motives[motive]}?", scenario.suspects[suspect], "SUSPECT"
        case HasMotive(suspect, motive):
            return f"What motivates {scenario.suspects[suspect]}?", scenario.motives[motive], "MOTIVE"
    raise TypeError(f"statement without a question: {statement!r}")


def board(scenario: Scenario) -> str:
    """Draws the board as text, with compass letters around it."""
    digits = 2 if len(scenario.rooms) > 9 else 1
    columns = scenario.columns
    cells = [f"{number + 1:0{digits}d}" for number in range(len(scenario.rooms))]
    cells += ["-"] * (-len(cells) % columns)
    rows = ["W " + "|".join(cells[start : start + columns]) + " E" for start in range(0, len(cells), columns)]
    edges = ["  " + " ".join([letter * digits] * columns) + "  " for letter in "NS"]
    return "\n".join([edges[0], *rows, edges[1]])


def puzzle_prompt(
    scenario: Scenario, clues: list[Statement], questions: list[tuple[str, str, str]], num_main: int
) -> str:
    """Returns the text of the prompt. `questions` starts with the `num_main` main questions."""
    digits = 2 if len(scenario.rooms) > 9 else 1
    letters = [chr(ord("A") + number) for number in range(len(questions))]
    lines = [f"{letter}. {text}" for letter, (text, _, _) in zip(letters, questions, strict=True)]
    timed = len(scenario.times) > 1
    parts = [
        OPENING,
        _bullets(scenario.suspects),
        "And the following weapons were found on the premises:",
        _bullets(scenario.weapons),
        # The public puzzles misspell "occurred".
        "The murder could only have occured in one of the following rooms:",
        "\n".join(f"{number:0{digits}d}. {room}" for number, room in enumerate(scenario.rooms, start=1)),
        "The rooms are laid out as follows:",
        board(scenario),
    ]
    parts += [TIMES, _bullets(scenario.times), MOVEMENT] if timed else []
    if scenario.motives:
        uniquely = "uniquely " if scenario.has_unique_motives() else ""
        parts.append(f"Each suspect {uniquely}had one of the following possible motives for killing Mr. Boddy:")
        parts.append(_motives(scenario))
    parts += [
        MURDER_RULE_TEXT + (WHEREABOUTS if timed else "."),
        "The available clues are as follows:",
        "\n".join(f"- {sentence(scenario, clue)}" for clue in clues),
        "Please answer the following question(s):",
        "\n".join(lines[:num_main]),
    ]
    if lines[num_main:]:
        parts += ["And the following bonus question(s):", "\n".join(lines[num_main:])]
    parts += [
        "Fill out your final answers in the following format:",
        "\n".join(f"{letter}. {kind}" for letter, (_, _, kind) in zip(letters, questions, strict=True)),
        "Best of luck, detective.",
    ]
    return "\n\n".join(parts)


def _bullets(items: tuple[str, ...]) -> str:
    return "\n".join(f"• {item}" for item in items)


def _motives(scenario: Scenario) -> str:
    if scenario.has_unique_motives():
        return _bullets(scenario.motives)
    # The rules of the solver include these counts, so the prompt must state them.
    counts = [scenario.count_holders(motive) for motive in range(len(scenario.motives))]
    shares = ["1 suspect" if count == 1 else f"{count} suspects" for count in counts]
    return _bullets(tuple(f"{motive} ({share})" for motive, share in zip(scenario.motives, shares, strict=True)))
