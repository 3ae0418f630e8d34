"""Recording sessions: results, limits, fairness, and invalid input, which does not stop the server."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed

from konkanivani.errors import DataError
from konkanivani.inference.listener import Final, Listener
from konkanivani.inference.recognizer import Recognizer, load_recognizer
from konkanivani.serve.server import LISTEN, RENDER, PageServer
from konkanivani.serve.session import Limits, Session
from tests.conftest import WORDS, speak
from tests.serve.parts import (
    RATE,
    ToneListener,
    connect_to,
    finish,
    receive_messages,
    running_server,
    send,
    start_recording,
    tones,
)

LINES = [["उदक", "घर", "शाळा"], ["बाजार", "आवय"]]


class SlowListener(ToneListener):
    """Listener that runs in real time: it takes as long as the audio."""

    def accept(self, samples: np.ndarray) -> list:
        time.sleep(len(samples) / RATE)
        return super().accept(samples)


class LargeResultsListener(ToneListener):
    """Listener that returns more than 1 MB of results per block."""

    def accept(self, samples: np.ndarray) -> list:
        return [Final("घर " * 100_000, (), 0.0, 0.0, False)] * 4


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with running_server() as server:
        yield server


def transcribe(server: PageServer, samples: np.ndarray, rate: int = RATE, block: int = 1600) -> list[dict]:
    """Send a recording and return all messages."""
    with start_recording(server, rate) as connection:
        with contextlib.suppress(ConnectionClosed):  # after an error
            send(connection, samples, block)
            finish(connection)
        return receive_messages(connection)


def final_texts(messages: list[dict]) -> list[str]:
    return [message["text"] for message in messages if message["type"] == "final"]


def error_message(messages: list[dict]) -> str:
    (error,) = [message["message"] for message in messages if message["type"] == "error"]
    return error


def assert_serves(server: PageServer) -> None:
    """Assert that a new recording is recognised."""
    assert final_texts(transcribe(server, tones([["उदक"]]))) == ["उदक"]


def wait_for_capacity(server: PageServer, sessions: int = 1, timeout: float = 8.0) -> float:
    """Wait until `sessions` sessions can be opened; return the waiting time in seconds."""
    started = time.monotonic()
    while time.monotonic() < started + timeout:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(start_recording(server)) for _ in range(sessions)]
            if {json.loads(each.recv(timeout=5))["type"] for each in opened} == {"ready"}:
                return time.monotonic() - started
        time.sleep(0.05)
    raise AssertionError("no session became free")


@pytest.mark.parametrize(("rate", "block"), [(8_000, 799), (16_000, 1), (44_100, 4410), (48_000, 48_000 * 5)])
def test_results_are_equal_at_every_sample_rate_and_block_size(server, rate, block):
    samples = tones(LINES if block > 1 else [["घर"]], rate)
    messages = transcribe(server, samples, rate, block)
    assert final_texts(messages) == ([" ".join(words) for words in LINES] if block > 1 else ["घर"])
    assert [messages[0]["type"], messages[-1]["type"]] == ["ready", "finished"]
    final = next(message for message in messages if message["type"] == "final")
    assert final["words"][0]["start"] == pytest.approx(0.3, abs=0.06)
    last = [message for message in messages if message["type"] == "progress"][-1]
    assert last["decoded"] == pytest.approx(len(samples) / rate, abs=0.001) and last["backlog"] == 0
    # Negative control: with a wrong sample rate, another word is recognised.
    assert final_texts(transcribe(server, tones([["घर"]], rate), round(rate * 1.6))) == ["शाळा"]


def test_partial_results_arrive_during_recording(server):
    with start_recording(server) as connection:
        samples = tones([["उदक", "घर"]])
        results: list[dict] = []
        for part in (samples[:RATE], samples[RATE : round(1.8 * RATE)]):
            send(connection, part)
            message = {"type": ""}
            while message["type"] != "partial":
                message = json.loads(connection.recv(timeout=5))
            results.append(message)
    assert [(each["fixed"], each["tentative"]) for each in results] == [("", "उदक"), ("उदक", "घर")]


def decode_one_word(model: object, encoded: torch.Tensor, lengths: list[int]) -> list[list[int]]:
    """Decode every segment to the same tokens, because the model of `base` is trained for three steps only."""
    return [[7, 8, 9]] * len(encoded)


@pytest.fixture(scope="module")
def recognizer(base: Path) -> Recognizer:
    return dataclasses.replace(load_recognizer(base, device="cpu"), decode=decode_one_word)


@pytest.fixture(scope="module")
def real_server(recognizer: Recognizer) -> Iterator[PageServer]:
    """Run a server with a neural network."""
    with running_server(partial(Listener, recognizer)) as server:
        yield server


@pytest.mark.parametrize(
    ("value", "is_accepted"), [(np.nan, False), (np.inf, False), (1e30, False), (-1e30, False), (1.5, True)]
)
def test_non_finite_or_huge_samples_are_rejected(real_server, value, is_accepted):
    samples = tones([["उदक"]])
    samples[2000] = value
    messages = transcribe(real_server, samples)
    if is_accepted:
        assert messages[-1]["type"] == "finished"
    else:
        assert "ample" in error_message(messages) and not final_texts(messages)
    assert transcribe(real_server, tones([["उदक"]]))[-1]["type"] == "finished"


def test_final_results_equal_those_of_listener(recognizer, real_server):
    pause = 0.005 * np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    samples = np.concatenate([part for words in (WORDS[:3], WORDS[3:]) for part in (pause, speak(list(words)), pause)])
    listener = Listener(recognizer, RATE, every=None)
    expected = [*listener.accept(samples), *listener.finish()]
    assert len(expected) == 2
    actual = [message for message in transcribe(real_server, samples) if message["type"] == "final"]
    assert [final["text"] for final in actual] == [final.text for final in expected]
    for final, other in zip(actual, expected, strict=True):
        assert final["start"] == pytest.approx(other.start, abs=0.001)
        assert final["end"] == pytest.approx(other.end, abs=0.001)


BAD_MESSAGES = {
    "half a float": (b"\0" * 4002, "whole number"),
    "not JSON": ("{", "JSON object"),
    "deep JSON": ("[" * 100_000, "JSON object"),
    "a list": ("[]", "JSON object"),
    "no type": ("{}", "type None"),
    "unknown type": ('{"type": "delete"}', "'delete'"),
    "message of another endpoint": ('{"type": "end"}', "wrong time"),
    "another sample rate": ('{"type": "start", "sample_rate": 44100}', "changed from 16000 to 44100"),
}


@pytest.mark.parametrize(("message", "expected"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_invalid_message_ends_session_with_error(server, message, expected):
    with start_recording(server) as connection:
        send(connection, tones([["उदक"]]))
        connection.send(message)
        assert expected in error_message(receive_messages(connection))
        assert connection.close_code == 1008
    assert_serves(server)


@pytest.mark.parametrize("rate", [3_999, 400_000, 16_000.5, True, "16000", None])
def test_invalid_sample_rate_is_rejected(server, rate):
    with start_recording(server, rate) as connection:
        assert "sample" in error_message(receive_messages(connection))
    assert_serves(server)


def test_audio_before_start_or_after_finish_is_rejected(server):
    with connect_to(server) as connection:
        connection.send(b"\0" * 400)
        assert "before the start" in error_message(receive_messages(connection))
    with start_recording(server) as connection:
        finish(connection)
        connection.send(b"\0" * 400)
        assert "after the end" in error_message(receive_messages(connection)) and connection.close_code == 1008
    assert_serves(server)


def test_too_large_message_closes_the_connection(server):
    with start_recording(server) as connection:
        with contextlib.suppress(ConnectionClosed):
            connection.send(b"\0" * 2**21)
        receive_messages(connection)
        assert connection.close_code == 1009
    # Negative control: the largest allowed message.
    with start_recording(server) as connection:
        connection.send(b"\0" * 2**20)
        finish(connection)
        assert receive_messages(connection)[-1]["type"] == "finished"


def test_fifth_session_is_rejected_until_another_ends():
    with running_server() as server, contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(start_recording(server)) for _ in range(Limits().sessions)]
        assert [json.loads(session.recv(timeout=5))["type"] for session in sessions] == ["ready"] * 4
        with start_recording(server) as fifth:
            assert "All 4 sessions are in use" in error_message(receive_messages(fifth))
            assert fifth.close_code == 1013
        sessions[0].close()
        wait_for_capacity(server)


def test_next_recording_waits_for_the_end_of_the_last_session(monkeypatch):
    run = Session.run

    def run_and_end_late(session: Session) -> None:
        run(session)
        time.sleep(0.3)

    monkeypatch.setattr(Session, "run", run_and_end_late)
    with running_server(limits=Limits(sessions=1)) as server:
        assert_serves(server)
        assert_serves(server)
        # Negative control: without waiting, the page's next file is rejected.
        monkeypatch.setattr("konkanivani.serve.server.SESSION_SECONDS", 0.0)
        with start_recording(server) as connection:
            assert "All 1 sessions are in use" in error_message(receive_messages(connection))


def test_closed_connection_frees_its_session_within_two_seconds():
    with running_server(SlowListener, Limits(sessions=1)) as server, contextlib.ExitStack() as stack:
        connection = stack.enter_context(start_recording(server))
        send(connection, tones(LINES))
        connection.recv(timeout=5)
        connection.socket.shutdown(socket.SHUT_RDWR)
        assert wait_for_capacity(server) < 2


def test_backlog_beyond_limit_ends_session_with_error():
    with running_server(SlowListener, Limits(backlog_seconds=2.0)) as server:
        messages = transcribe(server, tones([["उदक"] * 5]))
    assert "2 s of audio are waiting" in error_message(messages)
    # Negative control: the default limit is not exceeded.
    with running_server(SlowListener) as server:
        assert_serves(server)


def test_idle_session_is_closed():
    with running_server(limits=Limits(idle_seconds=0.3)) as server:
        with start_recording(server) as connection:
            assert "No audio arrived" in error_message(receive_messages(connection))
        with connect_to(server) as connection:
            assert "No audio arrived" in error_message(receive_messages(connection))
        assert_serves(server)


def test_session_is_not_idle_while_its_audio_is_decoded():
    class LateListener(ToneListener):
        def accept(self, samples: np.ndarray) -> list:
            time.sleep(1.0)
            return super().accept(samples)

    with running_server(LateListener, Limits(idle_seconds=0.3)) as server, start_recording(server) as connection:
        send(connection, np.zeros(3 * RATE, dtype=np.float32), 3 * RATE)  # two turns
        time.sleep(1.8)
        finish(connection)
        assert receive_messages(connection)[-1]["type"] == "finished"
        with start_recording(server) as idle:  # negative control: after decoding, time counts again
            send(idle, np.zeros(RATE // 10, dtype=np.float32))
            assert "No audio arrived" in error_message(receive_messages(idle))


def test_sessions_are_decoded_in_turns():
    with running_server(SlowListener) as server, start_recording(server) as long:
        send(long, tones([["उदक"] * 7]))
        long.recv(timeout=5)
        with start_recording(server) as short:
            send(short, np.zeros(RATE // 10, dtype=np.float32))
            finish(short)
            assert receive_messages(short)[-1]["type"] == "finished"
        # 5.6 s of audio, and of decoding time, wait in the long session: the short one did not wait for them.
        last = {}
        with contextlib.suppress(TimeoutError):
            while True:
                last = json.loads(long.recv(timeout=0.05))
        assert last["type"] == "progress" and last["backlog"] > 2


def raw_client(server: PageServer, endpoint: str = LISTEN) -> socket.socket:
    """Open a WebSocket connection with a plain socket that reads only the first bytes of the response."""
    parts = urlsplit(server.address)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((parts.hostname, parts.port))
    lines = (
        f"GET {parts.path}{endpoint} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"Origin: http://{parts.netloc}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    )
    client.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    assert client.recv(12) == b"HTTP/1.1 101"
    return client


def frame(opcode: int, payload: bytes) -> bytes:
    """Return a WebSocket client frame with a zero mask."""
    return bytes([0x80 | opcode, 0x80 | 126]) + len(payload).to_bytes(2, "big") + b"\0" * 4 + payload


def test_client_that_never_reads_is_closed_and_delays_no_other():
    limits = Limits(sessions=2, send_seconds=1.0)
    with running_server(LargeResultsListener, limits) as server:
        non_reading = raw_client(server)
        non_reading.sendall(frame(1, b'{"type": "start", "sample_rate": 16000}'))
        with contextlib.suppress(OSError):
            for _ in range(40):
                non_reading.sendall(frame(2, bytes(6400)))
                time.sleep(0.02)
        started = time.monotonic()
        with start_recording(server) as other:
            send(other, np.zeros(1600, dtype=np.float32))
            finish(other)
            assert receive_messages(other)[-1]["type"] == "finished" and time.monotonic() - started < 1
        # The session of the client that does not read is closed.
        wait_for_capacity(server, sessions=2)
        non_reading.close()


def test_transcript_for_a_browser_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr("konkanivani.serve.corrections.render", lambda *_: iter(["x" * 1_000_000] * 40))
    with running_server(ToneListener, Limits(request_seconds=1.0)) as server:
        non_reading = raw_client(server, RENDER)
        non_reading.sendall(frame(1, b'{"type": "render", "format": "json", "timestamps": "segment", "name": "a"}'))
        non_reading.sendall(frame(1, b'{"type": "end"}'))
        deadline = time.monotonic() + 10
        while not server._connections and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        assert server._connections
        while server._connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server._connections
        non_reading.close()


@pytest.mark.parametrize(
    "error", [DataError("The samples are bad. Repair them."), ValueError("a\x1b[31mb"), MemoryError()]
)
def test_recogniser_error_ends_only_its_session(error):
    class Failing(ToneListener):
        def accept(self, samples: np.ndarray) -> list:
            if samples.any():
                raise error
            return super().accept(samples)

    with running_server(Failing) as server:
        message = error_message(transcribe(server, tones([["उदक"]])))
        assert message.endswith((".", "\n")) and "\x1b" not in message
        assert transcribe(server, np.zeros(RATE, dtype=np.float32))[-1]["type"] == "finished"


def test_error_while_building_recogniser_is_reported():
    def build(sample_rate: int) -> ToneListener:
        raise DataError(f"No model for {sample_rate} Hz. Use another.")

    with running_server(build) as server:
        assert "No model for 16000 Hz" in error_message(transcribe(server, np.zeros(0, dtype=np.float32)))


def test_closing_server_ends_its_sessions_and_threads():
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        with running_server() as server:
            connection = stack.enter_context(start_recording(server))
            connection.recv(timeout=5)
            assert set(threading.enumerate()) - before
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=5)
    deadline = time.monotonic() + 3
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(threading.enumerate()) - before == set()


def mutate(generator: np.random.Generator, message: bytes) -> bytes:
    """Replace, delete or repeat random bytes of a message."""
    changed = bytearray(message)
    for _ in range(generator.integers(1, 4)):
        place = int(generator.integers(len(changed)))
        kind = generator.integers(3)
        if kind == 0:
            changed[place] = generator.integers(256)
        elif kind == 1:
            del changed[place : place + int(generator.integers(1, 9))]
        else:
            changed[place:place] = changed[place : place + 40]
        changed = changed or bytearray(b"x")
    return bytes(changed)


def test_damaged_messages_do_not_stop_the_server(server):
    generator = np.random.default_rng(0)
    audio_bytes = tones([["घर"]])[:3000].astype("<f4").tobytes()
    valid = [
        b'{"type": "start", "sample_rate": 16000}',
        b'{"type": "finish"}',
        b'{"type": "save", "key": "0123456789abcdef-0", "text": "x", "sample_rate": 16000, "samples": 6000}',
        b'{"type": "render", "format": "vtt", "timestamps": "word", "name": "x"}',
        b'{"type": "segments", "segments": [{"text": "a b", "words": [{"text": "a", "start": 0.5, "end": 1}]}]}',
        b'{"type": "end"}',
        audio_bytes,
    ]
    for number in range(60):
        with connect_to(server, ("listen", "save", "render")[number % 3]) as connection:
            with contextlib.suppress(ConnectionClosed):
                for message in generator.permutation(np.array(valid, dtype=object))[:4]:
                    damaged = mutate(generator, message) if generator.random() < 0.7 else message
                    is_text = message is not audio_bytes and generator.random() < 0.9
                    connection.send(damaged.decode(errors="replace") if is_text else damaged)
    assert_serves(server)
