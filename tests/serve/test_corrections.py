"""Corrected transcripts are saved as manifest rows, and edited transcripts are rendered."""

import contextlib
import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from websockets.exceptions import ConnectionClosed

from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.manifest import read_manifest
from konkanivani.inference import word_times
from konkanivani.inference.word_times import Segment, Word
from konkanivani.serve.corrections import MANIFEST, Corrections, edit_segment, open_corrections
from konkanivani.serve.server import PageServer
from konkanivani.serve.session import Limits
from tests.serve.parts import RATE, connect_to, receive_messages, running_server, tones

KEY = "0123456789abcdef-0"
SAMPLES = np.round(tones([["उदक"]]) * 32767).astype("<i2")
WORDS = tuple(Word(text, at, at + 0.5, 0.9) for text, at in (("एक", 1.0), ("दोन", 2.0), ("तीन", 3.0)))


def save(server: PageServer, audio: np.ndarray = SAMPLES, **fields: object) -> dict:
    """Save a correction and return the response."""
    message = {"type": "save", "key": KEY, "text": "उदक", "sample_rate": RATE, "samples": len(audio)} | fields
    with connect_to(server, "save") as connection:
        with contextlib.suppress(ConnectionClosed):  # after an error
            connection.send(json.dumps(message))
            for first in range(0, len(audio), 5000):
                connection.send(audio[first : first + 5000].tobytes())
        return ([*receive_messages(connection), {"type": "closed"}])[0]


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_correction_is_saved_as_manifest_row_with_audio(tmp_path):
    folder = tmp_path / "new" / "corrections"
    with running_server(corrections=Corrections(folder)) as server:
        assert not folder.exists()
        assert save(server, text="  उदक \n घर ") == {"type": "saved", "rows": 1}
        assert save(server, key="0123456789abcdef-1", text="घर") == {"type": "saved", "rows": 2}
        # A second correction of the same line replaces the first.
        assert save(server, text="उदकां") == {"type": "saved", "rows": 2}
    assert list_files(folder) == ["audio/0123456789abcdef-0.flac", "audio/0123456789abcdef-1.flac", MANIFEST]
    manifest = read_manifest(str(folder / MANIFEST))
    assert [row.text for row in manifest] == ["घर", "उदकां"]
    waveform = load_audio(manifest[1].source)
    assert manifest[1].duration == pytest.approx(len(SAMPLES) / RATE)
    assert np.array_equal(np.round(waveform.numpy() * 32768).astype(np.int16), SAMPLES)


def remove(server: PageServer, key: str = KEY) -> dict:
    with connect_to(server, "save") as connection:
        connection.send(json.dumps({"type": "remove", "key": key}))
        return receive_messages(connection)[0]


def test_removed_correction_leaves_no_row_and_no_audio(tmp_path):
    with running_server(corrections=Corrections(tmp_path / "new")) as server:
        assert remove(server) == {"type": "saved", "rows": 0} and list_files(tmp_path) == []
        save(server)
        save(server, key="0123456789abcdef-1", text="घर")
        assert remove(server) == {"type": "saved", "rows": 1}
        assert remove(server) == {"type": "saved", "rows": 1}
        assert remove(server, "../../etc/passwd-0")["type"] == "error"
    assert list_files(tmp_path / "new") == ["audio/0123456789abcdef-1.flac", MANIFEST]
    assert [row.text for row in read_manifest(str(tmp_path / "new" / MANIFEST))] == ["घर"]


def test_sample_rate_of_microphone_is_kept(tmp_path):
    with running_server(corrections=Corrections(tmp_path)) as server:
        assert save(server, sample_rate=48_000)["type"] == "saved"
    assert soundfile.info(tmp_path / "audio" / f"{KEY}.flac").samplerate == 48_000


