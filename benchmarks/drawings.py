#!/usr/bin/env python3
"""Draw the README's pictures as SVG: the data flow, a step compared with other toolkits and, with a model, subtitles.

    python3 benchmarks/drawings.py
    python3 benchmarks/drawings.py --checkpoint checkpoints/checkpoint_best.pt --manifest data/builtin/test.jsonl
    python3 benchmarks/drawings.py --font NotoSansDevanagari-Regular.ttf --words WORD ...

The bars show the last table of contestants in docs/performance.md. The subtitles are transcribe.py's for some
utterances of one voice, joined with pauses; recognition errors are underlined. Devanagari text is drawn as outlines.
The last command only adds outlines of words; it needs `pip install fonttools uharfbuzz` and a font under a free
licence. A different font replaces all outlines, so give all words then.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import difflib
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import soundfile

from benchmarks.measuring.svg import OUTLINES, arrow, circle, outlined_text, page, path, rectangle, text
from konkanivani.command_line import read_flags, run_script
from konkanivani.errors import DataError

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(
    r"^\| (konkanivani|speechbrain|espnet)[^|]*\| [\d.]+ M \| (\d+ x \d+) \| ([\d.]+) \|(?:[^|]*\|){2} (\d+) \|"
)
NAMES = {"konkanivani": "KonkaniVani", "speechbrain": "SpeechBrain", "espnet": "ESPnet"}
BARS_WIDTH, BARS_HEIGHT = 960, 392
NAME_X, PANELS, MAX_SECONDS = 148, (168, 580), 280
GROUPS = (("Fastest split of the batch", 64), ("Split of the batch with the lowest peak", 216))


LEGEND = "4 × 2: four micro-batches of two utterances; 62.6 s of audio in all. Shorter is better."


@dataclass(frozen=True)
class Measured:
    """A step of one toolkit: the split into micro-batches, seconds, and MiB at the peak."""

    toolkit: str
    cut: str
    seconds: float
    mib: float


def read_contest(markdown: str) -> list[Measured]:
    """Return the rows of the last table of contestants."""
    table = markdown[markdown.rindex("| contestant | parameters |") :]
    rows = [ROW.match(line) for line in table.split("\n\n")[0].splitlines()[2:]]
    return [Measured(row[1], row[2], float(row[3]), float(row[4])) for row in rows if row]


def steps_beside_others(markdown: str) -> str:
    """Return the picture as SVG: each toolkit's fastest step and its step with the lowest peak."""
    measured = read_contest(markdown)
    of_each = [[each for each in measured if each.toolkit == toolkit] for toolkit in NAMES]
    best = [min(rows, key=lambda row: row.seconds) for rows in of_each]
    leanest = [min(rows, key=lambda row: row.mib) for rows in of_each]
    longest = max(row.seconds for row in best + leanest), max(row.mib for row in best + leanest)
    heads = zip(PANELS, ("Seconds per step", "Peak memory, MiB"), strict=True)
    shapes = [text("text", left, 34, head, 15, 600) for left, head in heads]
    shapes.append(text("quiet", PANELS[0], 372, LEGEND, 11))
    for (title, top), rows in zip(GROUPS, (best, leanest), strict=True):
        shapes.append(text("quiet", PANELS[0], top, title, 12))
        for number, row in enumerate(rows):
            shapes += bars(row, top + 14 + 40 * number, longest)
    return page(
        BARS_WIDTH,
        BARS_HEIGHT,
        "Seconds and peak memory of a training step, compared with SpeechBrain and ESPnet",
        shapes,
    )


def bars(row: Measured, top: float, longest: tuple[float, float]) -> list[str]:
    """Return the toolkit's name and its two bars."""
    kind, weight = ("orange", 600) if row.toolkit == "konkanivani" else ("pale", 400)
    shapes = [
        text("text", NAME_X, top + 16, NAMES[row.toolkit], 14, weight, "end"),
        text("quiet", NAME_X, top + 31, row.cut.replace("x", "×"), 11, 400, "end"),
    ]
    values = (row.seconds, f"{row.seconds:.2f}"), (row.mib, f"{row.mib:.0f}")
    for left, (value, said), most in zip(PANELS, values, longest, strict=True):
        length = MAX_SECONDS * value / most
        shapes.append(rectangle(kind, left, top + 4, length, 26, 4))
        shapes.append(text("text", left + length + 8, top + 22, said, 14, weight))
    return shapes


