// Collects the microphone's samples into blocks of 0.1 s and posts them to the page.

class MicrophoneProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.size = Math.round(sampleRate / 10);
    this.block = new Float32Array(this.size);
    this.filled = 0;
  }

  process([input]) {
    const samples = input[0];
    // An input without channels is a source that has ended.
    if (samples === undefined) {
      return true;
    }
    for (const sample of samples) {
      this.block[this.filled] = sample;
      this.filled += 1;
      if (this.filled === this.size) {
        this.port.postMessage(this.block, [this.block.buffer]);
        this.block = new Float32Array(this.size);
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("microphone", MicrophoneProcessor);
