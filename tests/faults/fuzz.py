"""Randomly changed input and its handling; hypothesis draws the changes and shrinks failures.

Every example is handled in a watched process: watched_process.py.
"""

import contextlib
import io
import json
import os
import shutil
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import soundfile
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.config import TrainConfig
from konkanivani.data import index
from konkanivani.data.audio.files import AudioSource, read_header
from konkanivani.data.audio.waveform import load_audio, stream_audio
from konkanivani.data.manifest import read_manifest, read_recordings
from konkanivani.errors import DataError
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.rules import settings_of
from tests.faults.untrusted_input import ValidCheckpoint, read_valid_checkpoint, with_settings
from tests.faults.watched_process import MAX_SECONDS, Verdict, watch
from tests.run_setup import begin_run, parse_flags

Kind = Literal["audio", "media", "manifests", "checkpoints", "flags"]
EDGE_VALUES = (0, 1, -1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


@dataclass
class Tally:
    """Outcomes of the examples of one kind; `slowest` and `largest` are maxima over all of them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    largest: float = 0.0

    def add(self, verdict: Verdict, example: object) -> None:
        """Count an example; raise AssertionError if it is at fault, so that hypothesis shrinks it."""
        self.slowest, self.largest = max(self.slowest, verdict.seconds), max(self.largest, verdict.growth_mib)
        if verdict.fault is not None:
            self.faults.append(f"{example!r:.300}: {verdict.fault}")
        self.outcomes["fault" if verdict.fault else verdict.outcome] += 1
        assert verdict.fault is None, verdict.fault


def fuzz(kind: Kind, count: int, seed_: int, folder: Path, run: Path) -> Tally:
    """Handle `count` changed inputs of a kind in `folder`; `run` is the folder of a small trained run."""
    folder.mkdir(parents=True, exist_ok=True)
    tally, fuzzer = Tally(), FUZZERS[kind](folder, run)

    @seed(seed_)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(fuzzer.examples)
    def handle(example: object) -> None:
        inside = folder / "example"
        inside.mkdir(exist_ok=True)
        try:
            tally.add(watch(lambda: fuzzer.handle(example, inside), inside, fuzzer.seconds), example)
        finally:
            shutil.rmtree(inside, ignore_errors=True)

    with contextlib.suppress(AssertionError, Flaky):  # the failure is in the tally
        handle()
    return tally


@dataclass(frozen=True)
class Fuzzer:
    """Source of examples and their handler, which gets a separate folder and a time limit in seconds."""

    examples: st.SearchStrategy
    handle: Callable[[object, Path], object]
    seconds: float = MAX_SECONDS


Change = tuple[str, int, int]
NUMBERS = st.one_of(st.sampled_from(EDGE_VALUES), st.integers(-(2**63), 2**64 - 1))


def changes_within(reach: int) -> st.SearchStrategy[list[Change]]:
    """Return a strategy for one to six changes in the first `reach` bytes."""
    kinds = st.sampled_from(["flip", "byte", "16", "32", "64", "61", "insert", "delete", "cut", "repeat"])
    return st.lists(st.tuples(kinds, st.integers(0, reach), NUMBERS), min_size=1, max_size=6)


def apply_changes(content: bytes, changes: list[Change]) -> bytes:
    """Apply the changes in order; `61` is a 32-bit big-endian number."""
    widths = {"byte": "<B", "16": "<H", "32": "<L", "61": ">L", "64": "<Q"}
    for kind, place, value in changes:
        place %= len(content) + 1
        if kind in widths:
            packed = struct.pack(widths[kind], value % 2 ** (8 * struct.calcsize(widths[kind])))
            content = content[:place] + packed + content[place + len(packed) :]
        elif kind == "flip":
            content = (
                content[:place] + bytes(b ^ 1 << value % 8 for b in content[place : place + 1]) + content[place + 1 :]
            )
        elif kind == "insert":
            content = content[:place] + struct.pack("<Q", value % 2**64)[: 1 + value % 8] + content[place:]
        elif kind == "delete":
            content = content[:place] + content[place + 1 + value % 64 :]
        elif kind == "repeat":
            content = content[:place] + content[place : place + 64] * (1 + value % 50) + content[place:]
        else:
            content = content[:place]
    return content


AUDIO = (
    *(("WAV", subtype) for subtype in ("PCM_16", "PCM_24", "FLOAT", "ULAW", "IMA_ADPCM", "MS_ADPCM", "GSM610")),
    *(("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")),
    *(("AIFF", "PCM_16"), ("AIFF", "FLOAT"), ("AU", "PCM_16"), ("CAF", "ALAC_16"), ("W64", "PCM_16")),
    ("RF64", "PCM_16"),
)


def _audio_files() -> list[bytes]:
    generator = np.random.default_rng(0)
    results = []
    for file_format, subtype in AUDIO:
        if subtype not in soundfile.available_subtypes(file_format):
            continue
        written = io.BytesIO()
        samples = 0.1 * generator.standard_normal((8000, 1 + len(results) % 2))
        soundfile.write(written, samples, 16_000, format=file_format, subtype=subtype)
        results.append(written.getvalue())
    return results


def _audio_fuzzer(folder: Path, run: Path) -> Fuzzer:
    files = _audio_files()
    examples = st.tuples(st.integers(0, len(files) - 1), changes_within(512), st.booleans())

    def handle(example: tuple[int, list[Change], bool], inside: Path) -> None:
        number, changes, is_in_shard = example
        content = apply_changes(files[number], changes)
        path = inside / "audio.bin"
        if is_in_shard:
            with tarfile.open(path, "w") as shard:
                member = tarfile.TarInfo("a")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
            source = AudioSource(str(path), 512, len(content))
        else:
            path.write_bytes(content)
            source = AudioSource(str(path))
        errors = []
        for use in (read_header, load_audio, lambda source: [None for _ in stream_audio(source)]):
            try:
                use(source)
            except DataError as error:
                errors.append(error)
        for error in errors[:1]:
            raise error

    return Fuzzer(examples, handle)


UNUSUAL_TEXTS = ["", "एक", "../x.wav", "/dev/zero", "good.wav", "\0", "\x1b[2J", "\ud800", "a" * 5000, ".", "/", "pipe"]
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(UNUSUAL_TEXTS))
NUMERALS = (st.integers(), st.sampled_from(EDGE_VALUES), st.floats(), st.just(10**400), st.just(1e308))
SCALARS = st.one_of(st.none(), st.booleans(), TEXTS, *NUMERALS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
FIELDS = ("audio_filepath", "duration", "text", "speaker", "pattern", "offset", "byte_offset", "byte_count", "other")
GOOD = {"audio_filepath": "good.wav", "duration": 0.5, "text": "एक"}


def _manifest_fuzzer(folder: Path, run: Path) -> Fuzzer:
    tone = io.BytesIO()
    soundfile.write(tone, 0.1 * np.ones(8000), 16_000, format="WAV")
    replaced = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
    left_out = st.lists(st.sampled_from(FIELDS[:3]), max_size=1)
    nested = st.tuples(st.sampled_from(["speaker", "text", "duration"]), st.sampled_from([50, 900, 985, 5000]))
    examples = st.tuples(
        replaced, left_out, st.one_of(st.none(), nested), st.lists(changes_within(400), max_size=1), st.booleans()
    )

    def line_of(example: tuple) -> bytes:
        values, missing, nest, changes, _ = example
        row = {name: value for name, value in (GOOD | values).items() if name not in missing}
        line = json.dumps(row, ensure_ascii=not row.get("text") == "एक").encode("utf-8", errors="surrogatepass")
        if nest:
            name, depth = nest
            line = line[:-1] + b', "' + name.encode() + b'": ' + b"[" * depth + b"]" * depth + b"}"
        return apply_changes(line, changes[0]) if changes else line

    def handle(example: tuple, inside: Path) -> None:
        (inside / "good.wav").write_bytes(tone.getvalue())
        path = inside / "train.jsonl"
        line = line_of(example)
        path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
        index.SMALL_BYTES = 0 if example[4] else index.SMALL_BYTES  # runs in a child process
        manifest, errors = read_manifest(path), []
        assert len(manifest) + len(manifest.broken) >= 1 + bool(line.strip())  # a blank line is not a row
        for utterance in [*manifest, *manifest]:
            try:
                load_audio(utterance.source)
            except DataError as error:
                errors.append(error)
        read_manifest(path)
        read_recordings(path)
        for error in errors[:1]:
            raise error

    return Fuzzer(examples, handle)


def _checkpoint_fuzzer(folder: Path, run: Path) -> Fuzzer:
    sound = read_valid_checkpoint(run / "checkpoints" / LAST)
    here = folder / "sound.pt"
    with_settings("--log_dir 'runs'")(sound, here)
    whole, sound = here.read_bytes(), read_valid_checkpoint(here)
    config = torch.load(here, weights_only=True)["config"]  # noqa: TID251
    names = [s.name for s in settings_of(TrainConfig())]
    lines = st.tuples(st.sampled_from(names), st.one_of(SCALARS.map(repr), st.text(max_size=20)))
    records = st.sampled_from(["data.pkl", "data/0", "data/1", "version", "byteorder", ".format_version"])
    examples = st.one_of(
        st.tuples(st.just("file"), changes_within(len(whole))),
        st.tuples(st.just("end"), changes_within(2000)),
        st.tuples(records, changes_within(len(sound.pickled))),
        st.tuples(st.just("settings"), st.lists(lines, min_size=1, max_size=3)),
    )

    def content_of(what: str, changes: list) -> bytes:
        if what == "file":
            return apply_changes(whole, changes)
        if what == "end":
            return apply_changes(whole[::-1], changes)[::-1]
        if what == "settings":
            text = config + "".join(f"--{name} {value}\n" for name, value in changes)
            size = struct.pack("<L", len(text.encode("utf-8", errors="replace")))
            old = struct.pack("<L", len(config.encode())) + config.encode()
            assert sound.pickled.count(old) == 1
            return _zipped(
                sound, {"data.pkl": sound.pickled.replace(old, size + text.encode("utf-8", errors="replace"))}
            )
        return _zipped(sound, {what: apply_changes(sound.records[what], changes)})

    def handle(example: tuple[str, list], inside: Path) -> None:
        path = inside / LAST
        path.write_bytes(content_of(*example))
        os.chdir(inside)  # runs in a child process
        begin_run(["--resume", str(path), "--device", "cpu"])
        load_recognizer(path, device="cpu")

    return Fuzzer(examples, handle)


def _zipped(sound: ValidCheckpoint, other: dict[str, bytes]) -> bytes:
    """Return the zip of the checkpoint with other records and correct CRCs, so that they are read."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in {**sound.records, **other}.items():
            archive.writestr(f"archive/{name}", content)
    return written.getvalue()


WORDS = ["", "=", "0", "-1", "1", "2", "1e400", "nan", "inf", "-inf", "None", "True", "auto", "../..", "/etc", "a b"]
WORDS += ["एक"]


def _flag_fuzzer(folder: Path, run: Path) -> Fuzzer:
    choices = []
    for group in settings_of(TrainConfig()):
        hint = get_type_hints(type(getattr(TrainConfig(), group.group)))[group.name]
        choices.append((f"--{group.name}", tuple(map(str, _literals(hint)))))
    values = st.one_of(
        st.sampled_from(WORDS),
        st.integers().map(str),
        st.sampled_from([str(edge) for edge in (*EDGE_VALUES, 10**30)] + ["9" * 5000]),
        st.floats().map(str),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=10),
        st.sampled_from(["4GiB", "-4GiB", "99999999999TiB", "1%", "101%", "nan%", "5:25", "25:5", "nan:nan", ":"]),
    )

    def given_flag(choice: tuple[str, tuple[str, ...]]) -> st.SearchStrategy[list[str]]:
        name, allowed = choice
        value = st.one_of(st.sampled_from(allowed), values) if allowed else values
        spelled = st.sampled_from([name, name.replace("_", "-"), name[:-1], name.upper()])
        usual = st.just(name)
        some = st.lists(value, max_size=3)
        return st.tuples(st.one_of(usual, usual, usual, spelled), some).map(lambda parts: [parts[0], *parts[1]])

    flags = st.sampled_from(choices).flatmap(given_flag)
    examples = st.tuples(st.lists(flags, max_size=6), st.lists(flags, max_size=2), st.booleans())

    def handle(example: tuple[list, list, bool], inside: Path) -> None:
        first, then, is_resumed = example
        stored = parse_flags([word for flag in first for word in flag])
        if is_resumed:
            parse_flags([word for flag in then for word in flag], stored)

    return Fuzzer(examples, handle)


def _literals(hint: object) -> tuple:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for part in get_args(hint) for value in _literals(part))


def _media_fuzzer(folder: Path, run: Path) -> Fuzzer:
    from tests.faults.fuzzed_media import build_fuzzer

    return build_fuzzer(folder)


FUZZERS: dict[Kind, Callable[[Path, Path], Fuzzer]] = {
    "audio": _audio_fuzzer,
    "media": _media_fuzzer,
    "manifests": _manifest_fuzzer,
}
FUZZERS |= {"checkpoints": _checkpoint_fuzzer, "flags": _flag_fuzzer}