FLOW_WIDTH, FLOW_HEIGHT = 960, 452
CARD_WIDTH, CARD_HEIGHT, GAP, FLOW_LEFT = 160, 156, 26, 28
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
    shapes = [text("quiet", FLOW_LEFT, 34, "INPUT", 11, 600), text("quiet", FLOW_LEFT, 256, "TRAINING", 11, 600)]
    for number, (title, said, drawing) in enumerate(cards):
        x, y = FLOW_LEFT + number % 5 * (CARD_WIDTH + GAP), ROWS[number // 5]
        shapes.append(rectangle("card", x, y, CARD_WIDTH, CARD_HEIGHT, corner=10))
        shapes += drawing(x + 20, y + 16)
        shapes.append(text("text", x + CARD_WIDTH / 2, y + 122, title, 15, 600, "middle"))
        shapes.append(text("quiet", x + CARD_WIDTH / 2, y + 141, said, 11, 400, "middle"))
        if number % 5 < 4:
            middle = y + CARD_HEIGHT / 2
            shapes.append(arrow([(x + CARD_WIDTH + 4, middle), (x + CARD_WIDTH + GAP - 4, middle)]))
    return page(FLOW_WIDTH, FLOW_HEIGHT, "Data flow: from recordings to words", shapes + turns())


def turns() -> list[str]:
    """Return the arrows from the first row to the second, and from an update to the next global batch."""
    encoder_x, heads_x = FLOW_LEFT + 4 * (CARD_WIDTH + GAP) + CARD_WIDTH / 2, FLOW_LEFT + CARD_WIDTH / 2
    update_x = FLOW_LEFT + 2 * (CARD_WIDTH + GAP) + CARD_WIDTH / 2
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


TRANSCRIBE = Path(__file__).resolve().parents[1] / "training_scripts" / "transcribe.py"
PAUSE = 0.6  # seconds between two sentences
WIDTH, HEIGHT = 960, 404
LEFT, TOP, SCREEN = 24, 24, 560  # of the player
FILE_LEFT = 612


@dataclass(frozen=True)
class Said:
    """Samples (S,) between -1 and 1 at `rate`, and their sentences."""

    samples: np.ndarray
    rate: int
    texts: tuple[str, ...]


def joined_utterances(manifest: Path, speaker: str, count: int) -> Said:
    """Return the first `count` utterances of a speaker, with pauses between them."""
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["speaker"] == speaker][:count]
    parts, rate = [], 16_000
    for row in rows:
        samples, rate = soundfile.read(manifest.parent / row["audio_filepath"], dtype="float32")
        parts += [samples, np.zeros(int(PAUSE * rate), dtype=np.float32)]
    return Said(np.concatenate(parts or [np.zeros(0)]), rate, tuple(row["text"] for row in rows))


def transcribe(said: Said, checkpoint: Path) -> tuple[list[dict], list[str]]:
    """Return the segments of transcribe.py's JSON and the cues of its SRT."""
    with tempfile.TemporaryDirectory() as folder:
        soundfile.write(f"{folder}/speech.flac", said.samples, said.rate)
        command = [sys.executable, str(TRANSCRIBE), f"{folder}/speech.flac", "--checkpoint", str(checkpoint)]
        command += ["--decode", "joint", "--device", "cpu", "--timestamps"]
        done = [
            subprocess.run([*command, *how], capture_output=True, text=True)
            for how in (("word", "--format", "json"), ("segment", "--format", "srt"))
        ]
    if any(each.returncode for each in done):
        raise DataError(
            f"The recording cannot be transcribed: {done[0].stderr or done[1].stderr} Give another --checkpoint."
        )
    return json.loads(done[0].stdout)["segments"], done[1].stdout.strip().split("\n\n")


