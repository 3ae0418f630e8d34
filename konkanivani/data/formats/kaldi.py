"""Kaldi data folders: wav.scp and text, with optional segments, utt2spk and reco2file_and_channel.

Paths in wav.scp are relative to the data folder or to a folder above it: recipes write them relative to the recipe's
folder, egs/x/s5 for egs/x/s5/data/train. Commands (`|`) and positions in an archive (`wav.ark:123`) are refused, never
run.

A fifth column of segments is a channel of the recording, from 0, as extract-segments reads it (-1: none).
Without it, reco2file_and_channel gives the channel of a recording: A, B, … or 1, 2, … as in STM and CTM (from 0 if the
file has a 0). If wav.scp names a mono file, the channel is only a label and has no effect.
Source: https://kaldi-asr.org/doc/data_prep.html and extract-segments of https://kaldi-asr.org/doc/tools.html
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from konkanivani.base.errors import DataError
from konkanivani.base.files import visible_entries
from konkanivani.data.audio.channels import parse_channel_cell
from konkanivani.data.audio.unicode_paths import existing_path
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.splits import split_named
from konkanivani.data.formats.tables import as_seconds, read_lines

Entry = tuple[int, str]  # line number, and the rest of the line after its key


def find_kaldi_utterances(source: SpeechFolder) -> Found:
    """Yield the lines of `text` of all data folders.

    Raises:
        DataError: If there is no wav.scp, or a data folder has no `text`.
    """
    folders = [f for f in (source.path, *visible_entries(source.path)) if (f / "wav.scp").exists()]
    if not folders:
        raise DataError(
            f"{source.path} contains no wav.scp. Use a Kaldi data folder, or a folder of them, as --source."
        )
    for folder in folders:
        split = "" if folder == source.path else split_named(folder.name)
        yield from _read_folder(source, folder, split)


def _read_folder(source: SpeechFolder, folder: Path, split: str) -> Found:
    recordings = _entries(folder / "wav.scp")
    speakers = _entries(folder / "utt2spk")
    has_segments = (folder / "segments").exists()
    segments = _entries(folder / "segments")
    channels = _labelled_channels(folder / "reco2file_and_channel")
    file = source.name_of(folder / "text")
    if not (folder / "text").exists():
        raise DataError(f"{folder} contains no transcript file `text`. Use a folder that has one as --source.")
    seen: set[str] = set()
    for row, line in read_lines(folder / "text"):
        name, *words = line.split(maxsplit=1)
        # Without segments, an utterance is a whole recording, from 0 to the end (-1).
        segment = segments.get(name) if has_segments else (row, f"{name} 0 -1")
        if name in seen:
            yield RefusedRow(file, row, "duplicate", f"the utterance {name} is listed twice", name)
        elif segment is None:
            yield RefusedRow(file, row, "missing audio", f"segments has no {name}", name)
        else:
            speaker = speakers.get(name, (0, ""))[1]
            here = FoundUtterance(file, row, Path(name), "".join(words), id=name, speaker=speaker, split=split)
            located = _located(source, folder, here, segment, recordings)
            if isinstance(located, FoundUtterance) and located.channel is None:
                # A channel column in segments has precedence.
                labelled = channels.get(segment[1].split()[0])
                located = replace(located, channel=labelled, is_channel_label=True)
            yield located
        seen.add(name)


def _located(
    source: SpeechFolder, folder: Path, found: FoundUtterance, segment: Entry, recordings: dict[str, Entry]
) -> FoundUtterance | RefusedRow:
    """Return the utterance with its audio path and span, or refused if they are unknown without running a command."""
    segment_row, spoken = segment
    name, *numbers = spoken.split() or ("",)
    start, end = map(as_seconds, numbers[:2]) if len(numbers) in (2, 3) else (None, None)
    if start is None or end is None:
        file = source.name_of(folder / "segments")
        return RefusedRow(file, segment_row, "broken row", "recording, start and end are expected", found.id)
    try:
        # extract-segments reads -1 as "no channel".
        channel = None if numbers[2:] in ([], ["-1"]) else parse_channel_cell(numbers[2], "channel")
    except ValueError:
        reason = f"its channel must be a number from 0, or -1, not {numbers[2]!r:.200}"
        return RefusedRow(source.name_of(folder / "segments"), segment_row, "channel", reason, found.id)
    if name not in recordings:
        return found.refused("missing audio", f"wav.scp has no {name}")
    recording_row, recording = recordings[name]
    reason = _reason_to_refuse(recording)
    if reason:
        file = source.name_of(folder / "wav.scp")
        return RefusedRow(file, recording_row, "command or archive", reason, recording)
    path = _audio(source, folder, recording)
    if path is None:
        places = f"{folder}, --source, --audio_root or a folder above"
        return found.refused("missing audio", f"wav.scp's {recording} is not in {places}")
    return replace(found, audio=path, start=start, seconds=None if end == -1.0 else end - start, channel=channel)


def _labelled_channels(path: Path) -> dict[str, int]:
    """Return the channel, from 0, of each recording with a letter or a number in reco2file_and_channel."""
    named = {name: words.split()[1].upper() for name, (_, words) in _entries(path).items() if len(words.split()) == 2}
    # STM and CTM count from 1; a single 0 shows that the whole file counts from 0.
    first = 0 if "0" in named.values() else 1
    numbers = {name: int(label) - first for name, label in named.items() if label.isascii() and label.isdecimal()}
    letters = {name: ord(label) - ord("A") for name, label in named.items() if re.fullmatch("[A-Z]", label)}
    return numbers | letters


def _audio(source: SpeechFolder, folder: Path, value: str) -> Path | None:
    """Return the path of a wav.scp entry, or None if the file is not found.

    An absolute path is returned unchecked. Whether the file is within the permitted folders is checked later.
    """
    if os.path.isabs(value):
        return Path(value)
    above = Path(os.path.abspath(folder)).parents
    # Also below --source and --audio_root: a data folder may be outside of the recipe's folder.
    paths = (place / value for place in (folder, source.path, source.audio_root or source.path, *above))
    return next((path for path in paths if os.path.lexists(existing_path(str(path)))), None)


def _reason_to_refuse(value: str) -> str:
    """Return why an entry of wav.scp is not a path of an audio file; "" if it may be one."""
    if value.startswith("|") or value.endswith("|"):
        return (
            "it is a command, and commands are not run: write its output to a file and use its path "
            "(docs/data.md, Paths and commands in wav.scp)"
        )
    if re.search(r"\.ark:\d+(\[.*\])?$", value):
        return "it is a position in an archive: extract the audio to files and use their paths"
    return "it is standard input, not a file" if value == "-" else ""


def _entries(path: Path) -> dict[str, Entry]:
    """Return the lines of a file by their first word; none if the file does not exist."""
    if not path.exists():
        return {}
    entries: dict[str, Entry] = {}
    for row, line in read_lines(path):
        key, *rest = line.split(maxsplit=1)
        entries[key] = (row, "".join(rest).strip())
    return entries
