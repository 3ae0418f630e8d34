// A recording on the page: its lines, which can be played, edited, saved and downloaded.

import { play } from "./audio.js";
import { removeCorrection, renderTranscript, saveCorrection } from "./connection.js";

const UNCERTAIN = 0.5; // confidence below which a word is marked
const MARGIN = 0.2; // seconds of audio kept around a line, at most half the gap to its neighbour
const UNFINISHED = "The recording was cut off here: this text is not final.";
const MEDIA_TYPES = { txt: "text/plain", srt: "application/x-subrip", vtt: "text/vtt", json: "application/json" };

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  // Never HTML: the text comes from a recogniser, or from a file name.
  made.textContent = text ?? "";
  return made;
}

function button(className, text, action) {
  const made = element("button", className, text);
  made.type = "button";
  made.onclick = action;
  return made;
}

function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

function inFolder(rows) {
  return `${rows} ${rows === 1 ? "line" : "lines"} in the folder of corrections.`;
}

function randomKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// `showMessage` shows a sentence; `settings` has the language of the transcripts and whether corrections can be saved.
export class Transcript {
  constructor(name, audio, settings, showMessage) {
    this.name = name;
    this.audio = audio;
    this.settings = settings;
    this.showMessage = showMessage;
    this.key = randomKey();
    this.lines = [];
    this.partialStart = null; // seconds
    this.section = element("section", "recording");
    this.list = element("ol", "lines");
    this.fixed = element("span", "fixed");
    this.tentative = element("span", "tentative");
    this.partial = element("p", "partial text");
    this.partial.append(this.fixed, " ", this.tentative);
    this.partial.hidden = true;
    const heading = element("h2", "", name);
    heading.id = `recording-${this.key}`;
    this.section.setAttribute("aria-labelledby", heading.id);
    const top = element("div", "heading");
    top.append(heading, this.downloads());
    this.section.append(top, this.list, this.partial);
  }

  downloads() {
    const group = element("div", "downloads");
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", `Download ${this.name}`);
    for (const format of ["txt", "srt", "vtt", "json"]) {
      group.append(button("", format.toUpperCase(), () => this.download(format)));
    }
    group.hidden = true;
    this.downloadGroup = group;
    return group;
  }

  showPartial(message) {
    const keepsUp = this.isEndVisible();
    this.fixed.textContent = message.fixed;
    this.tentative.textContent = message.tentative;
    this.partial.hidden = !(message.fixed || message.tentative);
    this.partialStart = this.partial.hidden ? null : message.start;
    this.partial.lang = this.settings.language;
    this.follow(keepsUp);
  }

  // The reader has not scrolled away from the newest text.
  isEndVisible() {
    return this.section.getBoundingClientRect().bottom < window.innerHeight + 40;
  }

  follow(keepsUp) {
    const hidden = this.section.getBoundingClientRect().bottom + 24 - window.innerHeight;
    if (keepsUp && hidden > 0) {
      window.scrollBy(0, hidden);
    }
  }

  addFinal(message) {
    this.showPartial({ fixed: "", tentative: "" });
    if (!message.text) {
      return;
    }
    const keepsUp = this.isEndVisible();
    const line = new Line(this, this.lines.length, message);
    this.lines.push(line);
    this.list.append(line.item);
    this.downloadGroup.hidden = false;
    this.follow(keepsUp);
  }

  // Makes a line of the words so far, up to `end` in seconds, if their final text does not come.
  keepPartial(end) {
    if (this.partial.hidden) {
      return;
    }
    const text = `${this.fixed.textContent} ${this.tentative.textContent}`.trim();
    const start = this.partialStart;
    // One empty word, as the times of the single words are not known.
    const words = [{ text: "", start, end: Math.max(start, end), confidence: null }];
    this.addFinal({ text, words, start, end: words[0].end });
    const line = this.lines[this.lines.length - 1];
    line.note = UNFINISHED;
    line.show();
  }

  // Seconds of audio to keep before and after a line; if speech was divided, its neighbour follows at once.
  margins(line) {
    const before = this.lines[line.number - 1]?.end ?? -Infinity;
    const after = this.lines[line.number + 1]?.start ?? this.partialStart ?? Infinity;
    return [line.start - before, after - line.end].map((gap) => Math.max(0, Math.min(MARGIN, gap / 2)));
  }

