"""Transcription: the recognizer, the script, output formats, and recordings that cannot be transcribed."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.console import announced
from konkanivani.data.audio import files as standard_input
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.audio.waveform import load_audio
from konkanivani.errors import CheckpointError, DataError, UsageError
from konkanivani.inference.bundle import bundle_bytes
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.inference.segmentation import build_segmentation
from konkanivani.inference.transcribe import Recording, Transcription, find_recordings, output_paths, write_text
from konkanivani.inference.word_times import Segment, Word, build_cues, render, srt_time
from konkanivani.scoring.metrics import error_rates
from tests.conftest import checked, run_in_process, run_script
from tests.fork_server import ROOT, Job, fork_server
from tests.timeouts import PROCESS_TIMEOUT
from tests.trained_model import Trained, tones

TRANSCRIBE = "training_scripts/transcribe.py"
WORDS = ("एक", "दोन", "तीन", "उदक", "घर", "शाळा", "बाजार", "आवय", "चार", "घर", "पांच", "दोन", "एक", "शाळा")


def utterances() -> list[np.ndarray]:
    begins = list(itertools.accumulate([1, 2, 3, 4] * 3, initial=0))
    endless = list(itertools.islice(itertools.cycle(WORDS), begins[-1]))
    return [tones(tuple(endless[a:b]), seed=a) for a, b in itertools.pairwise(begins)]


def transcribe(trained: Trained, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_in_process(TRANSCRIBE, *map(str, arguments), "--checkpoint", str(trained.checkpoint), "--device", "cpu")


def test_tiny_model_recognizes_its_training_words(trained):
    texts = [trained.recognizer.transcribe(audio).text for audio in (tones(WORDS[:3]), tones(WORDS[3:7]))]
    assert error_rates([" ".join(WORDS[:3]), " ".join(WORDS[3:7])], texts).cer < 0.2


def with_pauses(spoken: list[np.ndarray]) -> np.ndarray:
    """Return the utterances, each after 0.75 s of noise."""
    pause = 0.005 * np.random.default_rng(1).standard_normal(12_000).astype(np.float32)
    return np.concatenate([part for audio in spoken for part in (pause, audio)])


def test_long_recording_is_transcribed_like_single_utterances(trained):
    spoken = utterances()
    alone = [trained.recognizer.transcribe(audio).text for audio in spoken]
    transcript = trained.recognizer.transcribe(with_pauses(spoken))
    assert len(transcript.segments) == len(spoken) and all(alone)
    texts = [segment.text for segment in transcript.segments]
    # The pauses affect the feature normalisation, so an uncertain letter may change: 6 of 109 on one processor.
    assert error_rates(alone, texts).cer < 0.1
    ends = np.cumsum([0.75 + len(audio) / 16_000 for audio in spoken])
    for segment, audio, end in zip(transcript.segments, spoken, ends, strict=True):
        assert abs(segment.start - (end - len(audio) / 16_000)) < 0.2 and end - 0.4 < segment.end < end + 0.1
    words = transcript.words
    assert all(a.end <= b.start for a, b in itertools.pairwise(words))
    assert all(word.start < word.end and 0 <= word.confidence <= 1 for word in words)


def test_speech_without_pause_is_joined_from_overlapping_pieces(trained):
    recording = np.concatenate(utterances())
    whole = dataclasses.replace(trained.recognizer, segmentation=build_segmentation(60.0, 0.4)).transcribe(recording)
    pieces = dataclasses.replace(trained.recognizer, segmentation=build_segmentation(3.0, 0.4)).transcribe(recording)
    assert len(whole.segments) == 1 and len(pieces.segments) > 3
    # Negative control: independent pieces of two seconds without overlap.
    apart = [trained.recognizer.transcribe(part).text for part in np.array_split(recording, len(recording) // 32_000)]
    joined, broken = (error_rates([whole.text], [text]).wer for text in (pieces.text, " ".join(apart)))
    assert joined <= 0.1 and joined < broken


def test_batched_pieces_are_transcribed_like_single_pieces(trained, monkeypatch):
    recording = with_pauses(utterances())
    together = trained.recognizer.transcribe(recording)
    monkeypatch.setattr("konkanivani.inference.recognizer.BATCH_SECONDS", 0.0)
    alone = trained.recognizer.transcribe(recording)
    assert [(w.text, w.start, w.end) for w in together.words] == [(w.text, w.start, w.end) for w in alone.words]
    for one, other in zip(together.words, alone.words, strict=True):
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


def test_files_arrays_and_tensors_give_the_same_transcript(trained, tmp_path):
    audio = tones(WORDS[:4])
    soundfile.write(tmp_path / "a.flac", audio, 16_000)
    soundfile.write(tmp_path / "b.wav", np.stack([audio, audio], axis=1), 16_000, subtype="FLOAT")
    given = (tmp_path / "a.flac", str(tmp_path / "b.wav"), audio, torch.from_numpy(audio), audio.astype(np.float64))
    assert len({trained.recognizer.transcribe(each).text for each in given}) == 1
    assert trained.recognizer.transcribe(audio).text


def test_bundle_transcribes_like_its_checkpoint(trained, tmp_path):
    (tmp_path / "tones.safetensors").write_bytes(bundle_bytes(trained.recognizer.speech_model))
    bundled = load_recognizer(tmp_path / "tones.safetensors", device="cpu")
    assert bundled.transcribe(tones(WORDS[:4])) == trained.recognizer.transcribe(tones(WORDS[:4]))


@pytest.mark.parametrize("decode", ["prefix", "attention", "joint"])
def test_every_decoding_method_gives_timed_words(trained, decode):
    recognizer = load_recognizer(trained.checkpoint, decode=decode, beam=2, device="cpu")
    transcript = recognizer.transcribe(tones(WORDS[:4]))
    # The attention decoder is hardly trained after these few steps, and may recognize no words.
    assert len(transcript.words) == len(transcript.text.split()) and (transcript.words or decode == "attention")
    assert all(0 <= word.start < word.end <= 5 for word in transcript.words)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.09, 0.1, 0.12])
def test_too_short_audio_is_not_an_error(trained, seconds):
    noise = np.random.default_rng(0).standard_normal(round(seconds * 16_000)).astype(np.float32)
    assert len(trained.recognizer.transcribe(0.1 * noise).words) <= 2


def test_segments_are_returned_before_the_recording_ends(trained):
    gap, words = torch.zeros(12_000), torch.from_numpy(tones(WORDS[:2]))
    recording = torch.cat([words, gap]).repeat(80)
    first = next(trained.recognizer.segments(recording))
    assert first.words[0].start < 1
    recording[-5:] = float("nan")  # the end is read later
    assert next(trained.recognizer.segments(recording)).text == first.text


def test_importing_the_package_does_not_import_torch():
    code = "import sys, konkanivani; assert 'torch' not in sys.modules; sys.modules['torch'] = None; konkanivani."
    for name, message in (("load_recognizer", "import of torch halted"), ("nothing", "has no attribute 'nothing'")):
        done = subprocess.run([sys.executable, "-c", code + name], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr, done.stderr


COMPILER_CHECK_PROGRAM = """
import sys
import numpy as np
import torch
from konkanivani import load_recognizer
load_recognizer({path!r}, device="cpu").transcribe(np.zeros(16_000, np.float32))
print("torch._dynamo" in sys.modules)
with torch.device("meta"):
    torch.nn.Embedding(2, 2)
