"""Dimensions of a Whisper model, and the conversion of samples to frames."""

from dataclasses import dataclass

from konkanivani.base.lengths import SAMPLE_RATE, Count

HOP_SAMPLES = 160  # samples per feature frame: 10 ms
STRIDE = 2  # feature frames per encoder frame


@dataclass(frozen=True)
class WhisperShape:
    """Dimensions of the network (Radford et al., 2022); encoder and decoder have the same heads and inner width.

    `source_positions` is the number of encoder frames of a window (1500 in 30 s), `target_positions` the maximal number
    of decoder tokens.
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
        """Samples of a window, to which every utterance is padded."""
        return HOP_SAMPLES * self.window_frames

    @property
    def window_seconds(self) -> float:
        """Duration of a window in seconds."""
        return self.window_samples / SAMPLE_RATE


@dataclass(frozen=True)
class SpeechFraming:
    """Frame counts of the speech alone, the last frame counted in full."""

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames: 300 for 3 s."""
        return -(-samples // HOP_SAMPLES)

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames: 150 for 3 s."""
        return -(-self.feature_length(samples) // STRIDE)

    @property
    def encoder_hop(self) -> int:
        """Samples per encoder frame: 20 ms."""
        return STRIDE * HOP_SAMPLES

    def encoder_frame_seconds(self, frame: float) -> float:
        """Return the time in seconds of the middle of an encoder frame's context."""
        return frame * self.encoder_hop / SAMPLE_RATE


@dataclass(frozen=True)
class WindowFraming(SpeechFraming):
    """Frame counts of a window, however short the speech in it."""

    shape: WhisperShape

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames: 3000 for a window of 30 s."""
        # `0 * samples` keeps the type and shape of an array of lengths.
        return 0 * samples + self.shape.window_frames

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames: 1500 for a window of 30 s."""
        return 0 * samples + self.shape.source_positions
