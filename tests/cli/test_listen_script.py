"""listen.py reads raw PCM or WAV of unknown length from standard input and rejects other input."""

import contextlib
import errno
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.cli import listen as listen_command
from konkanivani.cli import serve as serve_command
from konkanivani.data.audio.pcm import PcmDecoder, PcmFormat
from konkanivani.errors import CheckpointError, DataError
from konkanivani.inference import live
from konkanivani.inference.listener import Final, Partial
from konkanivani.inference.word_times import Word
from tests.conftest import run_script
from tests.fork_server import ROOT
from tests.inference.test_listener import SENTENCES, finals, listen, recording
from tests.timeouts import PROCESS_TIMEOUT

SCRIPT = "training_scripts/listen.py"
RAW = PcmFormat(16_000, 1, "s16le")


def pcm16_bytes(samples: np.ndarray) -> bytes:
    return (samples * 32768).round().clip(-32768, 32767).astype("<i2").tobytes()


def wav_bytes(samples: np.ndarray, subtype: str = "PCM_16", rate: int = 16_000, size: int | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format="WAV")
    data = bytearray(file.getvalue())
    place = data.index(b"data") + 4
    if size is not None:
        data[place : place + 4] = struct.pack("<L", size)
    return bytes(data)


def container_bytes(container: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(10), 16_000, "PCM_16", format=container)
    return file.getvalue()


def decode_in_blocks(data: bytes, block: int) -> tuple[np.ndarray, PcmDecoder]:
    decoder = PcmDecoder(RAW)
    parts = [decoder.decode(data[start : start + block]) for start in range(0, len(data), block)]
    return np.concatenate([*(part for part in parts if len(part)), decoder.finish()]), decoder


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("size", [None, 0, 0xFFFFFFFF])
def test_wav_of_any_stated_length_and_format_is_decoded(subtype, size):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (300, 2)).astype(np.float32)
    data = wav_bytes(samples, subtype, 22_050, size)
    data += b"LIST\x04\0\0\0abcd" if size is None else b""
    for block in (1, 1_000, len(data)):
        result, decoder = decode_in_blocks(data, block)
        assert decoder.format is not None and (decoder.format.rate, decoder.format.channels) == (22_050, 2)
        assert result.shape == samples.shape and decoder.leftover == 0
        assert np.abs(result - samples).max() < (0.02 if subtype == "PCM_U8" else 1e-4)
    # Negative control: the same bytes are decoded differently as raw PCM.
    assert len(PcmDecoder(RAW).decode(b"\0\0" + data)) != len(samples)


@pytest.mark.parametrize("block", [1, 3, 1_000])
def test_raw_pcm_is_decoded_and_partial_sample_is_counted(block):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, 500).astype(np.float32)
    result, decoder = decode_in_blocks(pcm16_bytes(samples) + b"x", block)
    assert np.abs(result[:, 0] - samples).max() < 1e-4 and decoder.leftover == 1
    assert len(decode_in_blocks(b"", 1)[0]) == 0 and len(decode_in_blocks(b"RI", 1)[0]) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"fLaC\0\0\0\x22" + bytes(100), "FLAC"),
        (b"OggS" + bytes(100), "Ogg"),
        (container_bytes("RF64"), "is RF64"),
        (container_bytes("AU"), "is AU"),
        (container_bytes("CAF"), "is CAF"),
        (container_bytes("W64"), "is W64"),
        (wav_bytes(np.zeros(10)).replace(b"RIFF", b"RIFX"), "RIFX"),
        (b"dns." + bytes(100), "is AU"),
        (b"\0\0\0\x1cftypM4A \0\0\0\0" + bytes(100), "MP4 or M4A"),
        (b"\0\0\0\x20ftyp", "MP4 or M4A"),
        (b"RIFF\0\0\0\0AVI " + bytes(100), "RIFF file other than WAV"),
        (wav_bytes(np.zeros(10))[:30], "cut"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "no format"),
        (b"RIFF\0\0\0\0WAVEfmt \x02\0\0\0\1\0", "cut format"),
        (wav_bytes(np.zeros(10), "ALAW"), "not supported"),
        (wav_bytes(np.zeros(10))[:24] + struct.pack("<L", 400_000) + wav_bytes(np.zeros(10))[28:], "400000 Hz"),
        (wav_bytes(np.zeros(10))[:22] + struct.pack("<H", 0) + wav_bytes(np.zeros(10))[24:], "0 channels"),
    ],
)
def test_stream_other_than_wav_or_pcm_raises_data_error(data, message):
    for block in (1, len(data)):
        with pytest.raises(DataError, match=message):
            decode_in_blocks(data, block)