  async download(format) {
    const timestamps = format === "json" ? "word" : "segment";
    const segments = this.lines.map((line) => ({ text: line.text, words: line.words }));
    try {
      const text = await renderTranscript(format, timestamps, this.name, segments);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: MEDIA_TYPES[format] }));
      link.download = `${this.name.replace(/[\\/:]/g, ".")}.${format}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    } catch (error) {
      this.showMessage(error.message);
    }
  }
}

class Line {
  constructor(transcript, number, final) {
    this.transcript = transcript;
    this.number = number;
    this.text = final.text;
    this.words = final.words;
    this.start = final.start;
    this.end = final.end;
    this.item = element("li", "line");
    this.note = "";
    this.isSaved = false;
    this.show();
  }

  samples() {
    const [before, after] = this.transcript.margins(this);
    return this.transcript.audio.slice(Math.max(0, this.start - before), this.end + after);
  }

  show() {
    const time = button("time", clock(this.start), () => this.play());
    time.setAttribute("aria-label", `Play from ${clock(this.start)}`);
    const text = element("div", "text");
    text.lang = this.transcript.settings.language;
    const isEdited = this.text !== this.words.map((word) => word.text).join(" ");
    if (isEdited) {
      text.textContent = this.text;
    } else {
      this.words.forEach((word, index) => text.append(index ? " " : "", this.word(word)));
    }
    const edit = button("edit", "Edit", () => this.edit());
    edit.setAttribute("aria-label", `Edit: ${this.text}`);
    this.item.replaceChildren(time, text, edit);
    if (this.note) {
      this.item.append(element("p", "note", this.note));
    }
    this.editButton = edit;
  }

  word(word) {
    const isUncertain = word.confidence !== null && word.confidence < UNCERTAIN;
    const shown = element("span", "word");
    shown.append(element("span", isUncertain ? "uncertain" : "", word.text));
    const sure = word.confidence === null ? "" : `, ${Math.round(100 * word.confidence)} % sure`;
    shown.title = `${word.start.toFixed(2)} to ${word.end.toFixed(2)} s${sure}`;
    shown.dataset.start = word.start.toFixed(2);
    return shown;
  }

  play() {
    const samples = this.samples();
    if (samples === null) {
      this.transcript.showMessage("The audio of this line is no longer kept: the page keeps only the newest audio.");
    } else {
      play(samples, this.transcript.audio.sampleRate);
    }
  }

  edit() {
    const canSave = this.transcript.settings.canSave;
    const area = element("textarea", "text");
    area.lang = this.transcript.settings.language;
    area.value = this.text;
    area.rows = Math.max(2, Math.ceil(this.text.length / 40));
    area.setAttribute("aria-label", "Text of this line");
    const done = button("primary", canSave ? "Save for training" : "Apply", () => apply());
    const cancel = button("", "Cancel", () => this.leave());
    const apply = () => {
      for (const control of [area, done, cancel]) {
        control.disabled = true; // saving takes a while
      }
      this.apply(area.value);
    };
    area.onkeydown = (event) => {
      // Keys for an input method, as in "Escape ends the composition". Safari reports the last one only as code 229.
      if (event.isComposing || event.keyCode === 229) {
        return;
      }
      if (event.key === "Escape") {
        this.leave();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        apply();
      }
    };
    const buttons = element("div", "buttons");
    buttons.append(done, cancel);
    const form = element("div", "form");
    form.append(area, buttons);
    this.item.replaceChildren(form);
    area.focus();
  }

  leave() {
    const isElsewhere = document.activeElement !== document.body && !this.item.contains(document.activeElement);
    this.show();
    // The user may have gone on to another line while this one was saved.
    if (!isElsewhere) {
      this.editButton.focus();
    }
  }

  async apply(text) {
    this.text = text.trim().split(/\s+/).join(" ");
    this.note = this.transcript.settings.canSave ? await this.save() : "";
    this.leave();
  }

  get key() {
    return `${this.transcript.key}-${this.number}`;
  }

  // Returns a note on the result.
  async save() {
    if (!this.text) {
      return this.isSaved ? await this.remove() : "";
    }
    const samples = this.samples();
    if (samples === null) {
      return "Not saved: the page no longer has the audio of this line, it keeps only the newest audio.";
    }
    const { sampleRate } = this.transcript.audio;
    try {
      const rows = await saveCorrection(this.key, this.text, sampleRate, samples);
      this.isSaved = true;
      return `Saved; ${inFolder(rows)}`;
    } catch (error) {
      return `Not saved: ${error.message}`;
    }
  }

  async remove() {
    try {
      const rows = await removeCorrection(this.key);
      this.isSaved = false;
      return `Removed; ${inFolder(rows)}`;
    } catch (error) {
      return `Not removed: ${error.message}`;
    }
  }
}
