"""Recordings in the formats of phones, messengers, browsers and cameras, written with PyAV.

Its FFmpeg cannot write HE-AAC and AMR-WB: tests/media/ has 1.5 s of each, encoded from `rising_tone` with the encoders
of Fraunhofer (libfdk-aac) and VisualOn (libvo-amrwbenc).
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

ENCODED = Path(__file__).with_name("media")  # he_aac.aac, he_aac_v2.aac, amr_wb.awb


@dataclass(frozen=True)
class Kind:
    """Encoding of a recording; `has_video` adds a video stream."""

    suffix: str
    codec: str
    rate: int
    layout: str = "mono"
    bit_rate: int = 64_000
    has_video: bool = False
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return the file name without its extension."""
        return f"{self.codec}_{self.rate // 1000}k_{self.layout}{'_video' if self.has_video else ''}"


VORBIS = (("strict", "experimental"),)
KINDS = (
    Kind(".m4a", "aac", 48_000),
    Kind(".m4a", "aac", 44_100, "stereo", 128_000),
    Kind(".m4a", "aac", 16_000),
    Kind(".aac", "aac", 24_000),
    Kind(".m4a", "alac", 44_100, "stereo"),
    Kind(".m4a", "alac", 48_000),
    Kind(".amr", "libopencore_amrnb", 8_000, "mono", 12_200),
    Kind(".3gp", "libopencore_amrnb", 8_000, "mono", 12_200),
    Kind(".3gp", "aac", 32_000),
    Kind(".webm", "libopus", 48_000),
    Kind(".webm", "libopus", 48_000, "stereo", 96_000),
    Kind(".ogg", "libopus", 48_000, "mono", 32_000),
    Kind(".ogg", "vorbis", 44_100, "stereo", 128_000, options=VORBIS),
    Kind(".webm", "vorbis", 48_000, "stereo", 128_000, options=VORBIS),
    Kind(".mp4", "aac", 44_100, "stereo", 128_000, has_video=True),
    Kind(".mov", "aac", 48_000, "mono", has_video=True),
    Kind(".mkv", "ac3", 48_000, "stereo", 192_000, has_video=True),
    Kind(".wma", "wmav2", 44_100, "stereo", 128_000),
    Kind(".wma", "wmav1", 22_050),
    Kind(".avi", "mp2", 32_000, "stereo", 192_000, has_video=True),
)


def rising_tone(seconds: float, rate: int) -> np.ndarray:
    """Return a tone (S,) in float32, from 200 Hz up by 150 Hz per second, so that no two parts are equal."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * (200 + 150 * time) * time)).astype(np.float32)


def write_media(path: Path, waveform: np.ndarray, rate: int, kind: Kind) -> Path:
    """Write the waveform (S,) of `rate` Hz as a file of this kind, the same in each channel."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(kind.codec, rate=kind.rate, options=dict(kind.options))
        stream.layout, stream.bit_rate = kind.layout, kind.bit_rate
        pictures = _add_pictures(container) if kind.has_video else None
        container.start_encoding()
        context = stream.codec_context
        resampler = av.AudioResampler(context.format, kind.layout, kind.rate, context.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(waveform[None]), format="flt", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        for made in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(made))
        container.mux(stream.encode(None))
        if pictures is not None:
            for number in range(round(10 * len(waveform) / rate)):
                container.mux(pictures.encode(_picture(number)))
            container.mux(pictures.encode(None))
    return path


def _add_pictures(container: av.container.OutputContainer) -> av.VideoStream:
    stream = container.add_stream("mpeg4", rate=10)
    stream.width = stream.height = 32
    stream.pix_fmt = "yuv420p"
    return stream


def _picture(number: int) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(np.full((32, 32, 3), 20 * number % 255, np.uint8), format="rgb24")