@pytest.mark.parametrize("data", [b"\xff\xfb\x90\0" * 10, b"ftyp" + bytes(8), b"\0\0\0\x1cfty", b"\x01\x02\x03\x04"])
def test_raw_samples_that_resemble_a_signature_are_decoded(data):
    for block in (1, len(data)):
        result, decoder = decode_in_blocks(data, block)
        assert 2 * len(result) + decoder.leftover == len(data)


def test_json_events_are_one_parseable_line_each():
    final = Final("एक\n", (Word("एक\n", 0.5, 1.0, None),), 0.5, 1.0, False)
    for event, kind in ((final, "final"), (Partial("एक", "दो", 0.5), "partial")):
        line = live.event_line(event)
        assert "\n" not in line
        assert json.loads(line)["kind"] == kind
    assert json.loads(live.event_line(final))["words"][0]["text"] == "एक\n"


def write_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_script_prints_final_results_of_listener(trained, tmp_path):
    samples = np.frombuffer(pcm16_bytes(recording()), "<i2").astype(np.float32) / 32768
    expected = [final.text for final in finals(listen(trained.recognizer, samples, 2_000))]
    assert len(expected) == len(SENTENCES)
    flags = ("--checkpoint", str(trained.checkpoint), "--device", "cpu")
    raw = run_script(SCRIPT, *flags, "-", stdin=write_file(tmp_path / "raw", pcm16_bytes(recording()) + b"x"))
    assert raw.returncode == 0, raw.stderr
    assert raw.stdout.splitlines() == expected
    assert "Expected delay" in raw.stderr and "1 bytes are not a whole sample" in raw.stderr
    stereo = np.stack([recording(), recording()], axis=1)
    as_json = run_script(SCRIPT, *flags, "--json", stdin=write_file(tmp_path / "wav", wav_bytes(stereo, size=0)))
    assert as_json.returncode == 0, as_json.stderr
    events = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert [event["text"] for event in events if event["kind"] == "final"] == expected
    assert any(event["kind"] == "partial" and event["fixed"] for event in events)