def player(said: Said, checkpoint: Path) -> str:
    """Return the picture as SVG, with the longest sentence on the screen."""
    segments, cues = transcribe(said, checkpoint)
    wrong = misheard(said, segments)
    shown = max(range(len(segments)), key=lambda n: len(segments[n]["words"]))
    seconds = len(said.samples) / said.rate
    shapes = [rectangle("card", LEFT, TOP, SCREEN, HEIGHT - 48, corner=10)]
    shapes += screen(said, segments[shown]) + controls(segments[shown], seconds)
    shapes += [text("quiet", FILE_LEFT, TOP + 14, "speech.srt", 12, 600)]
    for number, cue in enumerate(cues):
        top = TOP + 36 + sum(cue_height(before) for before in cues[:number])
        shapes += srt_cue(cue, top, number == shown, wrong)
    if wrong:
        shapes.append(text("quiet", FILE_LEFT, HEIGHT - 30, "Underlined: recognition error.", 11))
    return page(WIDTH, HEIGHT, "A recording with the subtitles from transcribe.py", shapes)


def misheard(said: Said, segments: list[dict]) -> set[str]:
    """Return the recognised words that differ from the spoken ones."""
    heard = " ".join(segment["text"] for segment in segments).split()
    opcodes = difflib.SequenceMatcher(None, " ".join(said.texts).split(), heard, autojunk=False).get_opcodes()
    return {word for kind, _, _, first, last in opcodes if kind != "equal" for word in heard[first:last]}


def screen(said: Said, segment: dict) -> list[str]:
    """Return the waveform of the segment, each word below its part, and the subtitle."""
    start, end = segment["start"], segment["end"]
    scale = (SCREEN - 56) / (end - start)
    left, middle = LEFT + 28, TOP + 96
    samples = said.samples[int(start * said.rate) : int(end * said.rate)]
    peaks = [np.abs(part).max() for part in np.array_split(samples, 126)]
    drawn = "".join(
        f"M{left + 4 * n + 2:g} {middle - 2 - 56 * peak / max(peaks):.1f}v{4 + 112 * peak / max(peaks):.1f}"
        for n, peak in enumerate(peaks)
    )
    shapes = [path("blue_line", drawn, 2.4)]
    for word in segment["words"]:
        x, width = left + scale * (word["start"] - start), scale * (word["end"] - word["start"])
        shapes += [rectangle("orange", x + 1, middle + 70, width - 4, 4, 2)]
        shapes += [text("quiet", x + width / 2 - 1, middle + 92, word["text"], 13, 400, "middle")]
        shapes += [text("quiet", x + 1, middle - 68, f"{word['start']:.2f}", 10)]
    shapes.append(text("text", LEFT + SCREEN / 2, TOP + 266, segment["text"], 22, 600, "middle"))
    return shapes


def controls(segment: dict, seconds: float) -> list[str]:
    """Return a play button, a progress bar and the time."""
    y, left, right = TOP + 318, LEFT + 64, LEFT + SCREEN - 112
    at = left + (right - left) * segment["end"] / seconds
    button = f"M{LEFT + 30:g} {y - 9:g}L{LEFT + 46:g} {y:g}L{LEFT + 30:g} {y + 9:g}Z"
    clock = "0:{:02.0f} / 0:{:02.0f}".format(segment["end"], seconds)
    return [
        path("text", button, 0),
        rectangle("pale", left, y - 3, right - left, 6, 3),
        rectangle("orange", left, y - 3, at - left, 6, 3),
        circle("orange", at, y, 8),
        text("quiet", right + 18, y + 5, clock, 13),
    ]


def srt_cue(cue: str, top: float, is_shown: bool, wrong: set[str]) -> list[str]:
    """Return the lines of a cue as in the file."""
    number, times, *lines = cue.split("\n")
    shapes = [rectangle("card", FILE_LEFT - 12, top - 10, 336, cue_height(cue) - 7, corner=8)] if is_shown else []
    shapes += [text("code quiet", FILE_LEFT, top + 8, number, 12), text("code quiet", FILE_LEFT, top + 26, times, 12)]
    for n, line in enumerate(lines):
        shapes.append(outlined_text("text", FILE_LEFT, top + 48 + 20 * n, line, 15, underlined=frozenset(wrong)))
    return shapes


def cue_height(cue: str) -> float:
    """Return the height of a cue in pixels."""
    return 34 + 20 * (cue.count("\n") - 1) + 17


