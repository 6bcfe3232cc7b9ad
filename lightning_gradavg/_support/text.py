"""Numbers and names of ranks in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["by_value", "listed_ranks", "message_of", "on_ranks", "plural", "ranks_by_value"]

_MOST_RANKS = 8
"""How many ranks a message names. A message about a thousand ranks would hide what it says."""


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks" or "2 micro-batches"."""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 0", "ranks 1, 2" or "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_RANKS])
    if len(ranks) > _MOST_RANKS:
        shown += f" and {len(ranks) - _MOST_RANKS} more"
    return f"{noun} {shown}"


def on_ranks(ranks: Sequence[int]) -> str:
    """Return "on rank 0" or "on ranks 1, 2"; a long list is shortened."""
    return f"on {listed_ranks(ranks)}"


def ranks_by_value(values: Iterable[object]) -> dict[object, list[int]]:
    """Return the ranks that hold each value: {a: [0], b: [1, 2]} for the values a, b, b of three ranks."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def by_value(values: Iterable[object]) -> str:
    """Return "a on rank 0; b on ranks 1, 2" for the values a, b, b of three ranks."""
    return "; ".join(f"{value} {on_ranks(ranks)}" for value, ranks in ranks_by_value(values).items())


def message_of(exception: BaseException) -> str:
    """Return the text of an exception, of any type: its `__str__` may raise, too."""
    try:
        return str(exception)
    except Exception as error:  # noqa: BLE001  # whatever the user's method raises
        return f"<no text: its __str__ raised {type(error).__name__}>"