def test_existing_manifest_rows_are_unchanged(tmp_path):
    existing = b'{"audio_filepath": "a.wav",  "duration": 1, "text": "x"}\nno row\n\xff\n[]'
    (tmp_path / MANIFEST).write_bytes(existing)
    with running_server(corrections=Corrections(tmp_path)) as server:
        assert save(server)["rows"] == 5
        assert save(server)["rows"] == 5
    assert (tmp_path / MANIFEST).read_bytes().startswith(existing + b"\n")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key": "../../etc/passwd-0"}, "no valid name"),
        ({"key": "0123456789abcdef-0\n"}, "no valid name"),
        ({"text": "  "}, "0 characters"),
        ({"text": "x" * 10_001}, "10001 characters"),
        ({"text": "a\x00b"}, "U+0000"),
        ({"text": "a\ud800b"}, "Reload the page"),
        ({"samples": 0}, "at most 60 s"),
        ({"samples": 61 * RATE}, "at most 60 s"),
        ({"samples": len(SAMPLES) - 1}, "more audio than"),
        ({"samples": True}, "samples True"),
        ({"sample_rate": 3_999}, "3999 Hz"),
        ({"type": "start"}, "wrong time"),
    ],
)
def test_invalid_correction_writes_nothing(tmp_path, fields, message):
    with running_server(corrections=Corrections(tmp_path)) as server:
        response = save(server, **fields)
        assert response["type"] == "error" and message in response["message"], response
        assert list_files(tmp_path) == []
        assert save(server)["type"] == "saved"  # negative control


def test_unfinished_correction_is_closed_and_writes_nothing(tmp_path):
    with running_server(corrections=Corrections(tmp_path), limits=Limits(request_seconds=0.1)) as server:
        for audio in (SAMPLES[:100], SAMPLES[:0]):
            assert save(server, audio, samples=len(SAMPLES)) == {"type": "closed"}
        with connect_to(server, "save") as connection:  # endless empty messages
            connection.send(json.dumps({"type": "save", "key": KEY, "text": "x", "sample_rate": RATE, "samples": 9}))
            with pytest.raises(ConnectionClosed):
                while True:
                    connection.send(b"")
                    time.sleep(0.01)
        with connect_to(server, "save") as connection:
            connection.send(b"\0" * 100)
            assert "expected" in receive_messages(connection)[-1]["message"]
        with connect_to(server, "save") as connection:
            connection.send(json.dumps({"type": "save", "key": KEY, "text": "x", "sample_rate": RATE, "samples": 9}))
            connection.send(b"\0" * 3)
            assert "int16" in receive_messages(connection)[-1]["message"]
        assert list_files(tmp_path) == []


def test_corrections_without_folder_are_rejected():
    with running_server() as server:
        assert "--corrections DIR" in save(server)["message"]


def test_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with running_server(corrections=Corrections(tmp_path / "file" / "corrections")) as server:
        message = save(server)["message"]
    assert "could not be written: Not a directory" in message and "Traceback" not in message


def test_folder_without_locks_is_reported(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("konkanivani.files.fcntl.flock", fail)
    with running_server(corrections=Corrections(tmp_path)) as server:
        assert f"{tmp_path} could not be locked: No locks available" in save(server)["message"]


def test_too_long_folder_name_is_reported(tmp_path):
    with running_server(corrections=open_corrections(str(tmp_path / ("x" * 300)))) as server:
        assert "could not be written: File name too long" in save(server)["message"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("एक दोन तीन", [("एक", 1.0, 1.5), ("दोन", 2.0, 2.5), ("तीन", 3.0, 3.5)]),
        ("एक तीन", [("एक", 1.0, 1.5), ("तीन", 3.0, 3.5)]),
        ("एक चा र तीन", [("एक", 1.0, 1.5), ("चा", 2.0, 2.3333), ("र", 2.3333, 2.5), ("तीन", 3.0, 3.5)]),
        ("एक नवें दोन तीन", [("एक", 1.0, 1.5), ("नवें", 1.5, 2.0), ("दोन", 2.0, 2.5), ("तीन", 3.0, 3.5)]),
        (
            "नवें एक दोन तीन नवें",
            [("नवें", 1.0, 1.0), ("एक", 1.0, 1.5), ("दोन", 2.0, 2.5), ("तीन", 3.0, 3.5), ("नवें", 3.5, 3.5)],
        ),
        ("सात", [("सात", 1.0, 3.5)]),
    ],
)
def test_unchanged_words_keep_their_times(text, expected):
    segment = edit_segment(text, WORDS)
    actual = [(word.text, word.start, word.end) for word in segment.words]
    assert [word for word, _, _ in actual] == [word for word, _, _ in expected]
    assert np.allclose([times for _, *times in actual], [times for _, *times in expected], atol=1e-3)


