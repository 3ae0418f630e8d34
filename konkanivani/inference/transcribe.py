"""Transcription of audio files and folders, to the screen or to files."""

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
from tqdm import tqdm

from konkanivani.command_line import is_out_of_memory
from konkanivani.console import count, printable
from konkanivani.data.audio.files import SIGN, AudioSource, ShortAudio, UnusableAudio, claimed_header
from konkanivani.data.audio.paths import AUDIO_SUFFIXES, existing_path
from konkanivani.data.batching import partition
from konkanivani.distributed import ALONE, Topology, broadcast_from_rank0, gather
from konkanivani.errors import DataError, ResourceError, UsageError, explained
from konkanivani.files import atomic_replace, sole_writer, visible_files, without_empty_folders
from konkanivani.inference.recognizer import Recognizer
from konkanivani.inference.word_times import Segment, TextFormat, Timestamps, render

Existing = Literal["refuse", "keep", "replace"]
Held = tuple[str, bool]  # text, and whether it is for stderr


@dataclass(frozen=True)
class Recording:
    """Audio file, and the name of its transcript relative to the output folder, without suffix.

    `called` is the name in messages if it is not the path.
    """

    path: Path
    name: Path
    called: str = ""

    def __str__(self) -> str:
        return self.called or str(self.path)


def find_recordings(paths: Sequence[str], spooled: Path | None = None) -> list[Recording]:
    """Return the given files and, for each given folder, its audio and video files sorted by name.

    Args:
        paths: files and folders. Hidden files in folders are skipped unless they are given by name. Links to folders
            inside them are not followed.
        spooled: file with the content of standard input, read for the path "-".

    Raises a UsageError for a URL, and a DataError that names a folder without audio files.
    """
    recordings = []
    for address in (path for path in paths if "://" in path):
        raise UsageError(f"{address} is a URL. Download the file first.")
    for path in (Path(existing_path(path)) for path in paths):
        if spooled is not None and str(path) == SIGN:
            recordings.append(Recording(spooled, Path("stdin"), SIGN))
            continue
        # Unlike Path.is_dir before Python 3.12, os.path.isdir returns False for paths that cannot be examined.
        if not os.path.isdir(path):
            recordings.append(Recording(path, Path(path.name)))
            continue
        audible = sorted(
            audio_path for audio_path in visible_files(path) if audio_path.suffix.lower() in AUDIO_SUFFIXES
        )
        if not audible:
            raise DataError(f"The folder {path} contains no readable audio file. Give another folder, or files.")
        recordings += [Recording(audio_path, audio_path.relative_to(path)) for audio_path in audible]
    return recordings


def output_paths(recordings: Sequence[Recording], directory: Path, text_format: TextFormat) -> list[Path]:
    """Return the path of each transcript: the audio file's name with the suffix of the text format.

    If two recordings would get the same path, the new suffix is appended to the old one. Raises a UsageError if their
    paths are still equal.
    """
    short = [directory / recording.name.with_suffix(f".{text_format}") for recording in recordings]
    times = Counter(short)
    paths = [
        path if times[path] == 1 else directory / f"{recording.name}.{text_format}"
        for path, recording in zip(short, recordings, strict=True)
    ]
    first_by_path: dict[Path, Recording] = {}
    for path, recording in zip(paths, recordings, strict=True):
        if path in first_by_path:
            raise UsageError(
                f"The transcripts of {first_by_path[path]} and {recording} would both be written to {path}. Use two "
                "calls with different --output_dir."
            )
        first_by_path[path] = recording
    return paths


