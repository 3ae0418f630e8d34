// Controls of the page: the microphone, files, and the state of the recognition.

import { KeptAudio, Microphone, PageError, decodeFile, level } from "./audio.js";
import { Stream } from "./connection.js";
import { Transcript } from "./transcript.js";

const FILE_BLOCK_SECONDS = 1;
const FILE_AHEAD_SECONDS = 5; // of a file that may wait on the server
const SILENT_BLOCKS = 30;

const page = {};
for (const element of document.querySelectorAll("[id]")) {
  page[element.id] = element;
}

const settings = { language: "", canSave: false };
let isBusy = false;
let stopCurrent = null; // ends the current recording; null if there is none

function showMessage(sentence) {
  page.message.textContent = sentence;
  page.message.hidden = !sentence;
}

function show(status, isActive) {
  isBusy = isActive;
  page.status.textContent = status;
  page.listen.textContent = isActive ? "Stop" : "Start listening";
  page.listen.classList.toggle("active", isActive);
  page.open.disabled = isActive;
}

function showLevel(value) {
  // From -60 dB to full scale.
  const share = Math.max(0, 1 + Math.log10(Math.max(value, 1e-6)) / 3);
  page.level.style.transform = `scaleX(${Math.min(1, share)})`;
}

// Returns the result of a promise, or null if the user presses Stop before it is there.
function unlessStopped(promise) {
  const stopped = new Promise((resolve) => {
    stopCurrent = () => resolve(null);
  });
  return Promise.race([promise, stopped]);
}

// Shows a recording, sends its blocks to the server, and shows the results.
class Recording {
  constructor(name, sampleRate) {
    this.audio = new KeptAudio(sampleRate);
    this.transcript = new Transcript(name, this.audio, settings, showMessage);
    page.hint.hidden = true;
    page.recordings.prepend(this.transcript.section);
    this.ended = new Promise((resolve) => {
      this.stream = new Stream(sampleRate, {
        ready: (message) => this.showReady(message),
        partial: (message) => this.transcript.showPartial(message),
        final: (message) => this.addFinal(message),
        progress: (message) => this.showProgress(message),
        ended: resolve,
      });
    });
  }

  showReady(message) {
    page.model.textContent = message.model;
    settings.language = message.language;
    settings.canSave = message.can_save;
  }

  addFinal(message) {
    this.transcript.addFinal(message);
    page.announcer.textContent = message.text;
  }

  showProgress(message) {
    if (message.delay !== null) {
      page.delay.textContent = `${message.delay.toFixed(2)} s`;
    }
    page.load.textContent = `${Math.round(100 * message.load)} %`;
    page.backlog.textContent = `${message.backlog.toFixed(1)} s`;
    this.progressed?.();
  }

  add(samples) {
    this.audio.add(samples);
    this.stream.send(samples);
  }

  // Waits until the server has decoded all but the last seconds.
  async hasCapacity() {
    while (!this.stream.isEnded && this.stream.seconds - this.stream.decoded > FILE_AHEAD_SECONDS) {
      await new Promise((resolve) => {
        this.progressed = resolve;
        this.ended.then(resolve);
      });
    }
  }
}

