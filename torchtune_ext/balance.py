"""Decides which completions share a row, such that all ranks compute about as much. It knows lengths alone.

FSDP makes ranks work in lock step: in every round each rank computes one row, and the round takes as long as its most
expensive row. So the rows of all ranks are chosen together. A prompt is in a row once. A group may be split over rows, and
its prompt is then in each of them.

AReaL's Algorithm 1 (arXiv 2505.24298, App. B.3) balances the tokens of one rank's sequences. Here sequences share prompts,
ranks meet in every round, and a row costs its tokens, its padding and the area of its attention mask.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LENGTHS = 32  # a padded row has one of so many lengths between a power of two and the next
ROUND = 512  # tokens; what a round costs beside its rows: launches of kernels, and weights that ranks gather
TRIES = 5  # so many sizes of rows are compared for each number of rounds
FINER = 1.02  # the ratio of a size to the one before


@dataclass(frozen=True, slots=True)
class Lengths:
    """What of a group needs places in a row.

    Args:
        prompt: tokens of the prompt.
        completions: places that each completion takes beside the prompt; 0 for a completion of one token.
    """

    prompt: int
    completions: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The places of the whole group if its prompt is stored once."""
        return self.prompt + sum(self.completions)


@dataclass(frozen=True, slots=True)
class Part:
    """Completions of one group that are in one row, behind their prompt.

    Args:
        group: the index of the group.
        completions: the indices of the completions in the group, ascending.
        tokens: places of the prompt and of these completions.
        pairs: pairs of a query and a key that the attention mask allows.
    """

    group: int
    completions: tuple[int, ...]
    tokens: int
    pairs: int


Parts = tuple[Part, ...]  # a row; it is empty for a rank that has nothing to do in a round


