"""Randomly changed audio and video containers, each read in a process that is watched from outside."""

import os
from pathlib import Path

from hypothesis import strategies as st

from konkanivani.data.audio.files import AudioSource, read_header
from konkanivani.data.audio.media import READERS
from konkanivani.data.audio.waveform import load_audio, stream_audio
from konkanivani.errors import DataError
from tests.faults.fuzz import Change, Fuzzer, apply_changes, changes_within
from tests.faults.watched_process import CONTAINER_SECONDS
from tests.media_files import ENCODED, KINDS, rising_tone, write_media

MAX_READER_SECONDS = 5.0  # CPU seconds
MAX_READER_MIB = 250.0  # resident, 40 MiB of it at startup
SWAPPED_BYTES = (16, 64, 512, 4096)

FuzzCase = tuple[int, int, int, list[Change]]


def build_fuzzer(folder: Path) -> Fuzzer:
    """Return a fuzzer of files of 23 kinds, some with the header of another, changed at the start or anywhere."""
    files = _files(folder)
    which = st.integers(0, len(files) - 1)
    changes = st.one_of(changes_within(128), changes_within(2048), changes_within(max(len(file) for _, file in files)))
    swapped = st.one_of(st.just(0), st.just(0), st.sampled_from(SWAPPED_BYTES))
    examples = st.tuples(which, which, swapped, st.one_of(changes, changes, st.just([])))

    def handle(example: FuzzCase, inside: Path) -> None:
        number, other, count, changes = example
        suffix, content = files[number]
        path = inside / f"audio{suffix}"
        path.write_bytes(apply_changes(files[other][1][:count] + content[count:], changes))
        errors = []
        for use in (read_header, load_audio, lambda source: [None for _ in stream_audio(source)]):
            try:
                use(AudioSource(str(path)))
            except DataError as error:
                errors.append(error)
        for reader in READERS._all:
            _check_reader(reader.process.pid)
        for error in errors[:1]:
            # A crash is reported as a reason, but is a finding.
            assert "crashed the decoder" not in error.reason, error.reason
            raise error

    return Fuzzer(examples, handle, CONTAINER_SECONDS)


def _files(folder: Path) -> list[tuple[str, bytes]]:
    results = []
    for kind in KINDS:
        path = write_media(folder / f"whole{kind.suffix}", rising_tone(0.7, 16_000), 16_000, kind)
        results.append((kind.suffix, path.read_bytes()))
    return results + [(path.suffix, path.read_bytes()) for path in sorted(ENCODED.iterdir())]


def _check_reader(pid: int) -> None:
    """Check the CPU time and memory of the decoding process."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        (resident,) = [int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM")]
    assert spent < MAX_READER_SECONDS, f"the process that decodes took {spent:.1f} s"
    assert resident < MAX_READER_MIB, f"the process that decodes took {resident:.0f} MiB"