// Records until Stop; returns a sentence for the user, or "".
async function listen() {
  showMessage("");
  show("Opening the microphone …", true);
  let recording = null;
  // Only before the first sound: a noise gate delivers silence in each pause.
  let silent = 0;
  let isCancelled = false;
  const receive = (samples) => {
    if (isCancelled) {
      return;
    }
    const loudness = level(samples);
    if (loudness > 0 && silent >= SILENT_BLOCKS) {
      showMessage("");
    }
    silent = loudness > 0 ? -Infinity : silent + 1;
    if (silent === SILENT_BLOCKS) {
      showMessage("The microphone delivers only silence. Check that it is not muted.");
    }
    showLevel(loudness);
    recording?.add(samples);
  };
  let microphone = null;
  const stop = async () => {
    if (stopCurrent !== stop) {
      return; // stopped already
    }
    stopCurrent = null;
    show("Finishing …", true);
    await microphone.stop();
    recording.stream.finish();
  };
  const opening = Microphone.open(receive, () => {
    showMessage("The microphone was disconnected. The text up to here is kept.");
    stop();
  });
  microphone = await unlessStopped(opening);
  if (microphone === null) {
    isCancelled = true;
    // The browser may still open it, when the user answers its question.
    opening.then((late) => late.close()).catch(() => {});
    return "";
  }
  const time = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  recording = new Recording(`Microphone ${time}`, microphone.sampleRate);
  show("Listening", true);
  stopCurrent = stop;
  const sentence = await recording.ended;
  microphone.close();
  return finish(recording, sentence);
}

// Transcribes a file; returns a sentence for the user, or "", or null after Stop.
async function transcribe(file) {
  show(`Decoding ${file.name}`, true);
  const decoded = await unlessStopped(decodeFile(file));
  if (decoded === null) {
    return null;
  }
  const { samples, sampleRate } = decoded;
  const recording = new Recording(file.name, sampleRate);
  let isStopped = false;
  stopCurrent = () => {
    isStopped = true;
    recording.stream.end("");
  };
  show(`Transcribing ${file.name}`, true);
  const size = FILE_BLOCK_SECONDS * sampleRate;
  for (let first = 0; first < samples.length && !isStopped; first += size) {
    await recording.hasCapacity();
    recording.add(samples.slice(first, first + size));
  }
  recording.stream.finish();
  const sentence = finish(recording, await recording.ended, isStopped);
  if (isStopped) {
    return null;
  }
  return sentence && `${file.name}: ${sentence}`;
}

// Returns a sentence for the user, or "".
function finish(recording, sentence, isStopped = false) {
  if (sentence || isStopped) {
    recording.transcript.keepPartial(recording.stream.decoded);
  }
  recording.transcript.showPartial({ fixed: "", tentative: "" });
  if (sentence || recording.transcript.lines.length) {
    return sentence;
  }
  return "No speech was recognised.";
}

// Runs one recording after the other, and shows their sentences and errors.
async function run(tasks) {
  const sentences = [];
  for (const task of tasks) {
    try {
      const sentence = await task();
      if (sentence === null) {
        break;
      }
      sentences.push(...(sentence ? [sentence] : []));
    } catch (error) {
      sentences.push(error instanceof PageError ? error.message : `The page failed: ${error.message}. Reload it.`);
    }
  }
  stopCurrent = null;
  showLevel(0);
  show("Ready", false);
  if (sentences.length) {
    showMessage(sentences.join(" "));
  }
}

function hasFiles(event) {
  return event.dataTransfer.types.includes("Files");
}

function transcribeFiles(files) {
  if (isBusy) {
    showMessage("Stop the current recording first.");
  } else if (files.length) {
    showMessage("");
    run(Array.from(files, (file) => () => transcribe(file)));
  }
}

page.listen.onclick = () => {
  if (isBusy) {
    stopCurrent?.();
  } else {
    run([listen]);
  }
};
page.open.onclick = () => page.files.click();
page.files.onchange = () => {
  transcribeFiles(page.files.files);
  // Otherwise choosing the same file again would not be a change.
  page.files.value = "";
};
page.times.onchange = () => document.body.classList.toggle("times", page.times.checked);
document.ondragover = (event) => {
  // Text is dragged as in any page.
  if (!hasFiles(event)) {
    return;
  }
  event.preventDefault();
  document.body.classList.add("dropping");
};
document.ondragleave = (event) => {
  if (event.relatedTarget === null) {
    document.body.classList.remove("dropping");
  }
};
document.ondrop = (event) => {
  if (!hasFiles(event)) {
    return;
  }
  event.preventDefault();
  document.body.classList.remove("dropping");
  transcribeFiles(event.dataTransfer.files);
};
