"""Data flow from recordings to recognised words: ten cards, each with a small drawing."""

import math

from benchmarks.measuring.drawing.svg import arrow, circle, page, path, rectangle, text

WIDTH, HEIGHT = 960, 452
CARD_WIDTH, CARD_HEIGHT, GAP, LEFT = 160, 156, 26, 28
ROWS = (52, 272)  # tops
SHADES = 0.15, 0.3, 0.55, 0.8, 1.0


def way_of_the_data() -> str:
    """Return the picture as SVG."""
    cards = (
        ("Recordings", "WAV, FLAC, MP3, M4A, …", wave),
        ("Manifest", "one line of JSON each", manifest),
        ("Batches", "split into micro-batches", batches),
        ("Features", "log-mel, on the device", features),
        ("Encoder", "Conformer, frames / 4", encoder),
        ("CTC and attention", "two heads, one loss", heads),
        ("Gradient", "equal for any split", gradient),
        ("Update", "AdamW, if finite", update),
        ("Checkpoint", "complete or absent", checkpoint),
        ("Words", "with word times", words),
    )
    shapes = [text("quiet", LEFT, 34, "INPUT", 11, 600), text("quiet", LEFT, 256, "TRAINING", 11, 600)]
    for number, (title, said, drawing) in enumerate(cards):
        x, y = LEFT + number % 5 * (CARD_WIDTH + GAP), ROWS[number // 5]
        shapes.append(rectangle("card", x, y, CARD_WIDTH, CARD_HEIGHT, corner=10))
        shapes += drawing(x + 20, y + 16)
        shapes.append(text("text", x + CARD_WIDTH / 2, y + 122, title, 15, 600, "middle"))
        shapes.append(text("quiet", x + CARD_WIDTH / 2, y + 141, said, 11, 400, "middle"))
        if number % 5 < 4:
            middle = y + CARD_HEIGHT / 2
            shapes.append(arrow([(x + CARD_WIDTH + 4, middle), (x + CARD_WIDTH + GAP - 4, middle)]))
    return page(WIDTH, HEIGHT, "Data flow: from recordings to words", shapes + turns())


def turns() -> list[str]:
    """Return the arrows from the first row to the second, and from an update to the next global batch."""
    encoder_x, heads_x = LEFT + 4 * (CARD_WIDTH + GAP) + CARD_WIDTH / 2, LEFT + CARD_WIDTH / 2
    update_x = LEFT + 2 * (CARD_WIDTH + GAP) + CARD_WIDTH / 2
    below, above, between = ROWS[0] + CARD_HEIGHT, ROWS[1], 250
    return [
        arrow([(encoder_x, below + 4), (encoder_x, between), (heads_x + 60, between), (heads_x + 60, above - 4)]),
        arrow([(update_x, above - 4), (update_x, below + 4)], "orange_line", "orange"),
        text("quiet", update_x + 12, 236, "next global batch", 11, 600),
    ]


# Each drawing is 120 wide and 84 high, with its top left corner at (x, y).


def wave(x: float, y: float) -> list[str]:
    heights = [6 + 34 * abs(math.sin(0.55 * n) * math.sin(0.13 * n + 0.3)) for n in range(20)]
    return [rectangle("blue", x + 6 * n, y + 42 - h, 3, 2 * h) for n, h in enumerate(heights)]


def manifest(x: float, y: float) -> list[str]:
    shapes = []
    for row, (name, said) in enumerate(((34, 52), (34, 64), (34, 44), (34, 58))):
        top = y + 8 + 19 * row
        shapes += [text("code quiet", x, top + 10, "{", 14), rectangle("blue", x + 12, top + 2, name, 8, 4)]
        shapes += [rectangle("pale", x + 52, top + 2, said, 8, 4)]
    return shapes


def batches(x: float, y: float) -> list[str]:
    """Return three micro-batches, each of utterances with similar lengths."""
    shapes = []
    for top, lengths in ((0, (118, 110)), (30, (84, 80)), (60, (58, 52, 48))):
        height = 24 / len(lengths) - 1.5
        shapes += [
            rectangle("blue", x, y + top + n * (height + 1.5), length, height) for n, length in enumerate(lengths)
        ]
    return shapes


def features(x: float, y: float) -> list[str]:
    shapes = []
    for column in range(15):
        for band in range(9):
            height = 4.5 + 2.6 * math.sin(0.45 * column)
            near = max(math.exp(-((band - height) ** 2) / 3), 0.8 * math.exp(-((band - height / 3) ** 2)))
            shade = min(SHADES, key=lambda each: abs(each - near))
            cell = rectangle("blue", x + 8 * column, y + 9.3 * (8 - band), 7, 8.3, 1)
            shapes.append(cell.replace("/>", f' opacity="{shade}"/>'))
    return shapes


def encoder(x: float, y: float) -> list[str]:
    shapes = []
    for layer in range(5):
        shapes.append(rectangle("blue" if layer % 2 == 0 else "pale", x + 12, y + 70 - 17 * layer, 96, 12, 4))
    return [path("line", f"M{x + 60:g} {y + 86:g}V{y - 2:g}", 2), *shapes]


def heads(x: float, y: float) -> list[str]:
    """Return CTC's spikes on the left and attention's diagonal on the right."""
    spikes = "".join(f"M{x + 4 + 10 * n:g} {y + 78:g}v-{height}" for n, height in enumerate((18, 56, 8, 40, 66, 30)))
    shapes = [path("orange_line", spikes, 4)]
    for row in range(6):
        for column in range(6):
            near = row == column
            kind = "green" if near else "pale"
            shapes.append(rectangle(kind, x + 66 + 9 * column, y + 22 + 9.5 * row, 7.5, 8, 1.5))
    return shapes


def gradient(x: float, y: float) -> list[str]:
    """Return the gradients of three micro-batches and their sum."""
    shapes = [rectangle("blue", x + 2, y + top, width, 12, 4) for top, width in ((4, 46), (36, 34), (68, 24))]
    for top in (10, 42, 74):
        bend = f"C{x + 70:g} {y + top:g} {x + 66:g} {y + 42:g} {x + 80:g} {y + 42:g}"
        shapes.append(path("line", f"M{x + 54:g} {y + top:g}{bend}"))
    plus = f"M{x + 98:g} {y + 34:g}v16M{x + 90:g} {y + 42:g}h16"
    return [*shapes, circle("orange_line", x + 98, y + 42, 16), path("orange_line", plus, 2.5)]


def update(x: float, y: float) -> list[str]:
    """Return a falling loss curve with steps."""
    curve = f"M{x + 4:g} {y + 8:g}C{x + 22:g} {y + 66:g} {x + 44:g} {y + 74:g} {x + 116:g} {y + 76:g}"
    shapes = [path("line", curve, 2)]
    for at_x, at_y in ((8, 20), (20, 46), (38, 63), (62, 71), (92, 75)):
        shapes.append(circle("orange", x + at_x, y + at_y, 5))
    return shapes


def checkpoint(x: float, y: float) -> list[str]:
    shapes = []
    for level in (56, 34, 12):
        side = f"M{x + 22:g} {y + level:g}v14c0 6 17 10 38 10s38 -4 38 -10v-14"
        lid = f"M{x + 22:g} {y + level:g}c0 -6 17 -10 38 -10s38 4 38 10s-17 10 -38 10s-38 -4 -38 -10Z"
        shapes += [path("blue", side, 0), path("pale", lid, 0)]
    return shapes


def words(x: float, y: float) -> list[str]:
    shapes = [text("text", x + 60, y + 36, "हांव बाजारांत वता", 17, 600, "middle")]
    for start, end in ((2, 32), (36, 88), (92, 118)):
        shapes.append(rectangle("green", x + start, y + 52, end - start, 8, 4))
    return shapes
