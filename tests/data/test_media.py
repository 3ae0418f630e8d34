"""Recordings of phones and messengers are read in a sandboxed process; unreadable ones are named."""

import contextlib
import os
import signal
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

pytest.importorskip("av", reason="the extra `media` is not installed: pip install av")

from konkanivani.data.audio import media as media_process
from konkanivani.data.audio import media as media_sound
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
from tests.media_files import ENCODED, KINDS, Kind, rising_tone, write_media
from tests.warm import warm_parent

SECONDS, RATE = 3.0, 16_000
M4A = Kind(".m4a", "aac", 44_100)


def read_samples(path: Path, **place: float) -> np.ndarray:
    return read_all(AudioSource(str(path), **place))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a rising tone in twenty kinds of files."""
    folder = tmp_path_factory.mktemp("phones")
    for kind in KINDS:
        write_media(folder / f"{kind.name}{kind.suffix}", rising_tone(SECONDS, RATE), RATE, kind)
    return folder


@pytest.fixture
def voice(folder: Path) -> Path:
    return folder / "aac_44k_stereo.m4a"


def likeness(heard: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest correlation for a shift of at most 0.1 s."""
    middle = heard[RATE // 5 : len(wanted) - RATE // 5].astype(np.float64)
    middle -= middle.mean()
    shifts = np.arange(RATE // 10, 3 * RATE // 10, 2)
    spectra = np.fft.rfft(wanted), np.fft.rfft(middle, len(wanted))
    products = np.fft.irfft(spectra[0] * spectra[1].conj(), len(wanted))[shifts]
    sums, squares = (np.cumsum(np.insert(part, 0, 0.0)) for part in (wanted, wanted.astype(np.float64) ** 2))
    inside, energy = (part[shifts + len(middle)] - part[shifts] for part in (sums, squares))
    return float((products / np.sqrt((energy - inside**2 / len(middle)) * (middle @ middle))).max())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}{kind.suffix}")
def test_a_file_is_read_whole_by_blocks_and_by_spans_to_the_same_samples(kind, folder):
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
        if path.suffix != ".ogg":  # libsndfile seeks there directly, and starts without history
            assert np.array_equal(span, whole[round(start * kind.rate) :][: len(span)])
    assert likeness(load_audio(AudioSource(str(path))).numpy(), rising_tone(SECONDS, RATE)) > 0.9


@pytest.mark.parametrize("name", ["he_aac.aac", "he_aac_v2.aac", "amr_wb.awb"])
def test_what_cannot_be_made_here_is_read_too(name):
    heard = load_audio(AudioSource(str(ENCODED / name))).numpy()
    assert read_header(AudioSource(str(ENCODED / name))).rate == (16_000 if name == "amr_wb.awb" else 32_000)
    tone = rising_tone(1.0, RATE)
    begin = max(range(0, 4000, 8), key=lambda at: abs(np.dot(heard[at : at + 16_000], tone)))
    assert likeness(heard[begin:], tone) > 0.9  # the delay of the encoder precedes it


def test_negative_control_likeness_tells_another_sound():
    tone = rising_tone(SECONDS, RATE)
    assert likeness(tone[::-1].copy(), tone) < 0.5 and likeness(0.1 * tone, tone) > 0.99


def test_a_member_of_a_shard_is_the_file(folder, voice, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for path in (folder / "libopus_48k_mono.webm", voice):
            tar.add(path, path.name)
    with tarfile.open(tmp_path / "shard.tar") as tar:
        for member in tar.getmembers():
            place = {"byte_offset": member.offset_data, "byte_count": member.size}
            assert np.array_equal(read_samples(tmp_path / "shard.tar", **place), read_samples(folder / member.name))


def test_a_film_without_sound_and_text_that_is_called_so_are_refused_with_the_reason(folder, tmp_path):
    import av

    with av.open(str(tmp_path / "silent.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(picture), *stream.encode(None)])
    (tmp_path / "text.m4a").write_text("नमस्कार\n" * 100)
    (tmp_path / "empty.m4a").write_bytes(b"")
    for name, said in (("silent.mp4", "only video"), ("text.m4a", "Invalid data"), ("empty.m4a", "cannot be opened")):
        with pytest.raises(UnusableAudio, match=said):
            read_samples(tmp_path / name)


def test_a_row_of_another_duration_and_a_span_beyond_the_end_are_refused(voice):
    assert len(read_samples(voice, seconds=SECONDS))
    for seconds in (2.0, 4.0):
        with pytest.raises(UnusableAudio, match=rf"it lasts .* s, not {seconds:.2f} s as in its row"):
            read_samples(voice, seconds=seconds)
    for start, seconds in ((2.5, 1.0), (9.0, 1.0)):
        with pytest.raises(UnusableAudio, match=r"it ends at 3\.0\d s"):
            read_samples(voice, start=start, seconds=seconds)


def test_a_playlist_opens_nothing(voice, tmp_path):
    secret = tmp_path / "secret.wav"
    soundfile.write(secret, rising_tone(1.0, RATE), RATE)
    files = {
        "concat.m4a": f"ffconcat version 1.0\nfile '{secret}'\n",
        "list.m4a": f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{secret}\n#EXT-X-ENDLIST\n",
        "list.ts": "#EXTM3U\n#EXTINF:5,\nhttp://127.0.0.1:1/a.ts\n",
        "session.mp4": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(UnusableAudio):
            read_samples(tmp_path / name)


def test_a_link_out_of_the_roots_is_not_followed(voice, tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.m4a").symlink_to(voice)
    with pytest.raises(UnusableAudio, match="points outside"):
        read_samples(tmp_path / "inside" / "a.m4a", roots=(str(tmp_path / "inside"),))


def test_the_process_may_open_no_file_write_none_and_grow_little(voice):
    read_samples(voice)
    limits = Path(f"/proc/{READERS._idle[-1].process.pid}/limits").read_text()
    found = {line[:25].strip(): line[25:46].strip() for line in limits.splitlines()[1:]}
    assert (found["Max open files"], found["Max file size"], found["Max core file size"]) == ("5", "0", "0")
    assert int(found["Max address space"]) < 2**30 and int(found["Max cpu time"]) < 200
    inside = Path(f"/proc/{READERS._idle[-1].process.pid}/fd").iterdir()
    # The file is closed; a fifth descriptor is left for the next one.
    assert {path.name for path in inside} == {"0", "1", "2", "3"}


HANGS = "while True: pass"
SPOILT = {
    "it crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed the decoder process .*SIGSEGV"),
    "it hangs": (HANGS, "did not finish"),
    "it takes all memory": ("bytearray(2**32)", "more memory than a recording can need"),
    "it opens a file": ("open('/etc/passwd')", "Too many open files"),
    "it ends": ("sys.exit(0)", "exit code 0"),
}


@contextlib.contextmanager
def spoilt_program(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str) -> Iterator[None]:
    """Make the reader process run this line instead of opening a file.

    Its CPU limit is one second or, for a hang, less.
    """
    seconds = 0 if line == HANGS else 1
    program = media_process.PROGRAM.read_text(encoding="utf-8").replace("MAX_SECONDS = 60", f"MAX_SECONDS = {seconds}")
    begin = "    def __init__(self, window: FileSlice) -> None:\n"
    assert begin in program
    spoilt = folder / "media_reader.py"
    spoilt.write_text(program.replace(begin, f"{begin}        {line}\n"), encoding="utf-8")
    monkeypatch.setattr(media_process, "PROGRAM", spoilt)
    monkeypatch.setattr(media_sound, "READERS", media_process.Readers())
    try:
        yield
    finally:
        for reader in media_sound.READERS._all:
            reader.close()
        monkeypatch.undo()


@pytest.mark.parametrize("name", SPOILT)
def test_whatever_becomes_of_ffmpeg_is_a_reason(name, voice, monkeypatch, tmp_path):
    line, said = SPOILT[name]
    with spoilt_program(monkeypatch, tmp_path, line):
        reads = (read_samples, lambda path: list(read_blocks(AudioSource(str(path)), 1.0)))
        for read in reads[: 1 if line == HANGS else 2]:  # each takes two CPU seconds
            with pytest.raises(UnusableAudio, match=said):
                read(voice)
    assert len(read_samples(voice))  # the next file is read normally


def test_a_process_that_is_killed_while_it_reads_is_replaced_and_the_samples_are_the_same(voice):
    whole = read_samples(voice)
    blocks = read_blocks(AudioSource(str(voice)), 0.5)
    found = [next(blocks)]
    for reader in READERS._all - set(READERS._idle):
        os.kill(reader.process.pid, signal.SIGKILL)
    assert np.array_equal(np.concatenate([*found, *blocks]), whole)


def test_processes_that_are_killed_while_they_wait_are_replaced(voice):
    whole, waiting = read_samples(voice), [READERS.take() for _ in range(3)]
    for reader in waiting:
        READERS.give_back(reader)
        os.kill(reader.process.pid, signal.SIGKILL)
    assert np.array_equal(read_samples(voice), whole)


def test_signals_to_the_group_do_not_reach_it_and_threads_and_forks_have_their_own(voice):
    whole, results = read_samples(voice), []
    for reader in READERS._idle:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(reader.process.pid, number)
    idle = READERS._idle[-1].process.pid
    threads = [threading.Thread(target=lambda: results.append(read_samples(voice))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(np.array_equal(found, whole) for found in results)
    child = os.fork()
    if child == 0:
        same = np.array_equal(read_samples(voice), whole) and READERS._idle[-1].process.pid != idle
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(read_samples(voice), whole)


def test_it_ends_with_the_process_that_it_belongs_to(voice):
    script = (
        "import os, sys\n"
        "from konkanivani.data.audio.files import AudioSource, read_blocks\n"
        "from konkanivani.data.audio.media import READERS\n"
        "blocks = read_blocks(AudioSource(sys.argv[1]), 0.1)\n"
        "next(blocks)\n"
        "print(*(reader.process.pid for reader in READERS._all), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = warm_parent().run_program(script, str(voice))
    waited = threading.Event()
    for _ in range(3000):
        state = Path(f"/proc/{int(done.stdout)}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        waited.wait(0.1)
    pytest.fail("it outlives it")


def test_a_cut_voice_message_is_read_as_far_as_it_goes_and_says_so(voice, folder, tmp_path):
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