print("torch._dynamo" in sys.modules)
"""


def test_transcription_does_not_load_torch_dynamo(trained, torch_only_parent):
    """torch._dynamo takes 100 MB; negative control: creating a layer on the meta device loads it."""
    ended = torch_only_parent.run_program(COMPILER_CHECK_PROGRAM.format(path=str(trained.checkpoint)))
    assert ended.stdout.split() == ["False", "True"], ended.stdout + ended.stderr


def test_damaged_or_missing_checkpoint_raises_checkpoint_error(trained, tmp_path):
    (tmp_path / "cut.pt").write_bytes(trained.checkpoint.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="damaged"):
        load_recognizer(tmp_path / "cut.pt")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_recognizer(tmp_path / "nowhere.pt")


def word(text: str, start: float, end: float, confidence: float | None = 0.5) -> Word:
    return Word(text, start, end, confidence)


def written(segments: list[Segment], text_format: str, timestamps: str = "segment") -> str:
    return "".join(render(segments, text_format, timestamps, "a.wav"))


SHORT = [Segment((word("एक", 1.0, 1.25), word("दोन", 1.25, 2.5))), Segment((word("a<b", 3600.0, 3600.2, None),))]


def test_output_formats_match_their_specifications():
    assert written(SHORT, "txt") == "एक दोन\na<b\n"
    assert written(SHORT, "txt", "word").splitlines()[1] == "1.250\t2.500\tदोन"
    assert written(SHORT, "srt") == (
        "1\n00:00:01,000 --> 00:00:02,500\nएक दोन\n\n2\n01:00:00,000 --> 01:00:01,000\na<b\n\n"
    )
    assert written(SHORT, "vtt") == (
        "WEBVTT\n\n00:00:01.000 --> 00:00:02.500\nएक दोन\n\n01:00:00.000 --> 01:00:01.000\na&lt;b\n\n"
    )
    assert written([], "txt") == written([], "srt") == "" and written([], "vtt") == "WEBVTT\n\n"
    parsed = json.loads(written(SHORT, "json", "word"))
    assert (parsed["audio_filepath"], parsed["text"]) == ("a.wav", "एक दोन a<b")
    assert parsed["segments"][0]["words"][1] == {"start": 1.25, "end": 2.5, "text": "दोन", "confidence": 0.5}
    assert parsed["segments"][1]["words"][0]["confidence"] is None
    assert "words" not in json.loads(written(SHORT, "json"))["segments"][0]
    shown = [srt_time(milliseconds) for milliseconds in (0, 3_599_999, 360_000_001)]
    assert shown == ["00:00:00,000", "00:59:59,999", "100:00:00,001"]


@pytest.mark.parametrize("timestamps", ["segment", "word"])
def test_cues_respect_line_length_and_duration_limits(timestamps):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 14, 300)
    times = np.cumsum(generator.choice([0.0, 0.05, 0.3, 1.2], 601, p=[0.1, 0.3, 0.5, 0.1]))
    words = [word("क" * n, *times[2 * k : 2 * k + 2]) for k, n in enumerate(lengths)]
    segments = [Segment(tuple(words[k : k + 50])) for k in range(0, 300, 50)]
    cues = list(build_cues(segments, timestamps))
    assert " ".join(cue.text.replace("\n", " ") for cue in cues) == " ".join(w.text for w in words)
    assert all(cue.start < cue.end and len(lines := cue.text.split("\n")) <= 2 for cue in cues for _ in (0,)) and lines
    assert all(len(line) <= 42 for cue in cues for line in cue.text.split("\n"))
    assert all(a.end <= b.start for a, b in itertools.pairwise(cues))
    assert all(cue.end - cue.start <= 7000 for cue in cues)
    if timestamps == "word":
        assert len(cues) == len(words)


def test_word_longer_than_a_line_gets_its_own_line():
    (cue,) = build_cues([Segment((word("क" * 60, 0, 1),))], "segment")
    assert cue.text == "क" * 60


@pytest.fixture(scope="module")
def folder(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a nested folder of good and bad recordings, with broken links and pipes."""
    directory = tmp_path_factory.mktemp("recordings")
    (directory / "inside").mkdir()
    soundfile.write(directory / "good.wav", tones(WORDS[:4]), 16_000)
    soundfile.write(directory / "inside" / "good.ogg", np.repeat(tones(WORDS[:2])[:, None], 2, axis=1), 48_000)
    soundfile.write(directory / "silence.flac", np.zeros(16_000), 16_000)
    (directory / "text.wav").write_text("no audio")
    (directory / "notes.txt").write_text("no audio either")
    soundfile.write(directory / "nan.wav", np.full(16_000, np.nan, dtype=np.float32), 16_000, subtype="FLOAT")
    (directory / "inside" / "round").symlink_to(directory)
    os.mkfifo(directory / "pipe.wav")
    return directory


