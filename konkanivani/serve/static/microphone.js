// Collects the microphone's samples into blocks of 0.1 s and posts them to the page; any message requests the rest.

class MicrophoneProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Float32Array(Math.round(sampleRate / 10));
    this.filled = 0;
    this.port.onmessage = () => this.post(true);
  }

  post(isLast) {
    this.port.postMessage({ samples: this.block.slice(0, this.filled), isLast });
    this.filled = 0;
  }

  process([input]) {
    // An input without channels is a source that has ended.
    for (const sample of input[0] ?? []) {
      this.block[this.filled] = sample;
      this.filled += 1;
      if (this.filled === this.block.length) {
        this.post(false);
      }
    }
    return true;
  }
}

registerProcessor("microphone", MicrophoneProcessor);
