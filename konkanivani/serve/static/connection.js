// Connections to the server. Every address is relative to the page, which has the token in its own.

const BLOCK_BYTES = 256 * 1024;
// Of half a minute each: about 10 kB of JSON, and the server accepts 1 MiB.
const SEGMENTS_PER_MESSAGE = 20;
export const LOST = "The connection to the server was lost. Check that it is still running, and start again.";

function open(endpoint) {
  const address = new URL(endpoint, location.href);
  address.protocol = address.protocol.replace("http", "ws");
  const socket = new WebSocket(address);
  socket.binaryType = "arraybuffer";
  return socket;
}

// Recording that is sent to the server. `handlers` has a function per type of message: ready, partial, final,
// progress; `ended(sentence)` is called once, with an empty sentence if all went well.
export class Stream {
  constructor(sampleRate, handlers) {
    this.sampleRate = sampleRate;
    this.handlers = handlers;
    this.sent = 0; // samples
    this.decoded = 0; // seconds
    this.isOpen = false;
    this.isEnded = false;
    this.unsent = []; // until the connection is open
    this.times = []; // [seconds of audio, time of sending] of the blocks that are not decoded
    this.socket = open("listen");
    this.socket.onopen = () => this.opened();
    this.socket.onmessage = (event) => this.received(JSON.parse(event.data));
    this.socket.onclose = () => this.end(LOST);
  }

  opened() {
    this.isOpen = true;
    this.socket.send(JSON.stringify({ type: "start", sample_rate: this.sampleRate }));
    for (const message of this.unsent) {
      this.socket.send(message);
    }
    this.unsent = [];
  }

  received(message) {
    if (message.type === "error") {
      this.end(message.message);
    } else if (message.type === "finished") {
      this.end("");
    } else {
      if (message.type === "progress") {
        this.decoded = message.decoded;
        message.delay = this.delay(message.decoded);
      }
      this.handlers[message.type](message);
    }
  }

  // Seconds since the last decoded sample was sent.
  delay(decoded) {
    let last = null;
    while (this.times.length && this.times[0][0] <= decoded + 0.001) {
      last = this.times.shift()[1];
    }
    return last === null ? null : (performance.now() - last) / 1000;
  }

  deliver(message) {
    if (this.isOpen) {
      this.socket.send(message);
    } else {
      this.unsent.push(message);
    }
  }

  send(samples) {
    if (this.isEnded) {
      return;
    }
    this.deliver(samples);
    this.sent += samples.length;
    this.times.push([this.seconds, performance.now()]);
  }

  // Seconds of audio that were sent.
  get seconds() {
    return this.sent / this.sampleRate;
  }

  finish() {
    if (!this.isEnded) {
      this.deliver(JSON.stringify({ type: "finish" }));
    }
  }

  end(sentence) {
    if (this.isEnded) {
      return;
    }
    this.isEnded = true;
    this.socket.close();
    this.handlers.ended(sentence);
  }
}

// Returns the transcript in a text format, rendered by the server.
export function renderTranscript(format, timestamps, name, segments) {
  return new Promise((resolve, reject) => {
    const socket = open("render");
    const parts = [];
    socket.onopen = () => {
      socket.send(JSON.stringify({ type: "render", format, timestamps, name }));
      for (let first = 0; first < segments.length; first += SEGMENTS_PER_MESSAGE) {
        const some = segments.slice(first, first + SEGMENTS_PER_MESSAGE);
        socket.send(JSON.stringify({ type: "segments", segments: some }));
      }
      socket.send(JSON.stringify({ type: "end" }));
    };
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (message.type === "part") {
        parts.push(message.text);
      } else if (message.type === "finished") {
        resolve(parts.join(""));
      } else {
        reject(new Error(message.message));
        socket.close();
      }
    };
    socket.onclose = () => reject(new Error(LOST));
  });
}

// Saves a corrected line with its audio (Int16Array); returns the number of saved lines.
export function saveCorrection(key, text, sampleRate, samples) {
  return changeCorrections((socket) => {
    socket.send(JSON.stringify({ type: "save", key, text, sample_rate: sampleRate, samples: samples.length }));
    const size = BLOCK_BYTES / Int16Array.BYTES_PER_ELEMENT;
    for (let first = 0; first < samples.length; first += size) {
      socket.send(samples.slice(first, first + size));
    }
  });
}

// Removes a saved line; returns the number of saved lines.
export function removeCorrection(key) {
  return changeCorrections((socket) => socket.send(JSON.stringify({ type: "remove", key })));
}

function changeCorrections(sendTo) {
  return new Promise((resolve, reject) => {
    const socket = open("save");
    socket.onopen = () => sendTo(socket);
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (message.type === "saved") {
        resolve(message.rows);
      } else {
        reject(new Error(message.message));
        socket.close();
      }
    };
    socket.onclose = () => reject(new Error(LOST));
  });
}