@dataclass(frozen=True)
class Transcription:
    """Settings of a transcription run, in which the ranks divide the recordings among them.

    Args:
        output: folder of the transcripts, None for the screen.
        existing: treatment of existing transcripts, which may contain manual corrections.
        topology: ranks. Rank 0 writes the screen output of all ranks.
    """

    load: Callable[[], Recognizer]
    text_format: TextFormat
    timestamps: Timestamps
    output: Path | None
    existing: Existing = "refuse"
    topology: Topology = ALONE

    def run(self, recordings: Sequence[Recording]) -> str:
        """Transcribe all recordings and return a sentence about the files written, or "".

        Errors in one recording are printed on stderr, and the remaining recordings are still transcribed. At the end a
        DataError states the number of failures. With a single recording the DataError states its problem.
        """
        targets, done = self._targets(recordings)
        with without_empty_folders({target.absolute().parent for target in targets if target is not None}):
            failed = self._run_all(recordings, targets, done)
        if failed:
            raise DataError(
                f"{failed} of {len(recordings)} files could not be transcribed (see the errors above). Repair "
                "them or leave them out; the others are done."
            )
        return "" if self.output is None else f"{count(len(recordings), 'transcript')} in {self.output}."

    def _run_all(self, recordings: Sequence[Recording], targets: Sequence[Path | None], done: list[bool]) -> int:
        """Transcribe this rank's portion; return the number of failed recordings over all ranks."""
        is_only_recording = len(recordings) == 1
        failed = 0
        recognizer = self.load()  # takes seconds, so it comes after all checks that may refuse the run
        # A missing file counts 0 here; its error is raised when it is opened.
        paths = [recording.path for recording in recordings]
        sizes = np.array([path.stat().st_size if os.path.isfile(path) else 0 for path in paths])
        # File size approximates duration. Every rank computes the same partition, without communication.
        portion = partition(sizes, self.topology.world_size)[self.topology.rank]
        shown = [recordings[number] for number in portion]
        with _Progress(shown, self.topology) as progress, _report_short_audio(progress):
            for number in portion:
                try:
                    is_new = not done[number] and self._transcribe(
                        recognizer, recordings[number], targets[number], progress, is_only_recording
                    )
                    if self.output is not None:
                        name = printable(targets[number]) + ("" if is_new else " already exists")
                        progress.write(f"{number + 1} of {len(targets)}: {name}\n", sys.stderr)
                except UnusableAudio as error:
                    if is_only_recording:
                        raise
                    failed += 1
                    progress.write(f"{printable(error)}\n", sys.stderr)
                progress.end(int(number))
        return sum(gather(self.topology, failed))

    def _targets(self, recordings: Sequence[Recording]) -> tuple[Sequence[Path | None], list[bool]]:
        """Return the path of each transcript (None for the screen), and which existing transcripts are kept."""
        if self.output is not None:
            paths = output_paths(recordings, self.output, self.text_format)
            # Only rank 0 checks: ranks that see other states of a shared file system would disagree on the work.
            exists = broadcast_from_rank0(self.topology, lambda: [os.path.exists(path) for path in paths])
            if any(exists) and self.existing == "refuse":
                raise UsageError(
                    f"{paths[exists.index(True)]} already exists, one of {sum(exists):,}. Use --existing keep to make "
                    "only the missing transcripts, --existing replace to make all, or choose another --output_dir."
                )
            return paths, [self.existing == "keep" and is_there for is_there in exists]
        if self.text_format in ("srt", "vtt") and len(recordings) > 1:
            raise UsageError(f"Subtitles of {len(recordings)} recordings need one file each. Give an --output_dir.")
        return [None] * len(recordings), [False] * len(recordings)

    def _transcribe(
        self,
        recognizer: Recognizer,
        recording: Recording,
        target: Path | None,
        progress: "_Progress",
        is_only_recording: bool,
    ) -> bool:
        """Transcribe to the file `target` or the screen; return False if another process has written the file."""
        try:
            segments = progress.follow(recording, recognizer.segments(recording.path))
            texts = render(segments, self.text_format, self.timestamps, str(recording))
            if target is not None:
                return write_text(target, texts, is_kept=self.existing == "keep")
            if self.text_format == "txt" and not is_only_recording:
                progress.write(f"==> {printable(recording)} <==\n", sys.stdout)
            for text in texts:
                progress.write(text, sys.stdout)
            return True
        except UnusableAudio as error:
            # Name standard input as the user did, not the spool file.
            raise UnusableAudio(AudioSource(str(recording)), error.reason) from None
        except (MemoryError, RuntimeError) as error:
            # CUDA reports missing memory as a RuntimeError.
            if not is_out_of_memory(error):
                raise
            raise ResourceError(
                f"Out of memory at {recording}. Use a lower --longest_piece or --beam, or --device cpu."
            ) from None


