// Audio on the page: microphone, decoded files, and the samples that are kept for replay and corrections.

import { LOST } from "./connection.js";

// Of all recordings of the page: 46 minutes of a microphone at 48 kHz, 2.3 hours of files at 16 kHz.
export const KEPT_BYTES = 256 * 2 ** 20;
export const MAX_FILE_SECONDS = 60 * 60;
const MAX_FILE_BYTES = 500 * 2 ** 20;
const FILE_RATE = 16000;
const FLUSH_MILLISECONDS = 500; // an audio thread that hangs must not keep the microphone open

const MICROPHONE_ERRORS = {
  NotAllowedError: "The browser does not allow the microphone. Allow it next to the address, and start again.",
  NotFoundError: "No microphone was found. Connect one, and start again.",
  NotReadableError: "The microphone is used by another program. Close that program, and start again.",
};

export class PageError extends Error {}

// Microphone whose blocks (Float32Array, 0.1 s) go to `receive`; `unplugged` is called if it disappears.
export class Microphone {
  static async open(receive, unplugged) {
    if (navigator.mediaDevices === undefined) {
      throw new PageError(
        "Browsers open the microphone only for addresses of this computer. On another computer, forward the port " +
          "(ssh -L) and open the page as localhost.",
      );
    }
    const microphone = new Microphone();
    // Processing for calls would change the signal.
    const constraints = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    try {
      microphone.stream = await navigator.mediaDevices.getUserMedia({ audio: constraints });
    } catch (error) {
      throw new PageError(MICROPHONE_ERRORS[error.name] ?? `The microphone cannot be opened: ${error.message}`);
    }
    try {
      await microphone.connect(receive);
    } catch (error) {
      microphone.close();
      throw error;
    }
    microphone.stream.getAudioTracks()[0].onended = unplugged;
    return microphone;
  }

  async connect(receive) {
    // At the context's own rate, because Safari ignores another one; the server resamples.
    this.context = new AudioContext();
    try {
      await this.context.audioWorklet.addModule("microphone.js");
    } catch {
      throw new PageError(LOST); // the file comes from the server
    }
    const node = new AudioWorkletNode(this.context, "microphone", {
      channelCount: 1,
      channelCountMode: "explicit",
    });
    node.port.onmessage = ({ data }) => {
      receive(data.samples);
      if (data.isLast) {
        this.flushed();
      }
    };
    this.port = node.port;
    this.context.createMediaStreamSource(this.stream).connect(node);
    // Its output is silent; without a destination some browsers do not run it.
    node.connect(this.context.destination);
    await this.context.resume();
  }

  get sampleRate() {
    return this.context.sampleRate;
  }

  // Receives the last, shorter block, and closes the microphone.
  async stop() {
    await Promise.race([
      new Promise((resolve) => {
        this.flushed = resolve;
        this.port.postMessage("flush");
      }),
      new Promise((resolve) => setTimeout(resolve, FLUSH_MILLISECONDS)),
    ]);
    this.close();
  }

  close() {
    for (const track of this.stream.getTracks()) {
      track.onended = null;
      track.stop();
    }
    if (this.port) {
      this.port.onmessage = null; // the audio thread may run on for a moment
    }
    if (this.context && this.context.state !== "closed") {
      this.context.close();
    }
  }
}

// Returns the samples (Float32Array) of a file, mono at 16 kHz; the browser decodes it.
export async function decodeFile(file) {
  if (file.size > MAX_FILE_BYTES) {
    throw new PageError(`${file.name} is larger than 500 MiB. Use transcribe.py for it.`);
  }
  const context = new OfflineAudioContext(1, 1, FILE_RATE);
  let decoded;
  try {
    decoded = await context.decodeAudioData(await file.arrayBuffer());
  } catch {
    throw new PageError(`${file.name} is not audio that this browser can decode.`);
  }
  if (decoded.duration > MAX_FILE_SECONDS) {
    throw new PageError(`${file.name} is longer than an hour. Use transcribe.py for it.`);
  }
  const mono = new Float32Array(decoded.length);
  for (let channel = 0; channel < decoded.numberOfChannels; channel += 1) {
    const samples = decoded.getChannelData(channel);
    for (let index = 0; index < mono.length; index += 1) {
      mono[index] += samples[index] / decoded.numberOfChannels;
    }
  }
  return { samples: mono, sampleRate: FILE_RATE };
}

export function level(samples) {
  let energy = 0;
  for (const sample of samples) {
    energy += sample * sample;
  }
  return samples.length ? Math.sqrt(energy / samples.length) : 0;
}

const kept = []; // the KeptAudio of each block, oldest first
let keptBytes = 0;

function dropOldestBlocks() {
  while (keptBytes > KEPT_BYTES) {
    keptBytes -= kept.shift().dropFirstBlock();
  }
}

// The samples of a recording, as 16-bit integers, without those that exceed the limit for all recordings.
export class KeptAudio {
  constructor(sampleRate) {
    this.sampleRate = sampleRate;
    this.blocks = [];
    this.first = 0; // position of the first kept sample
    this.length = 0;
  }

  add(samples) {
    const block = new Int16Array(samples.length);
    for (let index = 0; index < samples.length; index += 1) {
      block[index] = Math.max(-32768, Math.min(32767, Math.round(samples[index] * 32768)));
    }
    this.blocks.push(block);
    this.length += block.length;
    kept.push(this);
    keptBytes += block.byteLength;
    dropOldestBlocks();
  }

  // Returns the number of bytes that this frees.
  dropFirstBlock() {
    const dropped = this.blocks.shift();
    this.first += dropped.length;
    this.length -= dropped.length;
    return dropped.byteLength;
  }

  // Returns the samples (Int16Array) between two times in seconds; null if they are no longer kept.
  slice(start, end) {
    const startSample = Math.max(0, Math.round(start * this.sampleRate));
    const endSample = Math.min(Math.round(end * this.sampleRate), this.first + this.length);
    if (startSample < this.first || startSample >= endSample) {
      return null;
    }
    const samples = new Int16Array(endSample - startSample);
    let position = this.first;
    for (const block of this.blocks) {
      const from = Math.max(startSample - position, 0);
      const to = Math.min(endSample - position, block.length);
      if (from < to) {
        samples.set(block.subarray(from, to), position + from - startSample);
      }
      position += block.length;
    }
    return samples;
  }
}

let player = null;

// Plays samples (Int16Array); stops the previous playback.
export function play(samples, sampleRate) {
  player?.close();
  player = new AudioContext();
  const buffer = player.createBuffer(1, samples.length, sampleRate);
  buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
  const source = player.createBufferSource();
  source.buffer = buffer;
  source.connect(player.destination);
  source.start();
}
