"""Decoding of encoded frames into token ids, as the settings choose.

B batch, T' encoder frames, D model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.config import DecodingConfig, DecodingMethod
from konkanivani.data.text import FREE, OUR_TOKENS, GenerationRules, SpecialTokens, Vocabulary
from konkanivani.decoding.beam import RuledScorer, Scorers, Weighted, beam_search
from konkanivani.decoding.ctc import greedy_ctc, prefix_beam_search
from konkanivani.decoding.language_model import Fusion, LanguageModel, read_language_model
from konkanivani.decoding.network import Heads, Hypothesis, Network, ctc_head_of, decoder_of
from konkanivani.decoding.scorers import AttentionScorer, CTCScorer, FullScorer, LanguageModelScorer
from konkanivani.errors import UsageError
from konkanivani.lengths import Lengths


class Decode(Protocol):
    """Decoder of encoded (B, T', D) with their lengths into token ids per utterance, without special tokens.

    The model must be in evaluation mode and is not changed.
    """

    def __call__(self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]: ...


@dataclass(frozen=True)
class PrefixDecode:
    """CTC prefix beam search, with a language model if `fusion` is given."""

    beam: int
    fusion: Fusion | None = None

    @torch.no_grad()
    def __call__(self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
        # Softmax in fp32, whatever the precision of the head.
        log_probabilities = ctc_head_of(model)(encoded).float().log_softmax(dim=-1)
        return _best_tokens(prefix_beam_search(log_probabilities, encoded_lengths, self.beam, fusion=self.fusion))


@dataclass(frozen=True)
class BeamDecode:
    """Beam search with the attention decoder, with CTC if `ctc_weight` is above 0, and optionally a language model."""

    beam: int
    ctc_weight: float
    length_bonus: float
    language_model: LanguageModel | None
    language_model_weight: float
    special: SpecialTokens = OUR_TOKENS
    rules: GenerationRules = FREE

    def __call__(self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
        return _best_tokens(self.search(model, encoded, encoded_lengths, best=1))

    @torch.no_grad()
    def search(
        self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths, best: int
    ) -> list[tuple[Hypothesis, ...]]:
        """Return each utterance's `best` hypotheses, likeliest first, without the rules' prompt."""
        frames = encoded, encoded_lengths, self.beam
        full = [Weighted(self.attention(model, *frames), 1 - self.ctc_weight)]
        if self.language_model is not None:
            scorer = LanguageModelScorer(self.language_model, len(encoded), self.beam, encoded.device, self.special)
            full.append(Weighted(scorer, self.language_model_weight))
        ctc = CTCScorer(model, *frames, self.special) if self.ctc_weight else None
        scorers = Scorers(tuple(full), ctc, self.ctc_weight, self.length_bonus, self.special.end)
        return beam_search(scorers, self.limits(model, encoded_lengths), self.beam, best, encoded.device)

    def limits(self, model: Network, encoded_lengths: Lengths) -> Lengths:
        """Return the maximal number of tokens of each utterance's hypotheses.

        The rules' maximum or, without one, the utterance's number of frames; at most the decoder's capacity.
        """
        # The prompt takes positions in the decoder. Without a rule, at most one token per encoder frame, as in CTC.
        most = self.rules.most_tokens
        capacity = decoder_of(model).most_tokens - len(self.rules.prompt)
        # int: a capacity without limit is infinite, but no minimum is.
        return tuple(int(min(length if most is None else most, capacity)) for length in encoded_lengths)

    def attention(self, model: Network, encoded: torch.Tensor, lengths: Lengths, beam: int) -> FullScorer:
        """Return the attention decoder's scorer of `beam` hypotheses per utterance, restricted by the rules."""
        scorer = AttentionScorer(model, encoded, lengths, beam, self.special, self.rules.prompt)
        return RuledScorer(scorer, self.rules, self.special.end) if self.rules.forbids else scorer


def greedy_decode(heads: Heads, tokenizer: Vocabulary) -> Decode:
    """Return greedy decoding: CTC's best path, or without a CTC head the decoder's likeliest token at each step."""
    if heads.has_ctc:
        return greedy_ctc
    return BeamDecode(1, 0.0, 0.0, None, 0.0, tokenizer.special, tokenizer.rules)


def ways_to_decode(heads: Heads) -> list[DecodingMethod]:
    """Return the values of `DecodingConfig.decode` that the model has the heads for, the best one last."""
    has_ctc = heads.has_ctc
    has_decoder = heads.has_decoder
    ways: dict[DecodingMethod, bool] = {
        "greedy": True,
        "prefix": has_ctc,
        "attention": has_decoder,
        "joint": has_ctc and has_decoder,
    }
    return [way for way, is_possible in ways.items() if is_possible]


def build_decode(config: DecodingConfig, heads: Heads, tokenizer: Vocabulary, device: torch.device) -> Decode:
    """Return the decoding that the settings choose.

    Raises:
        UsageError: The model does not have the heads for it.
        DataError: The language model does not match the tokenizer.
    """
    possible = ways_to_decode(heads)
    if config.decode not in possible:
        missing = "CTC head" if not heads.has_ctc else "attention decoder"
        raise UsageError(
            f"--decode {config.decode} needs the {missing}, which the model does not have: use --decode "
            f"{' or '.join(possible)}."
        )
    if config.decode == "greedy":
        return greedy_decode(heads, tokenizer)
    language_model = None
    weight = config.language_model_weight
    if config.language_model is not None and weight:  # with a weight of 0 the file need not exist
        # A language model is over the project's own tokenizer, which has a blank; Whisper's has none.
        if tokenizer.special.blank is None:
            raise UsageError("--language_model needs a model with a KonkaniVani tokenizer: omit it.")
        language_model = read_language_model(config.language_model, tokenizer, device)
    if config.decode == "prefix":
        fusion = Fusion(language_model, weight, config.length_bonus, tokenizer.special) if language_model else None
        return PrefixDecode(config.beam, fusion)
    ctc_weight = config.joint_ctc_weight if config.decode == "joint" else 0.0
    return BeamDecode(
        config.beam, ctc_weight, config.length_bonus, language_model, weight, tokenizer.special, tokenizer.rules
    )


def _best_tokens(found: list[tuple[Hypothesis, ...]]) -> list[list[int]]:
    """Return the first hypothesis' tokens per utterance, [] if the search found none."""
    return [list(hypotheses[0].tokens) if hypotheses else [] for hypotheses in found]