FULL_NAME, VERSION, COPYRIGHT, LICENSE, LICENSE_URL = 4, 5, 0, 13, 14  # of the OpenType `name` table


class Shaper:
    """Shaper of words with HarfBuzz, which also draws their glyphs."""

    def __init__(self, path: Path) -> None:
        # Imported here: drawing the pictures does not need these packages.
        import uharfbuzz
        from fontTools.ttLib import TTFont

        self.tables = TTFont(path)
        self.glyphs = self.tables.getGlyphSet()
        self.font = uharfbuzz.Font(uharfbuzz.Face(path.read_bytes()))

    def shape(self, text: str) -> dict[str, str | int]:
        """Return the outline of `text` as an SVG path in font units, the y axis pointing down, and its advance."""
        import uharfbuzz
        from fontTools.pens.svgPathPen import SVGPathPen
        from fontTools.pens.transformPen import TransformPen

        buffer = uharfbuzz.Buffer()
        buffer.add_str(text)
        buffer.guess_segment_properties()
        uharfbuzz.shape(self.font, buffer)
        pen = SVGPathPen(self.glyphs, ntos=lambda number: str(round(number)))
        advance = 0
        for glyph, position in zip(buffer.glyph_infos, buffer.glyph_positions, strict=True):
            if glyph.codepoint == 0:
                raise SystemExit(f"The font has no glyph for {text}. Give a font that covers Devanagari.")
            move = (1, 0, 0, -1, advance + position.x_offset, -position.y_offset)
            self.glyphs[self.tables.getGlyphName(glyph.codepoint)].draw(TransformPen(pen, move))
            advance += position.x_advance
        return {"path": pen.getCommands(), "advance": advance}

    def description(self) -> dict[str, str | int]:
        """Return the font's name, copyright, licence and metrics."""
        name = self.tables["name"].getDebugName
        return {
            "font": f"{name(FULL_NAME)}, {name(VERSION).split(';')[0]}",
            "copyright": name(COPYRIGHT),
            "license": f"{name(LICENSE)} {name(LICENSE_URL)}",
            "units_per_em": self.tables["head"].unitsPerEm,
            "space": self.shape(" ")["advance"],
        }


def add_outlines(font: Path, texts: Sequence[str]) -> str:
    """Add the outlines of all words of the texts to outlines.json; return a sentence about them."""
    shaper = Shaper(font)
    described = shaper.description()
    stored = json.loads(OUTLINES.read_text(encoding="utf-8")) if OUTLINES.exists() else {}
    # Words of two fonts in one picture would not match.
    words = stored["words"] if stored.get("font") == described["font"] else {}
    words |= {word: shaper.shape(word) for text in texts for word in text.split()}
    outlines = {**described, "words": dict(sorted(words.items()))}
    OUTLINES.write_text(json.dumps(outlines, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return f"{OUTLINES} has {len(words)} words."


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    output: str = "docs"
    """Folder for the SVG files."""
    checkpoint: str | None = None
    """Also draw subtitles with this checkpoint_*.pt file."""
    manifest: str = "data/builtin/test.jsonl"
    """Manifest with the utterances for the subtitles."""
    speaker: str = "mr+linda"
    """Speaker of these utterances."""
    sentences: int = 4
    """Number of utterances."""
    font: str | None = None
    """Add outlines of --words from this TrueType or OpenType font, and draw nothing."""
    words: tuple[str, ...] = ()
    """Devanagari words to add."""


def draw(flags: Flags) -> str:
    """Write the pictures and return a sentence about them."""
    if flags.font:
        return add_outlines(Path(flags.font), flags.words)

    folder = Path(flags.output)
    folder.mkdir(parents=True, exist_ok=True)
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    pictures = {"flow.svg": way_of_the_data(), "step_comparison.svg": steps_beside_others(performance)}
    if flags.checkpoint:
        said = joined_utterances(Path(flags.manifest), flags.speaker, flags.sentences)
        if not said.texts:
            raise DataError(f"{flags.manifest} has no utterance of {flags.speaker}. Give --speaker.")
        pictures["subtitles.svg"] = player(said, Path(flags.checkpoint))
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")
    return f"Drawn into {folder}: {', '.join(pictures)}."


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: draw(flags)))