def test_line_edited_to_empty_is_dropped():
    assert edit_segment("  ", WORDS) is None


def render(server: PageServer, *messages: object) -> list[dict]:
    with connect_to(server, "render") as connection:
        with contextlib.suppress(ConnectionClosed):
            for message in messages:
                connection.send(message if isinstance(message, bytes) else json.dumps(message))
        return receive_messages(connection)


SEGMENT = {
    "text": "एक दोन तीन",
    "words": [{"text": w.text, "start": w.start, "end": w.end, "confidence": w.confidence} for w in WORDS],
}
REQUEST = {"type": "render", "format": "srt", "timestamps": "segment", "name": "a & b"}


@pytest.mark.parametrize("timestamps", ["segment", "word"])
@pytest.mark.parametrize("text_format", ["txt", "srt", "vtt", "json"])
def test_rendered_transcript_equals_transcribe_output(text_format, timestamps):
    later = SEGMENT | {"text": "एक <b> तीन"}
    with running_server() as server:
        request = REQUEST | {"format": text_format, "timestamps": timestamps}
        lines = [{"type": "segments", "segments": [segment]} for segment in (SEGMENT, later, later | {"text": ""})]
        messages = render(server, request, *lines, {"type": "end"})
    assert messages[-1] == {"type": "finished"}
    edited = (WORDS[0], Word("<b>", 2.0, 2.5, None), WORDS[2])
    expected = word_times.render((Segment(WORDS), Segment(edited)), text_format, timestamps, "a & b")
    assert "".join(message["text"] for message in messages[:-1]) == "".join(expected)


@pytest.mark.parametrize(
    "messages",
    [
        [REQUEST | {"format": "docx"}],
        [REQUEST | {"timestamps": "letter"}],
        [{"type": "finish"}],
        [b"\0\0\0\0"],
        [REQUEST, {"type": "finish"}],
        [REQUEST | {"name": "\ud800"}],
        [REQUEST, {"type": "segments", "segments": [1]}],
        [REQUEST, {"type": "segments", "segments": [{"text": "x", "words": []}]}],
        [REQUEST, {"type": "segments", "segments": [SEGMENT | {"words": ["x"]}]}],
        [REQUEST, {"type": "segments", "segments": [SEGMENT | {"words": [{"text": "x", "start": -1, "end": 2}]}]}],
        [REQUEST, {"type": "segments", "segments": [SEGMENT | {"words": [{"text": "x", "start": 1e999, "end": 2}]}]}],
    ],
)
def test_invalid_render_request_is_reported(messages):
    with running_server() as server:
        response = render(server, *messages, {"type": "end"})[-1]
        assert response["type"] == "error" and response["message"].endswith(
            ("Reload the page.", "Split the recording.")
        )


def test_transcript_beyond_limits_is_rejected(monkeypatch):
    long = SEGMENT | {"text": "x " * 501}
    with running_server() as server:
        assert "1 to 500 words" in render(server, REQUEST, {"type": "segments", "segments": [long]})[-1]["message"]
        monkeypatch.setattr("konkanivani.serve.corrections.MAX_TRANSCRIPT_WORDS", 6)
        segments = {"type": "segments", "segments": [SEGMENT, SEGMENT]}
        assert render(server, REQUEST, segments, {"type": "end"})[-1] == {"type": "finished"}
        assert "at most 6 words" in render(server, REQUEST, segments, segments, {"type": "end"})[-1]["message"]
