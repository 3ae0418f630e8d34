"""A folder tree of audio files, each with its transcript in a .txt file of the same name.

Folders named train, valid (or dev) and test give the splits; the uppermost counts. The lines of a transcript are joined
by spaces.
"""

from collections.abc import Iterator
from pathlib import Path

from konkanivani.base.errors import DataError
from konkanivani.base.files import visible_files
from konkanivani.data.audio.names import AUDIO_SUFFIXES, audio_rank
from konkanivani.data.audio.unicode_paths import existing_path
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.splits import split_of_path
from konkanivani.data.formats.tables import read_text


def find_folder_utterances(source: SpeechFolder) -> Found:
    """Yield one utterance per recording, in the order of names, from its best-known audio format."""
    root = source.path.resolve()
    files = list(audio_files(source.path))
    best: dict[Path, Path] = {}
    for audio in files:
        # A recording may exist as .wav and .mp3; its transcript is used once.
        stem = audio.with_suffix("")
        best[stem] = min(audio, best.get(stem, audio), key=audio_rank)
    for audio in files:
        transcript = Path(existing_path(str(audio.with_suffix(".txt"))))
        taken = best[audio.with_suffix("")]
        file = source.name_of(transcript)
        if taken != audio and transcript.exists():
            reason = f"its transcript is already used for {taken.name} in the same folder"
            yield RefusedRow(file, 1, "recorded twice", reason, source.name_of(audio), is_expected=True)
        elif not transcript.exists():
            yield RefusedRow(file, 1, "no transcript", "the file does not exist", source.name_of(audio))
        # A downloaded corpus must not copy files from elsewhere into the manifests through a symbolic link.
        elif not transcript.resolve().is_relative_to(root):
            yield RefusedRow(
                file, 1, "outside the corpus", "the transcript is a link to a file outside the corpus", str(audio)
            )
        else:
            split = split_of_path(audio.relative_to(source.path).parts[:-1])
            try:
                yield FoundUtterance(file, 1, audio, " ".join(read_text(transcript).split()), split=split)
            except DataError as error:
                yield RefusedRow(file, 1, "no transcript", str(error), str(audio))


def audio_files(folder: Path) -> Iterator[Path]:
    """Return all files below `folder` with an audio suffix, in the order of `visible_files`."""
    return (path for path in visible_files(folder) if path.suffix.lower() in AUDIO_SUFFIXES)
