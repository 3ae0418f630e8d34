"""The dimensions of a Whisper model, and how many frames it makes of so many samples."""

from dataclasses import dataclass

from konkanivani.base.lengths import SAMPLE_RATE, Count

HOP_SAMPLES = 160  # from one feature frame to the next: 10 ms
STRIDE = 2  # feature frames an encoder frame


@dataclass(frozen=True)
class WhisperShape:
    """The shape of the network (Radford et al., 2022); encoder and decoder have the same heads and inner width.

    `source_positions` are encoder frames of a window (30 s: 1500), `target_positions` tokens that the decoder takes.
    """

    d_model: int
    attention_heads: int
    encoder_layers: int
    decoder_layers: int
    feedforward_dim: int
    mel_bins: int
    vocab_size: int
    source_positions: int = 1500
    target_positions: int = 448

    @property
    def window_frames(self) -> int:
        """Feature frames of a window."""
        return STRIDE * self.source_positions

    @property
    def window_samples(self) -> int:
        """Samples of a window, to which all speech is padded."""
        return HOP_SAMPLES * self.window_frames

    @property
    def window_seconds(self) -> float:
        """Seconds of a window."""
        return self.window_samples / SAMPLE_RATE


@dataclass(frozen=True)
class SpeechFraming:
    """The frames of the speech alone, as many as it begins."""

    def feature_length(self, samples: Count) -> Count:
        """Feature frames: 300 of 3 s."""
        return -(-samples // HOP_SAMPLES)

    def encoded_length(self, samples: Count) -> Count:
        """Encoder frames: 150 of 3 s."""
        return -(-self.feature_length(samples) // STRIDE)

    @property
    def encoder_hop(self) -> int:
        """Samples from one encoder frame to the next: 20 ms."""
        return STRIDE * HOP_SAMPLES

    def encoder_frame_seconds(self, frame: float) -> float:
        """Where the middle of what an encoder frame sees lies, in seconds."""
        return frame * self.encoder_hop / SAMPLE_RATE


@dataclass(frozen=True)
class WindowFraming(SpeechFraming):
    """As many frames as a window has, however short the speech in it."""

    shape: WhisperShape

    def feature_length(self, samples: Count) -> Count:
        """Feature frames: 3000 of a window of 30 s."""
        return 0 * samples + self.shape.window_frames

    def encoded_length(self, samples: Count) -> Count:
        """Encoder frames: 1500 of a window of 30 s."""
        return 0 * samples + self.shape.source_positions
