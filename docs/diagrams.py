"""Draws the diagrams of the pages: `python docs/diagrams.py` writes them to docs/images.

Plain SVG: the same bytes on every machine. Each stands on a card of its own, readable on a light and a dark page, and
is as wide as a phone, so that its text keeps its size there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

WIDTH = 380
LETTER = 7.1
"""The width of a letter of Helvetica at 14, on average, with some room."""

INK, FAINT, BLUE, ORANGE, GREEN = "#1f2933", "#7b8794", "#2f6fb0", "#c8500a", "#2e7d4f"


def text(x: float, y: float, words: str, *, color: str = INK, size: int = 14, anchor: str = "middle") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: Sequence[str], color: str = BLUE) -> str:
    """Return a box with lines of text in its middle; raise a ValueError if a line is wider than the box."""
    for line in words:
        if len(line) * LETTER > width:
            raise ValueError(f"{line!r} does not fit into a box of {width:g}")
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{color}" fill-opacity="0.12"'
    first = y + height / 2 + 5 - 9 * (len(words) - 1)
    lines = [text(x + width / 2, first + 18 * index, line) for index, line in enumerate(words)]
    return "".join([f'{shape} stroke="{color}"/>', *lines])


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow."""
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{FAINT}" stroke-width="1.5" marker-end="url(#tip)"/>'


def card(height: int, title: str, parts: Sequence[str]) -> str:
    """Return a picture on a light card."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{title}</title>",
            f'<defs>{tip}<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>',
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10" fill="#fcfcfd" stroke="#cbd2d9"/>',
            '<g font-family="Helvetica, Arial, sans-serif">',
            *parts,
            "</g></svg>\n",
        ]
    )


def moved(y: float, parts: Sequence[str]) -> str:
    """Return parts, moved down."""
    return f'<g transform="translate(0 {y:g})">{"".join(parts)}</g>'


def history() -> str:
    """DataParallel, DDP and a weighted sum on the same four samples."""
    rows = (
        ("DataParallel", BLUE, (("one mean: (1+4+9+16) / 4",), ("add the devices", "1.25 + 6.25"))),
        ("DDP", ORANGE, (None, ("add the processes, divide by 2", "(2.5 + 12.5) / 2"))),
        ("weighted sum", GREEN, (None, ("add n * g, divide by the n", "(2*2.5 + 2*12.5) / (2+2)"))),
    )
    drawn: list[str] = []
    for row, (name, color, (above, below)) in enumerate(rows):
        parts = [text(190, 30, name, color=color, size=17)]
        for half, samples in enumerate(("x = 1, 2", "x = 3, 4")):
            parts.append(box(20 + 175 * half, 44, 165, 30, (samples,), color))
        if above is not None:
            parts += [arrow(102 + 175 * half, 76, 150 + 80 * half, 98) for half in (0, 1)]
            parts.append(box(20, 102, 340, 44, above, color))
        else:
            for half, loss in enumerate((("mean: (1+4) / 2", "g = 2.5"), ("mean: (9+16) / 2", "g = 12.5"))):
                parts.append(arrow(102 + 175 * half, 76, 102 + 175 * half, 98))
                parts.append(box(20 + 175 * half, 102, 165, 44, loss, color))
        parts.append(arrow(190, 148, 190, 170))
        parts.append(box(20, 174, 340, 48, below, color))
        parts.append(text(190, 246, "g = 7.5", color=color, size=17))
        drawn.append(moved(256 * row, parts))
    return card(784, "One batch of four samples, reduced in three ways", drawn)


def uneven() -> str:
    """How much each of 3 + 1 samples counts in the step."""
    rows = (
        ("stock DDP", "(mean of 3 + mean of 1) / 2 = 10.33", ORANGE, (1 / 6, 1 / 6, 1 / 6, 1 / 2)),
        ("weighted by the counts", "(3 * mean + 1 * mean) / 4 = 7.5", GREEN, (1 / 4, 1 / 4, 1 / 4, 1 / 4)),
    )
    parts: list[str] = []
    for row, (name, formula, color, shares) in enumerate(rows):
        top, left = 30 + 118 * row, 20.0
        parts.append(text(20, top, name, color=color, size=15, anchor="start"))
        parts.append(text(20, top + 20, formula, color=color, anchor="start"))
        for sample, share in enumerate(shares):
            words = (f"x = {sample + 1}", f"1/{round(1 / share)}")
            parts.append(box(left, top + 32, 340 * share - 5, 50, words, color))
            left += 340 * share
    parts.append(text(20, 262, "x = 1, 2, 3 on rank 0, x = 4 on rank 1", color=FAINT, anchor="start"))
    return card(280, "The share of each sample in one step", parts)


def short_window() -> str:
    """Ten batches in windows of four, every gradient 1."""
    parts: list[str] = []
    for row, (name, color, divisors) in enumerate(
        (("divided by 4, always", ORANGE, (4, 4, 4)), ("divided by what the window has", GREEN, (4, 4, 2)))
    ):
        top = 30 + 104 * row
        parts.append(text(20, top + 4, name, color=color, size=15, anchor="start"))
        left = 20.0
        for count, divisor in zip((4, 4, 2), divisors, strict=True):
            parts += [box(left + 32 * index, top + 16, 28, 30, ("1",), color) for index in range(count)]
            parts.append(
                text(left + 16 * count - 2, top + 68, f"{count} / {divisor} = {count / divisor:g}", color=color)
            )
            left += 32 * count + 12
    return card(226, "The last, short accumulation window", parts)


def loading() -> str:
    """A batch of eight indices, cut in two before anybody loads it."""
    parts = [text(190, 30, "a batch of the loader: 8 indices", size=15)]
    for rank, color in enumerate((BLUE, GREEN)):
        left = 20 + 175 * rank
        for index in range(4 * rank, 4 * rank + 4):
            parts.append(box(22 + 42 * index, 44, 38, 30, (str(index),), color))
        numbers = ", ".join(str(4 * rank + index) for index in range(4))
        parts.append(arrow(left + 82, 76, left + 82, 100))
        parts.append(box(left, 104, 165, 48, (f"rank {rank} loads", numbers), color))
        parts.append(arrow(left + 82, 154, left + 82, 178))
        parts.append(box(left, 182, 165, 48, ("your collate_fn,", "on its 4 samples"), color))
        parts.append(arrow(left + 82, 232, left + 82, 256))
        parts.append(box(left, 260, 165, 30, ("training_step",), color))
    return card(310, "Each rank loads and collates its own samples of a batch", parts)


def factor() -> str:
    """Two ranks with 3 and 1 loss terms: weighed losses, and one factor in the communication hook."""
    parts: list[str] = []
    for rank, (weight, color) in enumerate(((3, BLUE), (1, GREEN))):
        left = 20 + 175 * rank
        parts.append(box(left, 20, 165, 48, (f"rank {rank}: a mean", f"over n = {weight}"), color))
        parts.append(arrow(left + 82, 70, left + 82, 94))
        parts.append(box(left, 98, 165, 48, ("backward:", f"{weight} * g{rank} / u"), color))
        parts.append(arrow(left + 82, 148, 130 + 120 * rank, 184))
    parts.append(text(190, 172, "Z = 3 + 1", color=FAINT))
    parts.append(box(20, 188, 340, 48, ("hook of DDP: ranks add up,", "and multiply by u / Z, once"), ORANGE))
    parts.append(arrow(190, 238, 190, 262))
    parts.append(box(20, 266, 340, 34, ("gradient = (3 * g0 + 1 * g1) / 4",), ORANGE))
    return card(320, "The loss has the weight, the hook has the one factor", parts)


def window() -> str:
    """Two ranks with two micro-batches each: one window, one optimizer step."""
    parts: list[str] = []
    for rank, (counts, color) in enumerate((((3, 2), BLUE), ((1, 2), GREEN))):
        top = 44 + 66 * rank
        parts.append(text(20, top + 29, f"rank {rank}", color=color, anchor="start"))
        for index, count in enumerate(counts):
            parts.append(box(78 + 144 * index, top, 136, 48, (f"micro-batch {index}", f"n = {count}"), color))
    parts.append(text(218, 30, "a window: the batches of one optimizer step", color=FAINT, size=13))
    parts.append(arrow(218, 162, 218, 186))
    parts.append(box(20, 190, 340, 48, ("one optimizer step, by", "(3*g + 2*g + 1*g + 2*g) / (3+2+1+2)"), ORANGE))
    return card(258, "A window is what one optimizer step is made of", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "averaging_history.svg": history,
    "averaging_uneven.svg": uneven,
    "averaging_window.svg": short_window,
    "loading.svg": loading,
    "factor.svg": factor,
    "window.svg": window,
}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (Path(__file__).parent / "images" / file).write_text(draw(), "utf-8")