def test_unreadable_file_does_not_stop_the_others(trained, folder, tmp_path):
    done = transcribe(trained, folder, "--format", "srt", "--output_dir", tmp_path / "out")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    for name in ("text.wav", "nan.wav", "pipe.wav"):
        assert len(re.findall(rf"The audio file \S*{name} cannot be read", done.stderr)) == 1
    assert "3 of 6 files could not be transcribed" in done.stderr
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written == {"good.srt", "inside/good.srt", "silence.srt"}
    assert (tmp_path / "out" / "silence.srt").read_text() == ""
    assert (tmp_path / "out" / "good.srt").read_text(encoding="utf-8").startswith("1\n00:00:00,")
    # One progress line per transcribed file, of six.
    finished = ((1, "good.srt"), (2, "inside/good.srt"), (5, "silence.srt"))
    assert re.findall("(.*) of 6: (.*)", done.stderr) == [(str(n), f"{tmp_path}/out/{name}") for n, name in finished]


def test_existing_output_is_replaced_only_on_request(trained, folder, tmp_path):
    good, silence = tmp_path / "good.srt", tmp_path / "silence.srt"
    flags = (folder / "good.wav", folder / "silence.flac", "--format", "srt", "--output_dir", tmp_path)
    checked(transcribe(trained, *flags))
    original = good.read_bytes()
    good.write_text("corrected")
    silence.unlink()
    refused = run_script(TRANSCRIBE, *map(str, flags), "--checkpoint", "absent.pt")  # refused before any loading
    assert refused.returncode == 2 and f"{good} already exists, one of 1. Use --existing keep" in refused.stderr
    kept = checked(transcribe(trained, *flags, "--existing", "keep"))
    assert f"1 of 2: {good} already exists\n2 of 2: {silence}\n" == kept.stderr and silence.exists()
    assert good.read_text() == "corrected"
    checked(transcribe(trained, *flags, "--existing", "replace"))
    assert good.read_bytes() == original  # negative control