@dataclass(frozen=True, slots=True)
class Layout:
    """What those who compute the rows want of them, and what a row costs them.

    Args:
        ranks: number of ranks that work in lock step.
        tile: rows are padded to one of a few lengths, all multiples of this, since kernels are compiled for each length;
            None: rows are as long as their tokens.
        pair_cost: what an allowed pair of query and key costs, all layers and heads together. All else that is done for a
            token costs 1.
    """

    ranks: int = 1
    tile: int | None = None
    pair_cost: float = 0.0

    def length(self, tokens: int) -> int:
        """The length of a row that holds `tokens` tokens. A row without any has the least that a model can run."""
        tokens = max(tokens, 1)
        if self.tile is None:
            return tokens
        unit = max(2 ** (tokens - 1).bit_length() // (2 * LENGTHS), self.tile)
        return math.ceil(tokens / unit) * unit

    def row_length(self, row: Parts) -> int:
        """The length of this row in places, padding included."""
        return self.length(sum(part.tokens for part in row))

    def cost(self, row: Parts) -> float:
        """What this row costs, in tokens."""
        return self.row_length(row) + self.pair_cost * sum(part.pairs for part in row)

    def over_rounds(self, rows: Sequence[Parts], cost: Callable[[Parts], float]) -> float:
        """The sum over the rounds of the largest cost among the rows of the round."""
        return sum(max(map(cost, rows[start : start + self.ranks])) for start in range(0, len(rows), self.ranks))


ALONE = Layout()  # one rank, whose rows need no padding


def balanced_rows(groups: Sequence[Lengths], row_tokens: int, layout: Layout) -> list[Parts]:
    """Distributes the completions of groups over rows of at most `row_tokens` tokens.

    Rows are filled by best-fit decreasing up to a size. A group that fits nowhere is split: its longest completions that fit go
    into the emptiest row. Some sizes and some numbers of rounds are tried, and what costs least is taken.

    Args:
        groups: none of them without completions, and no prompt with one of its completions longer than a row.

    Returns:
        The rows, in a deterministic order: rows [k * ranks, (k + 1) * ranks) are round k, one for each rank. There is at least
        one round.
    """
    total, ranks = sum(group.tokens for group in groups), layout.ranks
    # The sorts are stable: what is of equal length keeps its order, so the rows are deterministic.
    largest_first = sorted(range(len(groups)), key=lambda i: -groups[i].tokens)
    longest_first = [sorted(range(len(g.completions)), key=lambda i: -g.completions[i]) for g in groups]
    fewest = rounds = max(math.ceil(total / (ranks * row_tokens)), 1)
    best, best_cost = None, math.inf
    # So many rounds cost at least `total / ranks + rounds * ROUND`, however well they are balanced.
    while best is None or (rounds <= 2 * fewest and total / ranks + rounds * ROUND < best_cost):
        tries = 0
        for size in _sizes(total / (rounds * ranks), row_tokens):
            filled = _fill(groups, largest_first, longest_first, rounds * ranks, size)
            if filled is None:
                continue
            rows = _in_rounds([_parts(groups, row) for row in filled], layout)
            cost = layout.over_rounds(rows, layout.cost) + rounds * ROUND
            if cost < best_cost:
                best, best_cost = rows, cost
            tries += 1
            if tries == TRIES:
                break
        rounds += 1
    return best


def dealt(sizes: Sequence[float], hands: int) -> list[list[int]]:
    """Deals items to at most `hands` hands of about equal sums: the largest first, each to the smallest hand (Graham 1969).

    Returns:
        The indices in each hand, ascending. The hands are in the order of their first items, so no hand comes last because its
        items are small. Hands that would be empty are left out.
    """
    sums, items = [0.0] * hands, [[] for _ in range(hands)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        smallest = sums.index(min(sums))
        sums[smallest] += sizes[index]
        items[smallest].append(index)
    return sorted(sorted(hand) for hand in items if hand)


def _sizes(least: float, most: int) -> list[int]:
    """The numbers of tokens up to which rows are filled, ascending from `least` to `most`."""
    sizes = [max(math.ceil(least), 1)]
    while sizes[-1] < most:
        sizes.append(min(math.ceil(sizes[-1] * FINER), most))
    return sizes


def _fill(
    groups: Sequence[Lengths],
    largest_first: Sequence[int],
    longest_first: Sequence[Sequence[int]],
    num_rows: int,
    size: int,
) -> list[list[tuple[int, Sequence[int]]]] | None:
    """Fills rows up to `size` tokens: for each row, [(group, its completions there), ...]. None: there is not enough room."""
    rows: list[list[tuple[int, Sequence[int]]]] = [[] for _ in range(num_rows)]
    room = [(size, row) for row in range(num_rows)]  # (free places, row), ascending
    for index in largest_first:
        group, left, needed = groups[index], longest_first[index], groups[index].tokens
        while left:
            place = bisect_left(room, (needed, -1))
            whole = place < len(room)
            free, row = room.pop(place if whole else -1)
            taken = left if whole else _longest_that_fit(group, left, free)
            if not taken:
                return None
            rows[row].append((index, taken))
            tokens = sum(group.completions[i] for i in taken)
            insort(room, (free - group.prompt - tokens, row))
            needed -= tokens
            left = [] if whole else [i for i in left if i not in taken]
    return _none_empty(rows)


def _none_empty(rows: list[list[tuple[int, Sequence[int]]]]) -> list[list[tuple[int, Sequence[int]]]]:
    """Gives an empty row half of the row with the most completions, as long as that one has two."""
    for empty in (row for row in rows if not row):
        fullest = max(rows, key=lambda row: sum(len(taken) for _, taken in row))
        if len(fullest) > 1:
            empty.extend(fullest[::2])
            del fullest[::2]
        elif fullest and len(fullest[0][1]) > 1:
            ((index, taken),) = fullest
            empty.append((index, taken[::2]))
            fullest[0] = (index, taken[1::2])
    return rows


def _longest_that_fit(group: Lengths, candidates: Sequence[int], free: int) -> list[int]:
    taken, free = [], free - group.prompt
    for i in candidates:
        if group.completions[i] <= free:
            taken.append(i)
            free -= group.completions[i]
    return taken


def _parts(groups: Sequence[Lengths], row: Sequence[tuple[int, Sequence[int]]]) -> Parts:
    found = []
    for index, taken in row:
        prompt, lengths = groups[index].prompt, [groups[index].completions[i] for i in taken]
        pairs = _triangle(prompt) + sum(length * prompt + _triangle(length) for length in lengths)
        found.append(Part(index, tuple(sorted(taken)), prompt + sum(lengths), pairs))
    return tuple(found)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _in_rounds(rows: Sequence[Parts], layout: Layout) -> list[Parts]:
    """Orders rows so that those of a round cost about the same: no order of these rows costs less.

    Every other round is turned around, so that no rank has the most expensive row of every round.
    """
    ordered = sorted(rows, key=layout.cost, reverse=True)
    turns = [ordered[start : start + layout.ranks] for start in range(0, len(ordered), layout.ranks)]
    return [row for k, turn in enumerate(turns) for row in (turn if k % 2 == 0 else turn[::-1])]