class _Progress:
    """Progress bar on stderr, in seconds of transcribed audio, if stderr is a terminal; a context manager.

    A single process prints transcripts immediately. With several ranks they are printed at the end, in the order of the
    recordings.
    """

    def __init__(self, recordings: Sequence[Recording], topology: Topology) -> None:
        self._topology = topology
        self._current_output: list[Held] = []  # output of the current recording
        self._outputs: list[tuple[int, list[Held]]] = []
        # Durations are read from all headers only if there is a bar to show.
        is_shown = sys.stderr.isatty()
        self._seconds = {recording.path: _seconds(recording.path) for recording in recordings if is_shown}
        shape = "{percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s of audio, {remaining} left"
        self._bar = tqdm(total=sum(self._seconds.values()), disable=not is_shown, bar_format=shape, leave=False)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_details: object) -> None:
        self._bar.close()
        # After an exception other ranks may not reach the collective below.
        if kind is not None or self._topology.is_single_process:
            return
        of_all = [message for messages in gather(self._topology, self._outputs) for message in messages]
        for _, pieces in sorted(of_all, key=lambda message: message[0]):
            for text, is_error in pieces:
                print(text, end="", file=sys.stderr if is_error else sys.stdout, flush=True)

    def end(self, number: int) -> None:
        """Finish the recording with this number."""
        self._outputs.append((number, self._current_output))
        self._current_output = []

    def write(self, text: str, stream: TextIO) -> None:
        """Write text without damage to the progress bar."""
        if not self._topology.is_single_process:
            self._current_output.append((text, stream is sys.stderr))
            return
        with self._bar.external_write_mode(file=stream):
            stream.write(text)
            stream.flush()

    def follow(self, recording: Recording, segments: Iterable[Segment]) -> Iterator[Segment]:
        """Yield the segments and advance the bar to the end of each."""
        before = self._bar.n
        seconds = self._seconds.get(recording.path, 0.0)
        for segment in segments:
            self._bar.update(before + min(segment.end, seconds) - self._bar.n)
            yield segment
        self._bar.update(before + seconds - self._bar.n)


@contextlib.contextmanager
def _report_short_audio(progress: _Progress) -> Iterator[None]:
    """Print a line when a file is shorter than its header states."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", ShortAudio)
        # `catch_warnings` restores `showwarning` at the end of the block.
        shown = warnings.showwarning

        def tell(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, ShortAudio):
                progress.write(f"{message} Transcribing the available part.\n", sys.stderr)
            else:
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = tell
        yield


def _seconds(path: Path) -> float:
    """Return the duration in the file's header, or 0 if it is missing or the file is unusable."""
    try:
        return claimed_header(AudioSource(str(path))).seconds
    except DataError:
        return 0.0


def write_text(path: Path, texts: Iterable[str], is_kept: bool = False) -> bool:
    """Write the texts, recognised while they are written, to a file, and return whether it was written.

    On failure, an existing file is unchanged. With `is_kept` it is not written, even if it has appeared while this
    process waited for another one that writes it. Raises a ResourceError if the file cannot be written.
    """
    advice = "Free disk space, repair the folder, or choose another one."
    with explained(ResourceError, f"{path} could not be written", advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(path):
            if is_kept and os.path.exists(path):
                return False
            # File names may contain bytes that are not text. JSON output escapes them in the same way.
            with (
                atomic_replace(path) as partial,
                open(partial, "w", encoding="utf-8", errors="backslashreplace") as file,
            ):
                file.writelines(texts)
    return True
