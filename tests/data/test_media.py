"""Recordings of phones and messengers are decoded in a sandboxed process; unreadable ones are reported."""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

pytest.importorskip("av", reason="the extra `media` is not installed: pip install av")

from konkanivani.data.audio import media as media_process
from konkanivani.data.audio import media as media_sound
from konkanivani.data.audio import media_reader
from konkanivani.data.audio.files import (
    AudioSource,
    ShortAudio,
    UnusableAudio,
    claimed_header,
    read_blocks,
    read_header,
)
from konkanivani.data.audio.files import read_samples as read_all
from konkanivani.data.audio.media import READERS
from konkanivani.data.audio.waveform import load_audio
from tests.fork_server import fork_server
from tests.media_files import ENCODED, KINDS, Kind, rising_tone, write_media

SECONDS, RATE = 3.0, 16_000
M4A = Kind(".m4a", "aac", 44_100)


def read_samples(path: Path, **place: float) -> np.ndarray:
    return read_all(AudioSource(str(path), **place))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a rising tone as a file of each of `KINDS`."""
    folder = tmp_path_factory.mktemp("phones")
    for kind in KINDS:
        write_media(folder / f"{kind.name}{kind.suffix}", rising_tone(SECONDS, RATE), RATE, kind)
    return folder


@pytest.fixture
def voice_message(folder: Path) -> Path:
    return folder / "aac_44k_stereo.m4a"


def best_correlation(samples: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest correlation over shifts of at most 0.1 s."""
    middle = samples[RATE // 5 : len(wanted) - RATE // 5].astype(np.float64)
    middle -= middle.mean()
    shifts = np.arange(RATE // 10, 3 * RATE // 10, 2)
    spectra = np.fft.rfft(wanted), np.fft.rfft(middle, len(wanted))
    products = np.fft.irfft(spectra[0] * spectra[1].conj(), len(wanted))[shifts]
    sums, squares = (np.cumsum(np.insert(part, 0, 0.0)) for part in (wanted, wanted.astype(np.float64) ** 2))
    inside, energy = (part[shifts + len(middle)] - part[shifts] for part in (sums, squares))
    return float((products / np.sqrt((energy - inside**2 / len(middle)) * (middle @ middle))).max())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}{kind.suffix}")
def test_whole_read_blocks_and_spans_give_the_same_samples(kind, folder):
    path = folder / f"{kind.name}{kind.suffix}"
    header, whole = read_header(AudioSource(str(path))), read_samples(path)
    assert header.frames == len(whole) and header.missing == 0 and header.rate == kind.rate
    assert abs(header.seconds - SECONDS) < 0.1 and header.channels == (2 if kind.layout == "stereo" else 1)
    blocks = list(read_blocks(AudioSource(str(path)), 0.7))
    assert np.array_equal(np.concatenate(blocks), whole) and len(blocks) > 3
    claimed = claimed_header(AudioSource(str(path)))
    assert claimed.frames == 0 or abs(claimed.frames - header.frames) < 0.1 * header.rate
    for start, seconds in ((0.0, 1.0), (0.9, 0.5), (2.5, 0.4)):
        span = read_samples(path, start=start, seconds=seconds)
        assert len(span) == round(seconds * kind.rate)
        if path.suffix != ".ogg":  # libsndfile seeks directly and decodes without the preceding frames
            assert np.array_equal(span, whole[round(start * kind.rate) :][: len(span)])
    assert best_correlation(load_audio(AudioSource(str(path))).numpy(), rising_tone(SECONDS, RATE)) > 0.9


@pytest.mark.parametrize("name", ["he_aac.aac", "he_aac_v2.aac", "amr_wb.awb"])
def test_formats_without_local_encoder_are_decoded(name):
    samples = load_audio(AudioSource(str(ENCODED / name))).numpy()
    assert read_header(AudioSource(str(ENCODED / name))).rate == (16_000 if name == "amr_wb.awb" else 32_000)
    tone = rising_tone(1.0, RATE)
    begin = max(range(0, 4000, 8), key=lambda at: abs(np.dot(samples[at : at + 16_000], tone)))
    assert best_correlation(samples[begin:], tone) > 0.9  # the delay of the encoder precedes it


def test_negative_control_correlation_detects_other_audio():
    tone = rising_tone(SECONDS, RATE)
    assert best_correlation(tone[::-1].copy(), tone) < 0.5 and best_correlation(0.1 * tone, tone) > 0.99


def test_shard_member_reads_the_same_as_the_file(folder, voice_message, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for path in (folder / "libopus_48k_mono.webm", voice_message):
            tar.add(path, path.name)
    with tarfile.open(tmp_path / "shard.tar") as tar:
        for member in tar.getmembers():
            place = {"byte_offset": member.offset_data, "byte_count": member.size}
            assert np.array_equal(read_samples(tmp_path / "shard.tar", **place), read_samples(folder / member.name))


def test_video_without_audio_and_text_files_are_rejected_with_reason(folder, tmp_path):
    import av

    with av.open(str(tmp_path / "silent.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(picture), *stream.encode(None)])
    (tmp_path / "text.m4a").write_text("नमस्कार\n" * 100)
    (tmp_path / "empty.m4a").write_bytes(b"")
    for name, message in (
        ("silent.mp4", "only video"),
        ("text.m4a", "Invalid data"),
        ("empty.m4a", "cannot be opened"),
    ):
        with pytest.raises(UnusableAudio, match=message):
            read_samples(tmp_path / name)


def test_wrong_duration_and_span_beyond_end_are_rejected(voice_message):
    assert len(read_samples(voice_message, seconds=SECONDS))
    for seconds in (2.0, 4.0):
        with pytest.raises(UnusableAudio, match=rf"it lasts .* s, not {seconds:.2f} s as in its row"):
            read_samples(voice_message, seconds=seconds)
    for start, seconds in ((2.5, 1.0), (9.0, 1.0)):
        with pytest.raises(UnusableAudio, match=r"it ends at 3\.0\d s"):
            read_samples(voice_message, start=start, seconds=seconds)


IN_OPEN = 0x20  # inotify(7)
PLAYLISTS = {
    "concat.m4a": "ffconcat version 1.0\nfile '{secret}'\n",
    "list.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{secret}\n#EXT-X-ENDLIST\n",
}


def opens_file(path: Path, read: Callable[[], object]) -> bool:
    """Return whether any process opens this file during the read, successful or not."""
    libc = ctypes.CDLL(None)
    events = libc.inotify_init1(os.O_NONBLOCK)
    try:
        assert libc.inotify_add_watch(events, str(path).encode(), IN_OPEN) >= 0
        with contextlib.suppress(Exception):
            read()
        return bool(os.read(events, 4096))
    except BlockingIOError:
        return False
    finally:
        os.close(events)


def decode_without_sandbox(path: Path) -> None:
    """Decode the first frame as the decoder process does, but without its limit on open files."""
    import av

    with pytest.MonkeyPatch.context() as patch, open(path, "rb") as file:
        patch.setattr(media_reader, "av", av, raising=False)  # the process imports it before it enters the sandbox
        media_reader.MediaDecoder(media_reader.FileSlice(file.fileno(), 0, path.stat().st_size)).close()


def decode_without_whitelists(path: Path) -> None:
    import av

    any_name = {"allowed_extensions": "ALL", "allowed_segment_extensions": "ALL", "extension_picky": "0"}
    options = {"protocol_whitelist": "file,crypto,data", "safe": "0", **any_name}
    with av.open(str(path), options=options) as container:
        next(container.decode(audio=0))


@pytest.mark.parametrize("name", PLAYLISTS)
def test_playlists_are_rejected_without_opening_their_files(name, tmp_path):
    secret = tmp_path / "secret.wav"
    soundfile.write(secret, rising_tone(1.0, RATE), RATE)
    playlist = tmp_path / name
    playlist.write_text(PLAYLISTS[name].format(secret=secret))
    with pytest.raises(UnusableAudio):
        read_samples(playlist)
    # The whitelists alone suffice, and FFmpeg without them opens the file.
    assert not opens_file(secret, lambda: decode_without_sandbox(playlist))
    assert opens_file(secret, lambda: decode_without_whitelists(playlist))


def test_description_of_a_network_stream_is_rejected(tmp_path):
    session = tmp_path / "session.mp4"
    session.write_text("v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n")
    with pytest.raises(UnusableAudio):
        read_samples(session)


def test_link_outside_allowed_roots_is_rejected(voice_message, tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.m4a").symlink_to(voice_message)
    with pytest.raises(UnusableAudio, match="points outside"):
        read_samples(tmp_path / "inside" / "a.m4a", roots=(str(tmp_path / "inside"),))


def test_decoder_process_has_file_memory_and_cpu_limits(voice_message):
    read_samples(voice_message)
    limits = Path(f"/proc/{READERS._idle[-1].process.pid}/limits").read_text()
    values = {line[:25].strip(): line[25:46].strip() for line in limits.splitlines()[1:]}
    assert (values["Max open files"], values["Max file size"], values["Max core file size"]) == ("5", "0", "0")
    assert int(values["Max address space"]) < 2**30 and int(values["Max cpu time"]) < 200
    inside = Path(f"/proc/{READERS._idle[-1].process.pid}/fd").iterdir()
    # The audio file is closed; a fifth descriptor is left for the next one.
    assert {path.name for path in inside} == {"0", "1", "2", "3"}


MAIN = 'if __name__ == "__main__":\n'
ENDLESS_LOOP = "while True: pass"
FAILURES = {
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed the decoder process .*SIGSEGV"),
    "hang": (ENDLESS_LOOP, "did not finish"),
    "out of memory": ("bytearray(2**32)", "more memory than a recording can need"),
    "opens a file": ("open('/etc/passwd')", "Too many open files"),
    "exits": ("sys.exit(0)", "exit code 0"),
}


OPENING = "    def __init__(self, window: FileSlice) -> None:\n"


@contextlib.contextmanager
def modified_program(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str, begin: str = OPENING) -> Iterator[None]:
    """Make the reader process run this line instead of opening a file, or after another line of its program.

    Its CPU limit is one second or, for a hang, less.
    """
    seconds = 0 if line == ENDLESS_LOOP else 1
    program = media_process.PROGRAM.read_text(encoding="utf-8").replace("MAX_SECONDS = 60", f"MAX_SECONDS = {seconds}")
    assert program.count(begin) == 1
    indent = "        " if begin == OPENING else "    "
    modified = folder / "media_reader.py"
    modified.write_text(program.replace(begin, f"{begin}{indent}{line}\n"), encoding="utf-8")
    monkeypatch.setattr(media_process, "PROGRAM", modified)
    monkeypatch.setattr(media_sound, "READERS", media_process.Readers())
    try:
        yield
    finally:
        for reader in media_sound.READERS._all:
            reader.close()
        monkeypatch.undo()


@pytest.mark.parametrize("name", FAILURES)
def test_decoder_process_failure_is_reported_with_reason(name, voice_message, monkeypatch, tmp_path):
    line, message = FAILURES[name]
    with modified_program(monkeypatch, tmp_path, line):
        reads = (read_samples, lambda path: list(read_blocks(AudioSource(str(path)), 1.0)))
        for read in reads[: 1 if line == ENDLESS_LOOP else 2]:  # each takes two CPU seconds
            with pytest.raises(UnusableAudio, match=message):
                read(voice_message)
    assert len(read_samples(voice_message))  # the next file is read normally


BEFORE_SANDBOX = "    channel = socket.socket(fileno=os.dup2(int(sys.argv[1]), 3))\n"
HARD_LIMITS = {
    "cpu": "resource.setrlimit(resource.RLIMIT_CPU, (50, 50))",
    "memory": "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 2**27; "
    "resource.setrlimit(resource.RLIMIT_AS, (used, used))",
}
# Root with CAP_SYS_RESOURCE may raise hard limits; capset(2), version 3.
DROP_CAPABILITIES = "import ctypes; ctypes.CDLL(None).capset(struct.pack('Ii', 0x20080522, 0), bytes(24))"


@pytest.mark.parametrize("name", HARD_LIMITS)
def test_lower_hard_limits_of_the_system_are_kept(name, voice_message, monkeypatch, tmp_path):
    whole = read_samples(voice_message)
    line = f"{HARD_LIMITS[name]}; {DROP_CAPABILITIES}"
    with modified_program(monkeypatch, tmp_path, line, BEFORE_SANDBOX):
        assert np.array_equal(read_samples(voice_message), whole)


# As with -I if PyAV is in the user's site or on PYTHONPATH.
WITHOUT_PYAV = "sys.path = [folder for folder in sys.path if not os.path.exists(os.path.join(folder, 'av'))]"


def test_pyav_outside_the_isolated_path_is_imported_from_the_folder_of_the_parent(voice_message, monkeypatch, tmp_path):
    whole = read_samples(voice_message)
    with modified_program(monkeypatch, tmp_path, WITHOUT_PYAV, MAIN):
        assert np.array_equal(read_samples(voice_message), whole)


def test_pyav_that_cannot_be_imported_is_reported_with_install_command(voice_message, monkeypatch, tmp_path):
    monkeypatch.setattr(media_process, "pyav_folder", lambda: "")
    with modified_program(monkeypatch, tmp_path, WITHOUT_PYAV, MAIN):
        for _ in range(2):  # the process that has exited is not reused
            with pytest.raises(
                UnusableAudio, match=r"PyAV cannot be imported \(No module named 'av'\).*pip install av"
            ):
                read_samples(voice_message)


def test_module_named_av_in_the_working_directory_is_not_imported(monkeypatch, tmp_path):
    (tmp_path / "av").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [""])
    monkeypatch.delitem(sys.modules, "av")  # find_spec would return the spec of the imported module
    assert not media_process.is_installed()  # a folder without __init__.py
    (tmp_path / "av" / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    importlib.invalidate_caches()
    assert media_process.is_installed() and media_process.pyav_folder() == ""


def test_decoder_killed_while_reading_is_replaced_with_equal_samples(voice_message):
    whole = read_samples(voice_message)
    blocks = read_blocks(AudioSource(str(voice_message)), 0.5)
    results = [next(blocks)]
    for reader in READERS._all - set(READERS._idle):
        os.kill(reader.process.pid, signal.SIGKILL)
    assert np.array_equal(np.concatenate([*results, *blocks]), whole)


def test_idle_decoders_that_are_killed_are_replaced(voice_message):
    whole, waiting = read_samples(voice_message), [READERS.take() for _ in range(3)]
    for reader in waiting:
        READERS.give_back(reader)
        os.kill(reader.process.pid, signal.SIGKILL)
    assert np.array_equal(read_samples(voice_message), whole)


def test_decoder_ignores_signals_and_threads_and_forks_use_their_own(voice_message):
    whole, results = read_samples(voice_message), []
    for reader in READERS._idle:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(reader.process.pid, number)
    idle = READERS._idle[-1].process.pid
    threads = [threading.Thread(target=lambda: results.append(read_samples(voice_message))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(np.array_equal(item, whole) for item in results)
    child = os.fork()
    if child == 0:
        same = np.array_equal(read_samples(voice_message), whole) and READERS._idle[-1].process.pid != idle
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(read_samples(voice_message), whole)


def test_decoder_process_ends_with_its_parent(voice_message):
    script = (
        "import os, sys\n"
        "from konkanivani.data.audio.files import AudioSource, read_blocks\n"
        "from konkanivani.data.audio.media import READERS\n"
        "blocks = read_blocks(AudioSource(sys.argv[1]), 0.1)\n"
        "next(blocks)\n"
        "print(*(reader.process.pid for reader in READERS._all), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = fork_server().run_program(script, str(voice_message))
    waited = threading.Event()
    for _ in range(3000):
        state = Path(f"/proc/{int(done.stdout)}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        waited.wait(0.1)
    pytest.fail("the decoder process outlives its parent")


def test_truncated_voice_message_is_read_to_its_end_with_warning(voice_message, folder, tmp_path):
    for name, whole in (("voice.webm", "libopus_48k_mono.webm"), ("lost.m4a", "alac_44k_stereo.m4a")):
        content = (folder / whole).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UnusableAudio, match="cannot be opened as audio"):
        read_samples(tmp_path / "lost.m4a")  # its index was at the end
    header = read_header(AudioSource(str(tmp_path / "voice.webm")))
    assert 1.0 < header.seconds < 2.0 and header.seconds + header.missing == pytest.approx(SECONDS, abs=0.1)
    with pytest.warns(ShortAudio, match="shorter than its header states"):
        assert sum(map(len, read_blocks(AudioSource(str(tmp_path / "voice.webm")), 0.5))) == header.frames
    with pytest.raises(UnusableAudio, match="not 3.00 s as in its row: it is .* shorter"):
        read_samples(tmp_path / "voice.webm", seconds=SECONDS)