def write_slowly(path: Path, is_kept: bool) -> tuple[threading.Thread, threading.Event]:
    """Write "one" and, after the returned event, "two" to a file."""
    has_begun, may_end = threading.Event(), threading.Event()

    def texts() -> Iterator[str]:
        yield "one "
        has_begun.set()
        assert may_end.wait(PROCESS_TIMEOUT)
        yield "two"

    thread = threading.Thread(target=write_text, args=(path, texts(), is_kept))
    thread.start()
    assert has_begun.wait(PROCESS_TIMEOUT)
    return thread, may_end


@pytest.mark.parametrize(("is_kept", "expected"), [(True, "one two"), (False, "three")])
def test_second_writer_of_a_transcript_waits_for_the_first(tmp_path, monkeypatch, capsys, is_kept, expected):
    monkeypatch.setattr("konkanivani.files.announced", partial(announced, delay=0.0))
    path = tmp_path / "new" / "a.txt"
    first, may_end = write_slowly(path, is_kept)
    results = []
    second = threading.Thread(target=lambda: results.append(write_text(path, ["three"], is_kept)))
    second.start()
    second.join(0.3)
    assert second.is_alive() and not path.exists()
    may_end.set()
    first.join(PROCESS_TIMEOUT)
    second.join(PROCESS_TIMEOUT)
    assert path.read_text() == expected and results == [not is_kept]
    assert list(path.parent.iterdir()) == [path]
    assert f"Waiting for another process that works with {path}." in capsys.readouterr().err


