"""Draws the diagrams of docs/averaging.md: `python docs/diagrams.py` writes them to docs/images.

Plain SVG: the same bytes on every machine. Each stands on a card of its own, readable on a light and a dark page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

INK, FAINT, BLUE, ORANGE, GREEN = "#1f2933", "#7b8794", "#2f6fb0", "#c8500a", "#2e7d4f"


def text(x: float, y: float, words: str, *, color: str = INK, size: int = 14, anchor: str = "middle") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: Sequence[str], color: str = BLUE) -> str:
    """Return a box with lines of text in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{color}" fill-opacity="0.12"'
    first = y + height / 2 + 5 - 9 * (len(words) - 1)
    lines = [text(x + width / 2, first + 18 * index, line) for index, line in enumerate(words)]
    return "".join([f'{shape} stroke="{color}"/>', *lines])


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow."""
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{FAINT}" stroke-width="1.5" marker-end="url(#tip)"/>'


def card(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return a picture on a light card."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{title}</title>",
            f'<defs>{tip}<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>',
            f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10" fill="#fcfcfd" stroke="#cbd2d9"/>',
            '<g font-family="Helvetica, Arial, sans-serif">',
            *parts,
            "</g></svg>\n",
        ]
    )


def history() -> str:
    """DataParallel, DDP and a weighted sum on the same four samples."""
    parts: list[str] = []
    for column, (name, color, below) in enumerate(
        (
            ("DataParallel", BLUE, (("one mean: (1+4+9+16) / 4",), ("add the devices", "1.25 + 6.25"))),
            ("DDP", ORANGE, (None, ("add the processes, divide by 2", "(2.5 + 12.5) / 2"))),
            ("weighted sum", GREEN, (None, ("add n * g, divide by the n", "(2*2.5 + 2*12.5) / (2+2)"))),
        )
    ):
        left = 20 + 250 * column
        parts.append(text(left + 115, 34, name, color=color, size=17))
        for half, samples in enumerate(("x = 1, 2", "x = 3, 4")):
            parts.append(box(left + 120 * half, 52, 110, 34, (samples,), color))
        if below[0] is not None:
            parts += [arrow(left + 55 + 120 * half, 88, left + 90 + 50 * half, 116) for half in (0, 1)]
            parts.append(box(left, 120, 230, 44, below[0], color))
        else:
            for half, loss in enumerate((("mean: (1+4) / 2", "g = 2.5"), ("mean: (9+16) / 2", "g = 12.5"))):
                parts.append(arrow(left + 55 + 120 * half, 88, left + 55 + 120 * half, 116))
                parts.append(box(left + 120 * half, 120, 110, 44, loss, color))
        parts.append(arrow(left + 115, 166, left + 115, 194))
        parts.append(box(left, 198, 230, 50, below[1], color))
        parts.append(text(left + 115, 276, "g = 7.5", color=color, size=17))
    return card(770, 296, "One batch of four samples, reduced in three ways", parts)


def uneven() -> str:
    """How much each of 3 + 1 samples counts in the step."""
    rows = (
        ("stock DDP: (mean of 3 + mean of 1) / 2 = 10.33", ORANGE, (1 / 6, 1 / 6, 1 / 6, 1 / 2)),
        ("weighted by the counts: (3 * mean + 1 * mean) / 4 = 7.5", GREEN, (1 / 4, 1 / 4, 1 / 4, 1 / 4)),
    )
    parts: list[str] = []
    for row, (name, color, shares) in enumerate(rows):
        top, left = 30 + 96 * row, 20.0
        parts.append(text(20, top + 4, name, color=color, size=15, anchor="start"))
        for sample, share in enumerate(shares):
            words = (f"x = {sample + 1}", f"1/{round(1 / share)}")
            parts.append(box(left, top + 16, 720 * share - 6, 50, words, color))
            left += 720 * share
    parts.append(text(20, 222, "x = 1, 2, 3 on rank 0, x = 4 on rank 1", color=FAINT, anchor="start"))
    return card(754, 240, "The share of each sample in one step", parts)


def window() -> str:
    """Ten batches in windows of four, every gradient 1."""
    parts: list[str] = []
    for row, (name, color, divisors) in enumerate(
        (("divided by 4, always", ORANGE, (4, 4, 4)), ("divided by what the window has", GREEN, (4, 4, 2)))
    ):
        top = 30 + 104 * row
        parts.append(text(20, top + 4, name, color=color, size=15, anchor="start"))
        left = 20.0
        for count, divisor in zip((4, 4, 2), divisors, strict=True):
            parts += [box(left + 64 * index, top + 16, 58, 30, ("1",), color) for index in range(count)]
            parts.append(
                text(left + 32 * count - 3, top + 68, f"{count} / {divisor} = {count / divisor:g}", color=color)
            )
            left += 64 * count + 30
    return card(740, 226, "The last, short accumulation window", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "averaging_history.svg": history,
    "averaging_uneven.svg": uneven,
    "averaging_window.svg": window,
}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (Path(__file__).parent / "images" / file).write_text(draw(), "utf-8")
