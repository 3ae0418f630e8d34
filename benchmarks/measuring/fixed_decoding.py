"""Decoding times of a random model on noise, for a fixed number of tokens.

B batch, S samples, T' encoder frames, U tokens, D model width.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.base.config import PRESETS, AugmentConfig, TrainConfig
from konkanivani.base.device import choose_device
from konkanivani.base.lengths import SAMPLE_RATE, Lengths
from konkanivani.data.text import OUR_TOKENS
from konkanivani.decoding.beam import Scorers, Weighted, beam_search
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.decoding.decode import PrefixDecode
from konkanivani.decoding.scorers import AttentionScorer, CTCScorer
from konkanivani.model.architecture import architecture_of
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.kernels.passes import optimize

JOINT_CTC_WEIGHT = 0.3


@dataclass(frozen=True)
class DecodedSpeech:
    """Batch of `utterances` utterances, each of `seconds` seconds and `tokens_per_second` tokens per second."""

    seconds: float
    tokens_per_second: float
    utterances: int


@dataclass(frozen=True)
class DecodingTimes:
    """Decoding speeds in seconds of audio per second, front end and encoder included, and times with and without cache.

    The cached and uncached times are those for `tokens` tokens of the attention decoder.
    """

    preset: str
    threads: int
    greedy: float
    prefix: float
    attention: float
    joint: float
    tokens: int
    beam: int
    cached_seconds: float
    uncached_seconds: float
    cached_beam_seconds: float
    uncached_beam_seconds: float

    def sentences(self) -> str:
        """Return the result as text."""
        return (
            f"{self.preset} on {self.threads} threads, times faster than the speech: greedy {self.greedy:.0f}, "
            f"prefix {self.prefix:.0f}, attention {self.attention:.1f}, joint {self.joint:.1f}.\n"
            f"{self.tokens} tokens of the attention decoder: {self.cached_seconds:.3f} s with its cache, "
            f"{self.uncached_seconds:.3f} s without, {self.uncached_seconds / self.cached_seconds:.1f} times as long; "
            f"of {self.beam} hypotheses {self.cached_beam_seconds:.3f} s and {self.uncached_beam_seconds:.3f} s, "
            f"{self.uncached_beam_seconds / self.cached_beam_seconds:.1f} times as long."
        )


def measure_decoding(
    preset: str, vocab_size: int, speech: DecodedSpeech, beam: int, tokens: int, rounds: int, device: str
) -> DecodingTimes:
    """Run every decoder `rounds` times in turn after a warm-up, and return the medians."""
    where = choose_device(device)
    torch.manual_seed(0)
    architecture = architecture_of(TrainConfig(model=PRESETS[preset]), vocab_size)
    model = architecture.build().to(where).eval()
    optimize(model)
    # The end token is never chosen, so that every search runs to its limit.
    with torch.no_grad():
        model.decoder.output.bias[OUR_TOKENS.end] = -1e4
    front_end = architecture.build_front_end(AugmentConfig()).to(where)
    samples = round(speech.seconds * SAMPLE_RATE)
    waveforms = torch.randn(speech.utterances, samples) * 0.1

    @torch.no_grad()
    def encode() -> tuple[torch.Tensor, Lengths]:
        features, lengths = front_end(waveforms.to(where), (samples,) * speech.utterances, None)
        return model.encoder(features, lengths)

    limits = (max(1, round(speech.seconds * speech.tokens_per_second)),) * speech.utterances

    # Beam search with one best hypothesis; the CTC scorer takes part only if it has a weight.
    def search(ctc_weight: float) -> None:
        encoded, lengths = encode()
        full = (Weighted(AttentionScorer(model, encoded, lengths, beam), 1 - ctc_weight),)
        ctc = CTCScorer(model, encoded, lengths, beam) if ctc_weight else None
        beam_search(Scorers(full, ctc, ctc_weight, 0.0), limits, beam, 1, where)

    prefix = PrefixDecode(beam)
    # With and without cache, only the decoder is timed, on one utterance that is already encoded.
    one, one_length = encode()[0][:1], (encode()[1][0],)
    seconds = medians(
        rounds,
        where,
        lambda: greedy_ctc(model, *encode()),
        lambda: prefix(model, *encode()),
        lambda: search(0.0),
        lambda: search(JOINT_CTC_WEIGHT),
        lambda: decode_with_cache(model, one, one_length, 1, tokens),
        lambda: decode_without_cache(model, one, one_length, 1, tokens),
        lambda: decode_with_cache(model, one, one_length, beam, tokens),
        lambda: decode_without_cache(model, one, one_length, beam, tokens),
    )
    audio = speech.seconds * speech.utterances
    rates = [audio / each for each in seconds[:4]]
    return DecodingTimes(preset, torch.get_num_threads(), *rates, tokens, beam, *seconds[4:])


def medians(rounds: int, device: torch.device, *actions: Callable[[], object]) -> list[float]:
    """Return the median seconds of each action over `rounds` rounds; a round runs each action once."""
    taken = [[] for _ in actions]
    for number in range(rounds + 1):
        for action, seconds in zip(actions, taken, strict=True):
            started = time.perf_counter()
            action()
            # CUDA kernels run asynchronously: without this, only their launch would be timed.
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:  # round 0 is the warm-up
                seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in taken]


@torch.no_grad()
def decode_with_cache(
    model: KonkaniVaniASR, encoded: torch.Tensor, lengths: Lengths, hypotheses: int, tokens: int
) -> torch.Tensor:
    """Return the last logits (K, V) of K equal hypotheses of one utterance; each token is computed once."""
    cache = model.decoder.begin(encoded, lengths, hypotheses)
    last = torch.full((1, hypotheses), OUR_TOKENS.start, device=encoded.device)
    for _ in range(tokens):
        logits = model.decoder.output(model.decoder.step(last, cache))
        last = logits.argmax(dim=-1)
    return logits[0]


@torch.no_grad()
def decode_without_cache(
    model: KonkaniVaniASR, encoded: torch.Tensor, lengths: Lengths, hypotheses: int, tokens: int
) -> torch.Tensor:
    """Return the same logits, with the whole prefix recomputed for each token."""
    # `lengths` is a tuple: the product repeats it.
    rows, lengths = encoded.expand(hypotheses, -1, -1), lengths * hypotheses
    said = torch.full((hypotheses, 1), OUR_TOKENS.start, device=encoded.device)
    for _ in range(tokens):
        logits = model.decoder.output(model.decoder(said, rows, lengths)[:, -1])
        said = torch.cat([said, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return logits
