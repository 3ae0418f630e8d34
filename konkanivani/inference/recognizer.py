"""Recognition of recordings: segmentation, speech model, decoding and word times.

B batch, S samples, T' encoder frames, D model dimension, V vocabulary.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.config import DecodingConfig, PretrainedConfig
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.audio.waveform import stream_audio, stream_samples
from konkanivani.decoding.ctc import collapse_repeats
from konkanivani.decoding.decode import BeamDecode, Decode, build_decode, greedy_decode
from konkanivani.distributed import choose_device
from konkanivani.inference.bundle import FOLDER_NAME, is_bundle, read_bundle
from konkanivani.inference.segmentation import Piece, SegmentationConfig, build_segmentation, segment_audio
from konkanivani.inference.speech_model import SpeechModel, build_pretrained_model, build_speech_model, read_pretrained
from konkanivani.inference.whisper_generation import FallbackDecode
from konkanivani.inference.word_times import (
    EmissionDelay,
    Segment,
    Transcript,
    Word,
    align_tokens,
    attended_words,
    group_words,
    spread_words,
    timed_words,
)
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.model_files import CONFIG
from konkanivani.models.whisper.model import Whisper
from konkanivani.models.whisper.vocabulary import PromptedVocabulary
from konkanivani.rules import check_decoding

OURS = PretrainedConfig()
MAX_PIECE = 30.0  # seconds, even if the model was trained on longer utterances
PAUSE = 0.4  # seconds
BATCH_SECONDS = 20.0  # seconds of padded audio per batch

# Limit of Whisper's text while a person speaks: twice the tokens of Devanagari at a normal speed. A model that finds no
# end in noise or music would otherwise write up to its limit for 30 s, in each pass. Recordings have no such limit: no
# speaker waits, and the end of a loop is removed.
TOKENS_PER_SECOND = 30.0
EXTRA_TOKENS = 20

# Models that were trained on whole utterances change the words of short speech most as it grows. Shorter speech is
# therefore also decoded longer (docs/experiments.md, 2026-11-29).
STABLE_SECONDS = 3.0
MIRRORED_SECONDS = (2.0, STABLE_SECONDS)
GAP_SECONDS = 0.1

Audio = str | os.PathLike | np.ndarray | torch.Tensor


@dataclass(frozen=True)
class PrefixText:
    """Text of the first part of an utterance, and the texts of the decodings whose probabilities were averaged."""

    text: str
    views: tuple[str, ...]


@dataclass(frozen=True)
class Recognizer:
    """Speech model with its decoding and segmentation; built by `load_recognizer`.

    With `limits_final`, the duration of the speech limits the number of tokens of Whisper's final text too.
    """

    speech_model: SpeechModel
    decode: Decode
    segmentation: SegmentationConfig
    limits_final: bool = False

    def transcribe(self, audio: Audio, sample_rate: int = SAMPLE_RATE) -> Transcript:
        """Return the transcript of an audio file, or of samples at `sample_rate` Hz; arguments as in `segments`."""
        return Transcript(tuple(self.segments(audio, sample_rate)))

    def segments(self, audio: Audio, sample_rate: int = SAMPLE_RATE) -> Iterator[Segment]:
        """Yield the segments of a transcript as soon as they are recognised; memory does not grow with the duration.

        Args:
            audio: path of an audio file, or samples of shape (S,) or (S, channels): floats between -1 and 1, or
                integers.
            sample_rate: sampling rate of samples, in Hz.

        Raises a DataError if the audio cannot be used.
        """
        if isinstance(audio, str | os.PathLike):
            blocks = stream_audio(AudioSource(os.fspath(audio)))
        else:
            blocks = stream_samples(audio, sample_rate)
        return self._segments_of(blocks)

    def _segments_of(self, blocks: Iterable[torch.Tensor]) -> Iterator[Segment]:
        pieces = segment_audio(blocks, self.segmentation)
        audible = (piece for piece in pieces if self.is_long_enough(piece))
        # One estimate per recording: the delay is updated from piece to piece.
        delay = EmissionDelay()
        for batch in _batches(audible):
            for words in self.recognize(batch, delay):
                if words:
                    yield Segment(tuple(words))

    def is_long_enough(self, piece: Piece) -> bool:
        """Return whether a piece has at least one encoder frame; shorter ones cannot be recognised."""
        return self.speech_model.architecture.framing.encoded_length(len(piece.waveform)) > 0

    @torch.no_grad()
    def recognize(self, pieces: list[Piece], delay: EmissionDelay) -> list[list[Word]]:
        """Return the words in the core of each piece, with times from the start of the recording.

        Args:
            pieces: consecutive pieces of one recording, each long enough.
            delay: estimate of this recording, which the pieces update.
        """
        lengths = tuple(len(piece.waveform) for piece in pieces)
        waveforms = torch.nn.utils.rnn.pad_sequence([piece.waveform for piece in pieces], batch_first=True)
        encoded, encoded_lengths = self.speech_model.encode(waveforms, lengths)
        decode = limited_by_duration(self.decode, max(lengths) / SAMPLE_RATE) if self.limits_final else self.decode
        hypotheses = decode(self.speech_model.model, encoded, encoded_lengths)
        found = []
        for piece, row, length, tokens in zip(pieces, encoded, encoded_lengths, hypotheses, strict=True):
            words = self._words(piece, row[:length], tokens, delay)
            moved = [Word(w.text, piece.start + w.start, piece.start + w.end, w.confidence) for w in words]
            # Neighbouring pieces overlap at a cut within speech: keep each word once, by its middle.
            found.append([w for w in moved if piece.core_start <= (w.start + w.end) / 2 < piece.core_end])
        return found

    @torch.no_grad()
    def recognize_prefix(self, waveform: torch.Tensor) -> PrefixText:
        """Return the greedy text of the first part (S,) of an utterance, for any configured search.

        With CTC, speech shorter than `STABLE_SECONDS` is decoded longer in several ways (`lengthen`), and the
        probabilities of its own frames are averaged.
        """
        speech = self.speech_model
        if speech.model.ctc_head is None or len(waveform) >= STABLE_SECONDS * SAMPLE_RATE:
            decode = greedy_decode(speech.architecture, speech.tokenizer)
            decode = limited_by_duration(decode, len(waveform) / SAMPLE_RATE)
            (tokens,) = decode(speech.model, *speech.encode(waveform[None], (len(waveform),)))
            return PrefixText(speech.tokenizer.decode(tokens), ())
        longer = lengthen(waveform)
        waveforms = torch.nn.utils.rnn.pad_sequence(longer, batch_first=True)
        encoded, _ = speech.encode(waveforms, tuple(len(each) for each in longer))
        frames = speech.architecture.framing.encoded_length(len(waveform))
        views = speech.model.ctc_head(encoded[:, :frames]).float().softmax(dim=-1)
        paths = torch.cat([views.mean(dim=0, keepdim=True), views]).argmax(dim=-1)
        texts = [speech.tokenizer.decode(tokens) for tokens in collapse_repeats(paths, (frames,) * len(paths))]
        return PrefixText(texts[0], tuple(texts[1:]))

    def _words(self, piece: Piece, encoded: torch.Tensor, tokens: list[int], delay: EmissionDelay) -> list[Word]:
        """Return the words of encoded speech (T', D) with times within the piece.

        The times are from CTC or from Whisper's cross-attention; without either, words are spread evenly.
        """
        speech = self.speech_model
        seconds = piece.end - piece.start
        framing = speech.architecture.framing
        model = speech.model
        if isinstance(speech.tokenizer, PromptedVocabulary) and isinstance(model, Whisper):
            # Whisper's encoder pads to 30 s. Attention to padding would distort the alignment.
            frames = max(1, math.ceil(len(piece.waveform) / framing.encoder_hop))
            return attended_words(model.decoder, encoded[:frames], tokens, speech.tokenizer, framing)
        if model.ctc_head is None:
            return spread_words(tokens, speech.tokenizer, framing, seconds)
        # Softmax in fp32: `forced_align` sums over all frames.
        aligned = align_tokens(model.ctc_head(encoded).float().log_softmax(dim=-1), tokens)
        words = group_words(aligned, speech.tokenizer, framing)
        # Before `timed_words`, so that this piece contributes to its own times.
        delay.learn(words, piece)
        return timed_words(words, delay, seconds)


def load_recognizer(
    path: str | os.PathLike,
    decode: Literal["greedy", "prefix", "attention", "joint"] = "greedy",
    beam: int = 10,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    language: str | None = None,
) -> Recognizer:
    """Return the recogniser of the model at `path`; raise a CheckpointError if it cannot be used.

    Args:
        path: checkpoint, bundle, or folder with a bundle or a Whisper model.
        language: language code for the prompt of a Whisper model.
    """
    decoding = DecodingConfig(decode=decode, beam=beam)
    check_decoding(decoding)
    folder = Path(path)
    if os.path.isfile(folder / CONFIG):
        pretrained = PretrainedConfig(pretrained=str(folder), language=language)
        return build_recognizer(path, decoding, device, pretrained=pretrained)
    if os.path.isfile(folder / FOLDER_NAME):
        path = folder / FOLDER_NAME
    return build_recognizer(path, decoding, device)


def build_recognizer(
    path: str | os.PathLike,
    decoding: DecodingConfig,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    longest_seconds: float | None = None,
    pause_seconds: float = PAUSE,
    pretrained: PretrainedConfig = OURS,
) -> Recognizer:
    """Return the recogniser of the checkpoint or bundle at `path`, or of the folder in `pretrained`.

    Args:
        longest_seconds: maximum duration of a piece; None for the maximum duration in training, up to 30 s.
        pause_seconds: minimum silence between pieces.

    Raises:
        CheckpointError: The file cannot be used.
        UsageError: The model's window is shorter than `longest_seconds`.
    """
    if pretrained.pretrained is not None:
        folder = read_pretrained(pretrained.pretrained, pretrained.revision)
        speech_model = build_pretrained_model(folder, pretrained, choose_device(device))
    elif is_bundle(Path(path)):
        speech_model = read_bundle(Path(path), choose_device(device))
    else:
        speech_model = build_speech_model(read_checkpoint(Path(path)), choose_device(device))
    speech_model.check_input()
    window = speech_model.architecture.longest_seconds
    longest = min(speech_model.longest_seconds, MAX_PIECE, window) if longest_seconds is None else longest_seconds
    speech_model = with_word_times(speech_model)
    decode: Decode = build_decode(decoding, speech_model.architecture, speech_model.tokenizer, speech_model.device)
    # Fallback needs scores of the decoder and Whisper's "no speech" token.
    if isinstance(decode, BeamDecode) and isinstance(speech_model.tokenizer, PromptedVocabulary):
        decode = FallbackDecode(decode, speech_model.tokenizer)
    return Recognizer(speech_model, decode, build_segmentation(longest, pause_seconds, window))


def lengthen(waveform: torch.Tensor) -> list[torch.Tensor]:
    """Return speech (S,) shorter than `STABLE_SECONDS`, continued in several ways up to such durations.

    It is followed by its mirror image and itself in turn, or by a gap and itself: speech of the same voice in the same
    surroundings. A word that does not depend on the continuation will probably stay when the actual one is known.
    """
    mirrored = torch.cat([waveform, waveform.flip(0)])
    repeated = torch.cat([waveform, waveform.new_zeros(round(GAP_SECONDS * SAMPLE_RATE))])
    continued = [(mirrored, seconds) for seconds in MIRRORED_SECONDS] + [(repeated, STABLE_SECONDS)]
    longer = []
    for period, seconds in continued:
        samples = max(round(seconds * SAMPLE_RATE), len(waveform))
        longer.append(period.repeat(math.ceil(samples / len(period)))[:samples])
    return longer


def limited_by_duration(decode: Decode, seconds: float) -> Decode:
    """Return a search for a vocabulary with a limit, such as Whisper's, limited further to speech of `seconds`.

    A text that repeats itself without end is ended before the limit.
    """
    if isinstance(decode, FallbackDecode):
        return replace(decode, inner=_limited_search(decode.inner, seconds))
    return _limited_search(decode, seconds) if isinstance(decode, BeamDecode) else decode


def _limited_search(search: BeamDecode, seconds: float) -> BeamDecode:
    # Without a limit of the vocabulary, the number of encoder frames limits the tokens by the duration already.
    if search.rules.most_tokens is None:
        return search
    most = min(search.rules.most_tokens, EXTRA_TOKENS + math.ceil(TOKENS_PER_SECOND * seconds))
    return replace(search, rules=replace(search.rules, most_tokens=most, ends_loops=True))


def with_word_times(speech_model: SpeechModel) -> SpeechModel:
    """Enable timestamp prediction if the model was trained with timestamps."""
    tokenizer = speech_model.tokenizer
    if not (speech_model.knows_times and isinstance(tokenizer, PromptedVocabulary)):
        return speech_model
    return replace(speech_model, tokenizer=tokenizer.saying_times())


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of consecutive pieces, at most `BATCH_SECONDS` of padded audio each, or one longer piece."""
    batch: list[Piece] = []
    for piece in pieces:
        longest = max(len(each.waveform) for each in [*batch, piece])
        if batch and longest * (len(batch) + 1) > BATCH_SECONDS * SAMPLE_RATE:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