def test_partial_transcript_of_a_killed_process_is_overwritten(tmp_path):
    path = tmp_path / "a.txt"
    write_then_die = f"""
import os, signal
from pathlib import Path
from konkanivani.inference.transcribe import write_text
def texts():
    yield "long text of a killed process" * 1000
    os.kill(os.getpid(), signal.SIGKILL)
write_text(Path({str(path)!r}), texts())
"""
    subprocess.run([sys.executable, "-c", write_then_die], cwd=ROOT)
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt.partial"]
    assert write_text(path, ["new"]) and path.read_text() == "new"
    # Negative control: a failed write leaves nothing either.
    with pytest.raises(ZeroDivisionError):
        write_text(path, (str(1 // number) for number in (1, 0)))
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "new"


def test_transcript_that_appears_during_the_run_is_kept(tmp_path, capsys):
    class WritingRecognizer:
        def segments(self, _path: Path) -> list[Segment]:
            (tmp_path / "b.txt").write_text("by another process")
            return [Segment((word("एक", 0, 1),))]

    recordings = [Recording(tmp_path / name, Path(name)) for name in ("a.wav", "b.wav")]
    Transcription(WritingRecognizer, "txt", "segment", tmp_path, "keep").run(recordings)
    assert (tmp_path / "a.txt").read_text() == "एक\n" and (tmp_path / "b.txt").read_text() == "by another process"
    assert f"2 of 2: {tmp_path / 'b.txt'} already exists" in capsys.readouterr().err


def test_printed_transcript_equals_the_recognizer_output(trained, folder):
    expected = trained.recognizer.transcribe(folder / "good.wav")
    done = transcribe(trained, folder / "good.wav")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.text + "\n", "")
    done = transcribe(trained, folder / "good.wav", folder / "silence.flac", "--format", "json", "--timestamps", "word")
    assert done.returncode == 0
    first, second = map(json.loads, done.stdout.splitlines())
    for printed, w in zip(first["segments"][0]["words"], expected.words, strict=True):
        timed = {"start": round(w.start, 3), "end": round(w.end, 3), "text": w.text}
        assert printed == timed | {"confidence": pytest.approx(w.confidence, abs=1e-3)}
    assert (second["text"], second["segments"]) == ("", [])


@pytest.fixture(scope="module")
def phone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one recording in five formats, two audio file names without audio, and a truncated file."""
    pytest.importorskip("av", reason="the extra `media` is not installed: pip install av")
    from tests.media_files import KINDS, write_media

    directory = tmp_path_factory.mktemp("phone")
    spoken = tones(WORDS[:4])
    soundfile.write(directory / "spoken.wav", spoken, 16_000)
    for kind in KINDS:
        if (kind.suffix, kind.rate) in ((".m4a", 44_100), (".webm", 48_000), (".mp4", 44_100), (".mkv", 48_000)):
            write_media(directory / f"{kind.name}{kind.suffix}", spoken, 16_000, kind)
    (directory / "broken.m4a").write_bytes(next(directory.glob("aac*stereo.m4a")).read_bytes()[:2000])
    (directory / "text.wma").write_text("no audio")
    (directory / "cut.wav").write_bytes((directory / "spoken.wav").read_bytes()[: len(spoken)])
    return directory


def test_phone_formats_are_transcribed_like_wav(trained, phone_folder):
    done = transcribe(trained, phone_folder, "--format", "json")
    texts = {Path(row["audio_filepath"]).name: row["text"] for row in map(json.loads, done.stdout.splitlines())}
    expected = trained.recognizer.transcribe(phone_folder / "spoken.wav").text
    assert done.returncode == 3 and "Traceback" not in done.stderr and expected
    assert len(texts) == 11 - 2 and texts.pop("cut.wav") != expected
    assert set(texts.values()) == {expected}, texts
    for name in ("broken.m4a", "text.wma"):
        assert len(re.findall(rf"The audio file \S*{name} cannot be read", done.stderr)) == 1, done.stderr
    assert "2 of 11 files could not be transcribed" in done.stderr
    seconds = len(tones(WORDS[:4])) / 32_000
    (line,) = [line for line in done.stderr.splitlines() if "cut.wav" in line]
    assert (
        f"cut.wav is truncated: it is {seconds:.1f} s shorter than its header states. Transcribing the available part."
        in line
    )
    assert trained.recognizer.transcribe(next(phone_folder.glob("*.mp4"))).text == expected


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ((), 2, "No input"),
        (("{good}", "--pause", "0"), 2, "--pause"),
        (("{good}", "--longest_piece", "0.1"), 2, "--longest_piece"),
        (("{good}", "--beam", "0"), 2, "--beam"),
        (("{good}", "{good}", "--format", "vtt"), 2, "--output_dir"),
        (("/dev/zero",), 3, "not a file"),
        (("x" * 300,), 3, "File name too long"),
        (("{good}", "--output_dir", "x" * 300), 6, "could not be written: File name too long"),
        (("{text}",), 3, "cannot be opened as audio"),
        (("{good}", "--output_dir", "{text}"), 6, "could not be written"),
    ],
)
def test_invalid_arguments_give_exit_code_and_message(trained, folder, arguments, exit_code, message):
    known = {"good": folder / "good.wav", "text": folder / "text.wav"}
    done = transcribe(trained, *(argument.format(**known) for argument in arguments))
    assert done.returncode == exit_code and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ""


def test_standard_input_is_transcribed_like_its_file(trained, folder, tmp_path):
    flags = ("-", "--checkpoint", str(trained.checkpoint), "--device", "cpu")
    expected = trained.recognizer.transcribe(folder / "good.wav").text
    done = run_script(TRANSCRIBE, *flags, "--format", "json", stdin=folder / "good.wav")
    record = json.loads(done.stdout)
    assert (done.returncode, record["audio_filepath"], record["text"]) == (0, "-", expected)
    piped, written = (folder / "good.wav").read_bytes(), ("--format", "srt", "--output_dir", str(tmp_path))
    os.mkfifo(pipe := tmp_path / "pipe")
    process = fork_server().start(Job(ROOT / TRANSCRIBE, (*flags, *written), tmp_path / "said", stdin=pipe))
    pipe.write_bytes(piped)
    assert process.wait(PROCESS_TIMEOUT) == 0
    assert (tmp_path / "stdin.srt").read_text(encoding="utf-8").startswith("1\n00:00:00,")
    (tmp_path / "none").write_bytes(b"no audio")
    refused = run_script(TRANSCRIBE, *flags, stdin=tmp_path / "none")
    assert refused.returncode == 3 and refused.stderr.startswith("The audio file - cannot be read: ")
    assert run_script(TRANSCRIBE, "-", "-").returncode == 2


def test_standard_input_beyond_the_limit_is_rejected(monkeypatch):
    monkeypatch.setattr(standard_input, "STDIN_LIMIT", 10 * standard_input.PIECE_BYTES)
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        with pytest.raises(DataError, match="Save it as a file"), standard_input.spooled_input():
            pass


def test_control_characters_in_file_names_are_escaped(trained, folder, tmp_path):
    names = ("\x1b[31mred.wav", "two\nlines\x9b.wav", "no\udcfftext.wav")
    for name in names:
        shutil.copy(folder / "silence.flac", tmp_path / name)
    shutil.copy(folder / "text.wav", tmp_path / "\x1b[2J.wav")
    done = transcribe(trained, tmp_path)
    assert done.returncode == 3 and not {"\x1b", "\x9b"} & set(done.stdout + done.stderr)
    assert "\\u001b[2J.wav cannot be read" in done.stderr
    shown = ("\\u001b[31mred.wav", "two\\nlines\\u009b.wav", "no\\udcfftext.wav")
    assert sorted(done.stdout.splitlines()) == sorted(f"==> {tmp_path}/{name} <==" for name in shown)
    assert transcribe(trained, tmp_path, "--format", "json", "--output_dir", tmp_path / "out").returncode == 3
    written = [json.loads(path.read_bytes())["audio_filepath"] for path in (tmp_path / "out").iterdir()]
    assert sorted(written) == sorted(f"{tmp_path}/{name}" for name in names)


def test_missing_default_checkpoint_is_reported(folder, tmp_path):
    done = run_script(TRANSCRIBE, str(folder / "good.wav"), cwd=tmp_path)
    assert done.returncode == 4 and "no checkpoint in checkpoints/" in done.stderr and "Traceback" not in done.stderr


def test_folders_are_searched_in_order_and_links_are_not_followed(folder, tmp_path):
    results = [str(recording.name) for recording in find_recordings([str(folder)])]
    assert results == ["good.wav", "inside/good.ogg", "nan.wav", "pipe.wav", "silence.flac", "text.wav"]
    names = [Recording(Path(name), Path(name)) for name in ("a.wav", "a.mp3", "b.wav")]
    assert [path.name for path in output_paths(names, tmp_path, "txt")] == ["a.wav.txt", "a.mp3.txt", "b.txt"]
    with pytest.raises(UsageError, match="Download"):
        find_recordings(["https://example.org/a.wav"])
    with pytest.raises(UsageError, match="would both be"):
        output_paths([names[0], names[0]], tmp_path, "txt")


def test_recording_is_loaded_as_in_training(trained):
    """The recogniser and training load the same input, so that scores transfer."""
    path = sorted(trained.recordings.glob("test_*.flac"))[3]
    waveform = load_audio(AudioSource(str(path)))
    encoded, lengths = trained.recognizer.speech_model.encode(waveform[None], (len(waveform),))
    tokens = trained.recognizer.decode(trained.recognizer.speech_model.model, encoded, lengths)[0]
    assert trained.recognizer.transcribe(path).text == trained.recognizer.speech_model.tokenizer.decode(tokens)


@pytest.mark.full
def test_long_file_benchmark_reports_time_and_memory(trained):
    manifest = trained.recordings.parent / "test.jsonl"
    given = ("--checkpoint", str(trained.checkpoint), "--manifest", str(manifest), "--minutes", "0.5", "--json")
    done = checked(run_script("benchmarks/decoding.py", "long_file", *given))
    parsed = json.loads(done.stdout)
    assert parsed["audio_seconds"] >= 30 and parsed["segments"] == parsed["utterances"] > 10
    assert 0 <= parsed["rss_growth_mib"] < 600 and parsed["times_real_time"] > 0 and parsed["cer"] < 0.5