@pytest.mark.parametrize(
    ("flags", "data", "code", "message"),
    [
        (("--sample_rate", "3999"), b"", 2, "3999 Hz"),
        (("--channels", "0"), b"", 2, "0 channels"),
        (("speech.wav",), b"", 2, "transcribe"),
        (("--pause", "0"), b"", 2, "--pause"),
        ((), b"fLaC" + bytes(100), 3, "FLAC"),
        (("--sample_format", "f32le"), np.full(9_000, np.nan, "<f4").tobytes(), 3, "NaN"),
        (("--sample_format", "f32le"), np.full(9_000, 1e30, "<f4").tobytes(), 3, "between -1 and 1"),
        ((), b"", 0, "Expected delay"),
    ],
)
def test_invalid_input_exits_with_code_and_message(base, tmp_path, flags, data, code, message):
    done = run_script(
        SCRIPT, "--checkpoint", str(base), "--device", "cpu", *flags, stdin=write_file(tmp_path / "in", data)
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_text_before_invalid_samples_is_printed(trained, tmp_path):
    samples = np.append(recording(), np.full(9_000, np.nan)).astype("<f4")
    done = run_script(
        *(SCRIPT, "--checkpoint", str(trained.checkpoint), "--device", "cpu", "--sample_format", "f32le"),
        stdin=write_file(tmp_path / "in", samples.tobytes()),
    )
    assert done.returncode == 3 and "NaN" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == len(SENTENCES)


def test_input_that_cannot_be_read_raises_data_error_after_the_text(trained, tmp_path, capsys, monkeypatch):
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(DataError, match="Standard input cannot be read: Is a directory"):
        live.listen(trained.recognizer, folder, RAW, live.LiveOutput(False))
    os.close(folder)
    source = os.open(write_file(tmp_path / "in", pcm16_bytes(recording()[:-9_000])), os.O_RDONLY)
    read = os.read

    def fail_at_end(descriptor: int, count: int) -> bytes:
        if data := read(descriptor, count):
            return data
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(live.os, "read", fail_at_end)
    with pytest.raises(DataError, match="Input/output error"):
        live.listen(trained.recognizer, source, RAW, live.LiveOutput(False))
    os.close(source)
    assert len(capsys.readouterr().out.splitlines()) == len(SENTENCES)


@pytest.mark.parametrize(("columns", "shown"), [(20, 19), (0, 79)])
def test_partial_text_fits_the_terminal_that_shows_it(monkeypatch, columns, shown):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setenv("COLUMNS", "300")
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        live.LiveOutput(False).show([Partial("x" * 200, "end", 0.0)])
        text = os.read(master, 4_096).decode()
    os.close(master)
    assert text == "\r\x1b[K" + ("x" * 200 + " end")[-shown:]


@pytest.mark.parametrize("count", [1, 2])
def test_interrupted_block_is_completed_unless_interrupted_twice(count):
    code = f"""
import os, signal
from konkanivani.errors import defer_interrupt
try:
    with defer_interrupt():
        for _ in range({count}):
            os.kill(os.getpid(), signal.SIGINT)
        print("complete")
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["complete", "interrupted"][count - 1 :], done.stderr


def start_listen(*flags: str, **streams) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / SCRIPT), "--device", "cpu", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, **streams)


def test_sigint_prints_last_final_result_and_exits_with_130(trained):
    process = start_listen(
        "--checkpoint", str(trained.checkpoint), "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # Without the pause after the last sentence, only the end of the stream makes it final.
    process.stdin.write(pcm16_bytes(recording()[:-9_000]))
    process.stdin.flush()
    lines = []
    while sum('"final"' in line for line in lines) < len(SENTENCES) - 1:
        lines.append(process.stdout.readline().decode())
        assert lines[-1], process.stderr.read()
    while '"partial"' not in lines[-1]:
        lines.append(process.stdout.readline().decode())
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=PROCESS_TIMEOUT)
    assert process.returncode == 130 and b"Traceback" not in errors
    assert sum('"final"' in line for line in [*lines, *rest.decode().splitlines()]) == len(SENTENCES)


@pytest.mark.parametrize("again", [False, True], ids=["Ctrl-C", "negative control: twice"])
def test_ctrl_c_keeps_audio_that_waits_in_the_pipe(trained, monkeypatch, capsys, again):
    source, sink = os.pipe()
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, 2**20)
    data = pcm16_bytes(recording())
    waiting_bytes = live._waiting_bytes

    def interrupt(_descriptor: int) -> int:
        monkeypatch.setattr(live, "_waiting_bytes", interrupt if again else waiting_bytes)
        if not again:
            os.write(sink, data[16_000:])
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "_waiting_bytes", interrupt)
    os.write(sink, data[:16_000])
    with pytest.raises(KeyboardInterrupt):
        live.listen(trained.recognizer, source, RAW, live.LiveOutput(False))
    os.close(source)
    os.close(sink)
    assert len(capsys.readouterr().out.splitlines()) == (0 if again else len(SENTENCES))


@pytest.mark.parametrize(("seconds", "is_reported"), [(1.9, True), (1.5, False)])
def test_backlog_is_reported_before_a_small_pipe_is_full(trained, monkeypatch, capsys, seconds, is_reported):
    source, sink = os.pipe()  # 64 KiB: two seconds
    os.write(sink, bytes(3_200))
    os.close(sink)
    monkeypatch.setattr(live, "_waiting_bytes", lambda _descriptor: round(seconds * 32_000))
    live.listen(trained.recognizer, source, RAW, live.LiveOutput(False))
    os.close(source)
    assert ("2 s behind" in capsys.readouterr().err) == is_reported


def test_closed_stdout_ends_cleanly_and_terminal_shows_partials(trained):
    master, terminal = pty.openpty()
    on_terminal = start_listen("--checkpoint", str(trained.checkpoint), stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    process = start_listen("--checkpoint", str(trained.checkpoint), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(pcm16_bytes(recording()))
        process.stdin.close()
    errors = process.stderr.read()
    assert process.wait(PROCESS_TIMEOUT) in (0, 141) and b"Traceback" not in errors
    data = pcm16_bytes(recording())
    # Send the first second alone, so that a decoding pass follows on a machine of any speed.
    on_terminal.stdin.write(data[:32_000])
    on_terminal.stdin.flush()
    shown = b""
    while SENTENCES[0][0] not in shown.decode(errors="ignore"):
        shown += os.read(master, 4_096)
    on_terminal.stdin.write(data[32_000:])
    on_terminal.stdin.close()
    lines = on_terminal.stdout.read().decode().splitlines()
    assert on_terminal.wait(PROCESS_TIMEOUT) == 0
    with contextlib.suppress(OSError):  # Linux raises an error when a closed terminal is read
        while piece := os.read(master, 4_096):
            shown += piece
    os.close(master)
    assert len(lines) == len(SENTENCES) and not any("\x1b" in line for line in lines)
    # Partial results are written to the terminal only, and overwritten in place.
    assert b"\r\x1b[K" in shown


@pytest.mark.parametrize("command", ["listen", "serve"])
def test_live_speech_leaves_no_holes_in_the_heap(command, tmp_path, monkeypatch):
    # Its effect on the memory of an hour: benchmarks/latency.py --measure memory.
    calls: list[str] = []
    monkeypatch.setattr("konkanivani.memory.monitor.set_mmap_threshold", lambda: calls.append(command))
    missing = str(tmp_path / "missing.pt")
    with pytest.raises(CheckpointError, match="missing.pt"):
        if command == "listen":
            listen_command.listen(listen_command.Flags(checkpoint=missing))
        else:
            pytest.importorskip("websockets", reason="the page needs the package websockets")
            serve_command.serve(serve_command.Flags(checkpoint=missing, port=0))
    assert calls == [command]
