"""The page in headless Chromium, with a microphone that plays a file."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.data.manifest import read_manifest
from konkanivani.inference.listener import Final, Partial
from konkanivani.serve.corrections import MANIFEST, Corrections
from konkanivani.serve.server import PageServer
from konkanivani.serve.session import Limits
from tests.media_files import Kind, write_media
from tests.serve.browser import Browser, chromium
from tests.serve.parts import ToneListener, running_server, tones

RATE = 48_000
LINES = [["उदक", "घर"], ["बाजार", "आवय", "उदक"]]


class SlowToneListener(ToneListener):
    """Recogniser that takes a third of the duration."""

    def accept(self, samples: np.ndarray) -> list[Partial | Final]:
        time.sleep(len(samples) / RATE / 3)
        return super().accept(samples)


TEXTS = [" ".join(words) for words in LINES]
SPEECH = tones(LINES, RATE, start=0.5)
IS_READY = "document.querySelector('#status').innerText === 'Ready'"
SHOWN_LINES = "[...document.querySelectorAll('.line .text')].map((line) => line.innerText)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    soundfile.write(folder / "speech.wav", SPEECH, RATE)
    with chromium(f"--use-file-for-fake-audio-capture={folder / 'speech.wav'}%noloop") as browser:
        yield browser


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    with running_server(corrections=Corrections(folder / "corrections"), limits=Limits(sessions=1)) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Browser]:
    browser.open(server.address)
    browser.problems.clear()
    yield browser
    assert browser.problems == [] and browser.hosts == {"127.0.0.1"}


def test_words_appear_during_recording(page):
    # Keyboard only: the first Tab focuses the button.
    page.press("Tab", 9)
    assert page.evaluate("document.activeElement.id") == "listen"
    page.press("Enter", 13, "\r")
    started = time.monotonic()
    page.wait("document.querySelector('.tentative')?.innerText")
    assert time.monotonic() - started < len(SPEECH) / RATE
    fixed, tentative = (
        json.loads(page.evaluate(f"JSON.stringify(getComputedStyle(document.querySelector('.{kind}')))"))
        for kind in ("fixed", "tentative")
    )
    assert fixed["color"] != tentative["color"] and fixed["fontStyle"] != tentative["fontStyle"]
    page.wait(f"{SHOWN_LINES}.length === 1")
    assert time.monotonic() - started < len(SPEECH) / RATE
    page.wait(f"{SHOWN_LINES}.length === 2")
    assert page.evaluate(SHOWN_LINES) == TEXTS
    assert page.text("#announcer") == TEXTS[-1]
    assert page.text("#model") == "tones.pt"
    assert all(any(c.isdigit() for c in page.text(f"#{name}")) for name in ("delay", "load", "backlog"))
    page.press("Enter", 13, "\r")
    page.wait(IS_READY)
    assert page.evaluate("document.querySelector('.partial').hidden") is True
    # The only session of the server is free again.
    page.click("#listen")
    page.wait("document.querySelector('.recording:nth-child(1) .tentative').innerText")
    page.click("#listen")
    page.wait(IS_READY)
    assert page.evaluate("document.querySelectorAll('.recording').length") == 2


@pytest.fixture
def transcribed(page: Browser, folder: Path) -> Browser:
    """Transcribe a file and return the page."""
    page.choose_files(folder / "speech.wav")
    page.wait(f"{SHOWN_LINES}.length === 2")
    page.wait(IS_READY)
    return page


def test_corrected_line_is_saved_with_audio(transcribed, folder):
    transcribed.click(".line:nth-child(2) .edit")
    assert transcribed.evaluate("document.activeElement.value") == TEXTS[1]
    assert not (folder / "corrections").exists()
    transcribed.evaluate("document.activeElement.value = 'बाजार नवो उदक'")
    transcribed.press("Enter", 13)
    assert transcribed.evaluate("document.activeElement.tagName") == "TEXTAREA"
    transcribed.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, modifiers=2)
    transcribed.wait("document.querySelector('.note')?.innerText")
    assert transcribed.text(".note") == "Saved; 1 line in the folder of corrections."
    (row,) = read_manifest(folder / "corrections" / MANIFEST)
    assert row.text == "बाजार नवो उदक"
    samples, rate = soundfile.read(row.audio_path)
    # From 0.2 s before the first word to 0.2 s after the last.
    words = [SPEECH[round(2.6 * RATE) - RATE // 5 :][: round(2.4 * RATE)]]
    assert len(samples) / rate == pytest.approx(len(words[0]) / RATE, abs=0.15)
    assert np.square(samples).mean() == pytest.approx(np.square(words[0]).mean(), rel=0.1)
    # An emptied line is removed from the folder.
    transcribed.click(".line:nth-child(2) .edit")
    transcribed.evaluate("document.activeElement.value = ' '")
    transcribed.click(".line .primary")
    transcribed.wait("document.querySelector('.note')?.innerText.startsWith('Removed; 0 lines')")
    assert (folder / "corrections" / MANIFEST).read_text() == ""
    # A cancelled edit changes nothing.
    transcribed.click(".edit")
    transcribed.evaluate("document.activeElement.value = 'x'")
    transcribed.press("Escape", 27)
    assert transcribed.evaluate(SHOWN_LINES)[0] == TEXTS[0]
    assert transcribed.evaluate("document.activeElement.className") == "edit"


def test_transcripts_are_downloaded_in_four_formats(transcribed, tmp_path):
    transcribed.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for suffix in ("txt", "srt", "vtt", "json"):
        buttons = "[...document.querySelectorAll('.downloads button')]"
        transcribed.evaluate(f"{buttons}.find((button) => button.innerText === '{suffix.upper()}').click()")
        deadline = time.monotonic() + 10
        while not (tmp_path / f"speech.wav.{suffix}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    contents = {path.suffix: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert contents[".txt"] == "".join(f"{text}\n" for text in TEXTS)
    assert contents[".srt"].startswith("1\n00:00:00,5") and contents[".vtt"].startswith("WEBVTT\n\n00:00:00.5")
    assert [len(segment["words"]) for segment in json.loads(contents[".json"])["segments"]] == [2, 3]


def test_word_times_are_shown_on_request(transcribed):
    after = "getComputedStyle(document.querySelector('.word'), '::after').content"
    assert transcribed.evaluate(after) == "none"
    transcribed.click("#times")
    assert float(transcribed.evaluate(after).strip('"')) == pytest.approx(0.5, abs=0.06)
    assert "97 % sure" in transcribed.evaluate("document.querySelector('.word').title")
    assert transcribed.text(".uncertain") == "बाजार"


def test_page_scrolls_to_newest_line_unless_user_scrolled_up(page, tmp_path):
    soundfile.write(tmp_path / "long.wav", tones([["घर"]] * 20), 16_000)
    page.choose_files(tmp_path / "long.wav")
    page.wait(f"{SHOWN_LINES}.length === 20")
    page.wait(IS_READY)
    below = "document.querySelector('.line:last-child').getBoundingClientRect().bottom - innerHeight"
    assert page.evaluate(below) <= 0 < page.evaluate("scrollY")
    # Negative control: a user at the top of a page that is longer than the window is not scrolled down.
    page.evaluate("scrollTo(0, 0)")
    page.evaluate(
        "document.querySelector('#hint').style.height = '3000px'; document.querySelector('#hint').hidden = false"
    )
    page.evaluate("document.querySelector('#recordings').prepend(document.querySelector('#hint'))")
    page.evaluate("window.scrolls = 0; addEventListener('scroll', () => { scrolls += 1; })")
    page.evaluate("document.querySelector('#recordings').prepend = function (...all) { this.append(...all); }")
    page.choose_files(tmp_path / "long.wav")
    page.wait(f"{SHOWN_LINES}.length === 40")
    assert page.evaluate("scrollY") == 0


def test_files_are_transcribed_in_turn_and_invalid_ones_reported(page, tmp_path):
    soundfile.write(tmp_path / "one.flac", tones([["शाळा"]], 44_100), 44_100)
    stereo = np.stack([tones([["घर"]], 8_000)] * 2, axis=1)
    soundfile.write(tmp_path / "two.ogg", stereo, 8_000)
    (tmp_path / "text.wav").write_text("no audio")
    (tmp_path / "empty.mp3").write_bytes(b"")
    soundfile.write(tmp_path / "silent <b>.wav", np.zeros(16_000), 16_000)
    page.choose_files(*(tmp_path / name for name in ("text.wav", "one.flac", "empty.mp3", "silent <b>.wav", "two.ogg")))
    page.wait(f"{SHOWN_LINES}.length === 2")
    page.wait(IS_READY)
    assert sorted(page.evaluate(SHOWN_LINES)) == ["घर", "शाळा"]
    message = page.text("#message")
    assert "text.wav is not audio" in message and "empty.mp3 is not audio" in message
    assert "silent <b>.wav: No speech was recognised." in message
    headings = page.evaluate("[...document.querySelectorAll('h2')].map((heading) => heading.innerText)")
    assert headings == ["two.ogg", "silent <b>.wav", "one.flac"]
    assert page.evaluate("document.querySelectorAll('main b').length") == 0


def test_compressed_files_are_decoded_by_browser_or_reported(page, tmp_path):
    waveform = tones([["शाळा"]], RATE)
    soundfile.write(tmp_path / "one.mp3", waveform, RATE)
    write_media(tmp_path / "two.webm", waveform, RATE, Kind(".webm", "libopus", RATE))
    write_media(tmp_path / "three.m4a", waveform, RATE, Kind(".m4a", "aac", RATE))
    # Chromium without licensed codecs cannot decode AAC: then the page reports the file.
    has_aac = page.evaluate("document.createElement('audio').canPlayType('audio/mp4; codecs=\"mp4a.40.2\"') !== ''")
    page.choose_files(*(tmp_path / name for name in ("three.m4a", "one.mp3", "two.webm")))
    page.wait(f"{SHOWN_LINES}.length === {3 if has_aac else 2}")
    page.wait(IS_READY)
    assert set(page.evaluate(SHOWN_LINES)) == {"शाळा"}
    assert ("three.m4a is not audio" in page.text("#message")) != has_aac


def test_dropped_file_is_transcribed(page, folder):
    audio = (folder / "speech.wav").read_bytes()
    page.evaluate(f"""(() => {{
        const text = atob({json.dumps(base64.b64encode(audio).decode())});
        const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], "dropped.wav"));
        const options = {{ dataTransfer: transfer, bubbles: true, cancelable: true }};
        document.body.dispatchEvent(new DragEvent("drop", options));
    }})()""")
    page.wait(f"{SHOWN_LINES}.length === 2")
    assert page.evaluate(SHOWN_LINES) == TEXTS


# Stop 60 ms after a block, when more than half of the next one is filled.
STOP_WITHIN_A_BLOCK = """(async () => {
    const { Microphone } = await import("./audio.js");
    const blocks = [];
    let received = () => {};
    const microphone = await Microphone.open((samples) => { blocks.push(samples.length); received(); }, () => {});
    while (blocks.length < 3) { await new Promise((resolve) => { received = resolve; }); }
    received = () => {};
    const counted = blocks.length;
    await new Promise((resolve) => setTimeout(resolve, 60));
    await microphone.stop();
    return [microphone.sampleRate, ...blocks.slice(counted)];
})()"""


def test_last_partial_audio_block_is_sent(page):
    rate, *rest = page.evaluate(STOP_WITHIN_A_BLOCK)
    assert sum(rest) / rate == pytest.approx(0.06, abs=0.05) and sum(rest) % (rate // 10)


KEEP_STREAM = """(() => {
    const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (constraints) => window.opened = await open(constraints);
})()"""
FAIL_TO_OPEN = "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', '%s'); }"


def test_text_is_kept_after_microphone_is_disconnected(page):
    page.evaluate(KEEP_STREAM)
    page.click("#listen")
    page.wait(f"{SHOWN_LINES}.length === 1")
    page.evaluate("opened.getAudioTracks()[0].dispatchEvent(new Event('ended'))")
    page.wait(IS_READY)
    assert "microphone was disconnected" in page.text("#message")
    assert page.evaluate(SHOWN_LINES)[0] == TEXTS[0]
    assert page.evaluate("opened.getAudioTracks()[0].readyState") == "ended"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NotAllowedError", "does not allow the microphone"),
        ("NotFoundError", "No microphone was found"),
        ("NotReadableError", "used by another program"),
    ],
)
def test_microphone_error_is_reported(page, name, message):
    page.evaluate(FAIL_TO_OPEN % name)
    page.click("#listen")
    page.wait(f"document.querySelector('#message').innerText.includes({json.dumps(message)})")
    assert page.text("#listen") == "Start listening"


MUTED_AT_FIRST = """(() => {
    const context = new AudioContext();
    const microphone = context.createMediaStreamDestination();
    window.volume = context.createGain();
    volume.gain.value = 0;
    const tone = context.createOscillator();
    tone.connect(volume).connect(microphone);
    tone.start();
    navigator.mediaDevices.getUserMedia = async () => microphone.stream;
})()"""


def test_muted_microphone_is_reported_until_signal_arrives(page):
    page.evaluate(MUTED_AT_FIRST)
    page.click("#listen")
    page.wait("document.querySelector('#message').innerText.includes('only silence')")
    page.evaluate("volume.gain.value = 0.1")
    page.wait("document.querySelector('#message').hidden")
    # Silence after a signal, as of a microphone with a noise gate, is not reported.
    page.evaluate("volume.gain.value = 0")
    time.sleep(3.5)
    assert page.evaluate("document.querySelector('#message').hidden") is True
    page.click("#listen")
    page.wait(IS_READY)


SENT_SAMPLES = """(() => {
    window.sent = [];
    const send = WebSocket.prototype.send;
    WebSocket.prototype.send = function (data) {
        sent.push(typeof data === "string" ? JSON.parse(data).type : data.length);
        send.call(this, data);
    };
})()"""
STOP_BETWEEN_BLOCKS = """(async () => {
    const before = sent.length;
    while (sent.length === before) { await new Promise((resolve) => setTimeout(resolve, 1)); }
    await new Promise((resolve) => setTimeout(resolve, 60));
    for (let click = 0; click < 2; click += 1) { document.querySelector("#listen").click(); }
})()"""


def test_stop_button_sends_last_partial_block(page):
    page.evaluate(SENT_SAMPLES)
    page.click("#listen")
    page.wait("document.querySelector('#status').innerText === 'Listening' && sent.length > 2")
    page.evaluate(STOP_BETWEEN_BLOCKS)
    page.wait(IS_READY)
    start, whole, *blocks, rest, finish = page.evaluate("sent")
    assert (start, finish) == ("start", "finish") and set(blocks) == {whole} and 0 < rest < whole


ASK_FOR_EVER = """(() => {
    const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = (constraints) => new Promise((resolve) => {
        window.allow = async () => resolve(window.opened = await open(constraints));
    });
})()"""


def test_stop_while_the_browser_asks_for_the_microphone(page):
    page.evaluate(ASK_FOR_EVER)
    page.click("#listen")
    page.wait("typeof allow === 'function'")
    page.click("#listen")
    page.wait(IS_READY)
    page.evaluate("allow()")
    page.wait("opened.getAudioTracks()[0].readyState === 'ended'")
    assert page.text("#status") == "Ready"
    assert page.evaluate("document.querySelectorAll('.recording').length") == 0


def test_stop_while_a_file_is_decoded(page, folder):
    page.evaluate("OfflineAudioContext.prototype.decodeAudioData = () => new Promise(() => {})")
    page.choose_files(folder / "speech.wav")
    page.wait("document.querySelector('#status').innerText.startsWith('Decoding')")
    page.click("#listen")
    page.wait(IS_READY)
    assert page.evaluate("document.querySelectorAll('.recording').length") == 0


def test_microphone_is_closed_if_the_server_is_lost_while_it_opens(browser):
    with running_server() as stopping:
        browser.open(stopping.address)
        browser.evaluate(KEEP_STREAM)
    browser.click("#listen")
    browser.wait(IS_READY)
    assert "connection to the server was lost" in browser.text("#message")
    assert browser.evaluate("opened.getAudioTracks()[0].readyState") == "ended"


COMPOSITION = "new KeyboardEvent('keydown', {key: 'Escape', isComposing: true, bubbles: true})"
DISABLED = "[...document.querySelectorAll('.form textarea, .form button')].map((control) => control.disabled)"


def test_form_is_disabled_while_it_is_saved(browser, folder, tmp_path):
    with running_server(corrections=Corrections(tmp_path)) as server:
        browser.open(server.address)
        browser.choose_files(folder / "speech.wav")
        browser.wait(f"{SHOWN_LINES}.length === 2")
        browser.wait(IS_READY)
        browser.click(".line:nth-child(1) .edit")
        # The Escape key of an input method does not close the form.
        browser.evaluate(f"document.querySelector('textarea').dispatchEvent({COMPOSITION})")
        assert browser.evaluate(DISABLED) == [False] * 3
        with server._saving:
            browser.click(".primary:not(#listen)")
            assert browser.evaluate(DISABLED) == [True] * 3
            browser.click(".line:nth-child(2) .edit")
        browser.wait("document.querySelector('.note')?.innerText.startsWith('Saved; 1 line')")
        # The focus stays in the other line.
        assert browser.evaluate("document.activeElement.value") == TEXTS[1]


DRAG = """(() => {
    const transfer = new DataTransfer();
    transfer.items.add(%s);
    const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
    const events = ["dragover", "drop"].map((name) => new DragEvent(name, options));
    return events.map((event) => !document.body.dispatchEvent(event));
})()"""


def test_only_dragged_files_are_handled(page):
    assert page.evaluate(DRAG % "'some text', 'text/plain'") == [False, False]
    assert page.evaluate("document.body.className") == ""
    assert page.evaluate(DRAG % "new File(['x'], 'x.wav')") == [True, True]  # negative control
    page.wait("document.querySelector('#message').innerText.includes('x.wav is not audio')")


KEEP_MUCH = """(async () => {
    const { KEPT_BYTES, KeptAudio } = await import("./audio.js");
    const block = new Float32Array(KEPT_BYTES / 16);  // an eighth of the limit, as 16-bit integers
    const seconds = block.length / 16000;
    const [one, two] = [new KeptAudio(16000), new KeptAudio(16000)];
    for (let number = 0; number < 4; number += 1) { one.add(block); }
    for (let number = 0; number < 5; number += 1) { two.add(block); }
    const isKept = (audio, number) => audio.slice(number * seconds, number * seconds + 1) !== null;
    const before = [isKept(one, 0), isKept(one, 1), isKept(two, 0)];
    for (let number = 0; number < 4; number += 1) { two.add(block); }
    return [before, [isKept(one, 3), isKept(two, 0), isKept(two, 1)]];
})()"""


def test_oldest_audio_of_all_recordings_is_dropped_first(page):
    assert page.evaluate(KEEP_MUCH) == [[False, True, True], [False, False, True]]


LONG_TRANSCRIPT = """(async () => {
    const { renderTranscript } = await import("./connection.js");
    const word = { text: "शब्दांनी", start: 12345.123456789, end: 12345.623456789, confidence: 0.9123456789 };
    const words = Array(80).fill(word);
    const segments = Array(250).fill({ text: words.map((each) => each.text).join(" "), words });
    return (await renderTranscript("txt", "segment", "long", segments)).split("\\n").length;
})()"""


def test_long_transcript_is_sent_in_messages_below_the_limit(page):
    assert page.evaluate(LONG_TRANSCRIPT) == 251


def test_lost_server_connection_is_reported(browser):
    with running_server() as stopping:
        browser.open(stopping.address)
        browser.click("#listen")
        browser.wait("document.querySelector('#status').innerText === 'Listening'")
        browser.wait("document.querySelector('#delay').innerText !== '–'")
    browser.wait(IS_READY)
    assert "connection to the server was lost" in browser.text("#message")


NOTE = "document.querySelector('.line:last-child .note')?.innerText ?? ''"
FOUR_FIXED = "document.querySelector('.fixed')?.innerText.split(' ').length > 3"
LONG_LINE = tones([["उदक", "घर"] * 8], RATE)


def test_words_without_final_text_are_kept_if_the_server_is_lost(browser, tmp_path):
    soundfile.write(tmp_path / "long.wav", LONG_LINE, RATE)
    with running_server(SlowToneListener) as stopping:
        browser.open(stopping.address)
        browser.choose_files(tmp_path / "long.wav")
        browser.wait(FOUR_FIXED)
    browser.wait(IS_READY)
    assert browser.evaluate(SHOWN_LINES)[0].startswith("उदक घर उदक घर")
    assert "cut off" in browser.evaluate(NOTE)
    assert "long.wav: The connection to the server was lost" in browser.text("#message")


def test_words_without_final_text_are_kept_after_stop(browser, tmp_path):
    soundfile.write(tmp_path / "long.wav", LONG_LINE, RATE)
    with running_server(SlowToneListener) as server:
        browser.open(server.address)
        browser.choose_files(tmp_path / "long.wav")
        browser.wait(FOUR_FIXED)
        browser.click("#listen")
        browser.wait(IS_READY)
        assert browser.evaluate(SHOWN_LINES)[0].startswith("उदक घर उदक घर")
        assert "cut off" in browser.evaluate(NOTE) and browser.text("#message") == ""
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        browser.evaluate("document.querySelector('.downloads button').click()")
        deadline = time.monotonic() + 10
        while not (path := tmp_path / "long.wav.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert path.read_text(encoding="utf-8").startswith("उदक घर उदक घर")


MARGINS = """(async () => {
    const { Transcript } = await import("./transcript.js");
    const { KeptAudio } = await import("./audio.js");
    const audio = new KeptAudio(1000);
    audio.add(new Float32Array(9000));
    const transcript = new Transcript("", audio, { language: "", canSave: false }, () => {});
    const add = (start, end) => transcript.addFinal({ text: "x", words: [], start, end });
    add(0.1, 2.0);
    add(2.04, 3.0);
    transcript.showPartial({ fixed: "x", tentative: "", start: 3.1 });
    const lengths = () => transcript.lines.map((line) => line.samples().length);
    const before = lengths();
    transcript.showPartial({ fixed: "", tentative: "" });
    return [...before, ...lengths()];
})()"""


def test_audio_of_a_line_leaves_out_its_neighbours(page):
    # 0.1 s at the start of the recording; half of 0.04 s between the lines; half of 0.1 s, then 0.2 s at the end.
    assert page.evaluate(MARGINS) == [2020, 1030, 2020, 1180]


def test_exceeded_session_limit_is_reported(browser):
    with running_server(limits=Limits(sessions=0)) as full:
        browser.open(full.address)
        browser.click("#listen")
        browser.wait("document.querySelector('#message').innerText.includes('All 0 sessions are in use')")
        browser.wait(IS_READY)


CONTRAST = """(() => {
    const channels = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((value) => {
        const share = value / 255;
        return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    const luminance = (color) => { const [r, g, b] = channels(color); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ground = (node) => {
        const color = getComputedStyle(node).backgroundColor;
        return color === "rgba(0, 0, 0, 0)" ? ground(node.parentElement) : color;
    };
    document.querySelector(".partial").hidden = false;
    return ["h1", "#listen", "#open", "#status", "h2", ".text", ".time", ".edit", ".tentative"].map((selector) => {
        const node = document.querySelector(selector);
        const pair = [luminance(getComputedStyle(node).color), luminance(ground(node))].sort((a, b) => b - a);
        return [selector, (pair[0] + 0.05) / (pair[1] + 0.05)];
    });
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes_and_on_a_phone(transcribed, scheme):
    transcribed.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    transcribed.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    time.sleep(0.2)
    # WCAG 2.2, success criterion 1.4.3: 4.5 to 1.
    assert [pair for pair in transcribed.evaluate(CONTRAST) if pair[1] < 4.5] == []
    ground = transcribed.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 22, 26)") is (scheme == "dark")
    assert transcribed.evaluate("document.documentElement.scrollWidth") <= 360
    # WCAG 2.2, success criterion 2.5.8: touch targets of at least 24 pixels.
    small = "[...document.querySelectorAll('button')].filter((b) => b.offsetParent && b.offsetHeight < 24).length"
    assert transcribed.evaluate(small) == 0
    transcribed.call("Emulation.clearDeviceMetricsOverride")
