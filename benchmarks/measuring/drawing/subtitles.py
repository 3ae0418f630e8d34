"""A recording in a player with its subtitles, and the SRT file that transcribe.py wrote."""

import difflib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.measuring.drawing.outlines import outlined_text
from benchmarks.measuring.drawing.svg import circle, page, path, rectangle, text
from konkanivani.base.errors import DataError

TRANSCRIBE = Path(__file__).resolve().parents[3] / "training_scripts" / "transcribe.py"
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
