"""Speech recogniser: encoder, heads and their losses.

Both losses take hidden states and the output layer, so that a pass (ops/chunks.py) can compute a long utterance's
logits in chunks.

B batch, T feature frames, T' encoder frames, U tokens, F mel bins, D model width, V vocabulary.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch.nn import init
from torch.overrides import TorchFunctionMode

from konkanivani.config import ModelConfig
from konkanivani.lengths import CHUNK_FRAMES, SAMPLE_RATE, BatchLengths, Lengths, on_host
from konkanivani.models.conformer import Encoder, SpeechEncoder, WrapBlock, keep_activations
from konkanivani.models.decoder import Decoder, TokenDecoder

# --------------------
# CTC and attention losses as sums, and the counts of a global batch to divide them by.


BLANK = 0
TARGET_PADDING = -1

Head = Callable[[torch.Tensor], torch.Tensor]
"""Output layer, (B, T', D) -> logits (B, T', V)."""


class Targets(Protocol):
    """Transcripts: tokens (B, U) with their lengths, and the decoder's targets (B, U + 1), padded with -1."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def token_lengths(self) -> Lengths: ...

    @property
    def targets(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class LossCounts:
    """Divisors of the losses of one global batch: its tokens, and its utterances (one end token each).

    In a captured step they are 0-dim tensors, because it would repeat the numbers of the step that was captured.
    """

    tokens: float | torch.Tensor
    utterances: float | torch.Tensor


@dataclass(frozen=True)
class LossTerm:
    """Term of the objective; with `has_end`, each utterance's end token is a target too.

    A network returns the sums of its terms in the order of `Objective.terms` (`loss_sums`). Whisper and T5 have one
    fixed term. A new term needs: a `name`, a field of `Losses` and a line in `Objective.losses`, and for another number
    of targets a branch in `divisor`; a branch in `loss_sums` and a sum in `HeadLosses` (for long utterances also in
    `ChunkedLosses`, ops/chunks.py, and for CUDA graphs in `CapturableLosses`, ops/capturable.py); its weight in
    `LossConfig` (config.py) and its place in `HybridArchitecture.objective`; its number in `StepReport` and `update`
    (training/step.py), in the records (training/progress.py) and where training/loop.py fills them. Targets other than
    the tokens are fields of `Targets`, `Batch` (data/batching.py) and `StaticInputs` (training/graphs.py). A new head's
    products count in `forward_layers` (models/architecture.py).
    """

    name: Literal["ctc", "attention"]
    weight: float
    has_end: bool

    def divisor(self, counts: LossCounts) -> float | torch.Tensor:
        """Return the number of targets, by which the summed loss is divided."""
        return counts.tokens + counts.utterances if self.has_end else counts.tokens


LossSums = tuple[torch.Tensor, ...]
"""Losses in nats, summed over a micro-batch's utterances and tokens: 0-dim tensors, one per term of the objective."""


@dataclass(frozen=True)
class Losses:
    """Losses in nats per token: the weighted sum and its terms, None for a loss that the model is not trained with."""

    all: float
    ctc: float | None
    attention: float | None


@dataclass(frozen=True)
class Objective:
    """Training objective: weighted losses per token, w L_CTC + (1 - w) L_attention (Watanabe et al., 2017).

    The fraction `intermediate_ctc` of the CTC term is computed on the encoder's middle block (Lee and Watanabe, 2021).
    It has the same targets and divisor, and is left out in validation; a loss with targets of its own is a new term.
    """

    terms: tuple[LossTerm, ...]
    label_smoothing: float = 0.0
    intermediate_ctc: float = 0.0

    def total(self, sums: LossSums, counts: LossCounts) -> torch.Tensor:
        """Return a micro-batch's share of the global batch's loss."""
        # Divided by the global batch's counts, not the micro-batch's: gradients then add up to the global batch's.
        weighted = (term.weight * summed / term.divisor(counts) for term, summed in zip(self.terms, sums, strict=True))
        return functools.reduce(operator.add, weighted)

    def losses(self, sums: Sequence[float], counts: LossCounts) -> Losses:
        """Return the losses per token of a global batch or of an evaluation."""
        pairs = zip(self.terms, sums, strict=True)
        loss_by_term = {term.name: summed / float(term.divisor(counts)) for term, summed in pairs}
        total = sum(term.weight * loss_by_term[term.name] for term in self.terms)
        return Losses(total, loss_by_term.get("ctc"), loss_by_term.get("attention"))


class HeadLosses:
    """Losses of the CTC head and of the decoder's output layer.

    `chunk_frames` is for the pass that computes longer sequences in chunks.
    """

    def ctc(
        self,
        encoded: torch.Tensor,
        head: Head,
        encoded_lengths: BatchLengths,
        tokens: torch.Tensor,
        token_lengths: Lengths,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        """Return the summed CTC loss of head(encoded (B, T', D)) against tokens (B, U); blank is 0."""
        log_probabilities = ctc_log_probabilities(head(encoded))
        return ctc_loss_sum(log_probabilities, on_host(encoded_lengths), tokens, token_lengths)

    def attention(
        self,
        decoded: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        label_smoothing: float,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        """Return the summed, smoothed cross entropy of head(decoded (B, U + 1, D)) against targets (B, U + 1).

        Padding is -1. In at least fp32 whatever the autocast.
        """
        return cross_entropy_sum(decoded, head, targets, label_smoothing)


def ctc_log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return log probabilities (T', B, V) of logits (B, T', V), in at least fp32 whatever the autocast."""
    # The forward variables of CTC span hundreds of nats (Graves et al., 2006).
    with torch.autocast(logits.device.type, enabled=False):
        return F.log_softmax(logits, dim=-1, dtype=at_least_float32(logits)).transpose(0, 1)


def ctc_loss_sum(
    log_probabilities: torch.Tensor, encoded_lengths: Lengths, tokens: torch.Tensor, token_lengths: Lengths
) -> torch.Tensor:
    """Return the summed CTC loss of log probabilities (T', B, V) against tokens (B, U); blank is 0."""
    with torch.autocast(log_probabilities.device.type, enabled=False):
        # With lengths on the host the loss never waits for the GPU; PyTorch's annotations know only tensors.
        lengths = encoded_lengths, token_lengths
        return F.ctc_loss(log_probabilities, tokens, *lengths, BLANK, reduction="sum")  # type: ignore[arg-type]


def cross_entropy_sum(decoded: torch.Tensor, head: Head, targets: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return the summed, smoothed cross entropy of head(decoded (B, U, D)) against targets (B, U), padded with -1."""
    logits = head(decoded)
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(
            # Cross entropy's log-softmax over V loses accuracy in half precision.
            logits.flatten(0, 1).to(at_least_float32(logits)),
            targets.flatten(),
            reduction="sum",
            label_smoothing=label_smoothing,
            ignore_index=TARGET_PADDING,
        )


def at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    """Return the tensor's dtype, or float32 if it is a half-precision dtype."""
    return torch.promote_types(tensor.dtype, torch.float32)


# --------------------
# Embedding that is also the output layer (Press and Wolf, 2017), as in Whisper and T5 1.0.


@dataclass(frozen=True)
class TiedHead:
    """Weight (V, D) of the output layer; `gradient_buffer` returns the tensor to add its gradient to, if given."""

    weight: torch.Tensor
    gradient_buffer: Callable[[], torch.Tensor] | None = None


def in_full(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors in at least fp32."""
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


class TiedEmbedding(torch.nn.Embedding):
    """Token embedding whose weight is also the output layer's: logits are products with the same vectors."""

    bias = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return vectors (…, D) of tokens (…) in at least fp32, as the residual stream is."""
        return in_full(super().forward(tokens))

    def with_head(self, tokens: torch.Tensor) -> tuple[torch.Tensor, TiedHead]:
        """Return vectors (B, U, D) of tokens (B, U), on their device, and the output layer."""
        vectors = self(tokens.to(self.weight.device)).to(tokens.device)
        return vectors, TiedHead(self.weight)

    def logits(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return logits (…, V) of decoded (…, D)."""
        return F.linear(decoded, self.weight)


class VocabularyLoss:
    """Loss of the output layer over the vocabulary."""

    def __call__(
        self, decoded: torch.Tensor, head: TiedHead, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        """Return the summed, smoothed cross entropy of decoded (B, U, D) against targets (B, U), padded with -1."""
        weight = head.weight.to(decoded.device)
        return cross_entropy_sum(decoded, lambda rows: F.linear(rows, weight), targets, label_smoothing)


# --------------------
# Hybrid CTC/attention model: one encoder shared by a CTC head and an attention decoder (Watanabe et al., 2017).


@dataclass(frozen=True)
class ASROutput:
    """Result of a forward pass: encoded (B, T', D), its lengths, decoded (B, U + 1, D).

    `middle` (B, T', D) is the output of the encoder's middle block before any norm; None for Whisper and T5, which have
    no intermediate CTC.
    `ctc_head` turns `encoded` into CTC logits (B, T', V), `decoder.output` turns `decoded` into attention logits
    (B, U + 1, V). `decoded` is None without a decoder.
    """

    encoded: torch.Tensor
    middle: torch.Tensor | None
    encoded_lengths: BatchLengths
    decoded: torch.Tensor | None


class SpeechNetwork(torch.nn.Module):
    """Base of all networks, T5 included: an encoder with a CTC head, a decoder or both."""

    encoder: SpeechEncoder
    ctc_head: torch.nn.Linear | None
    decoder: TokenDecoder | None

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """Parts that can be recomputed in the backward pass, in forward order; the subsampling is the first."""
        return [self.encoder.subsampling, *self.encoder.blocks, *(self.decoder.blocks if self.decoder else ())]

    @property
    def sliced_weights(self) -> tuple[torch.Tensor, ...]:
        """Weights outside of the blocks that may stay off the model's device; by default none."""
        return ()

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: BatchLengths,
        decoder_tokens: torch.Tensor,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> ASROutput:
        """Run with teacher forcing: features (B, T, F) with their lengths, decoder_tokens (B, U + 1)."""
        raise NotImplementedError

    def loss_sums(self, output: ASROutput, labels: Targets, objective: Objective, chunk_frames: int) -> LossSums:
        """Return each term of the objective, summed over the utterances."""
        raise NotImplementedError

    def encode(self, features: torch.Tensor, feature_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """Return encoded (B, T', D) and lengths of features (B, T, F), or of the front end's other output."""
        return self.encoder(features, feature_lengths)

    def example_input(self) -> torch.Tensor:
        """Return a short input of the front end: half a second of silence."""
        return torch.zeros(SAMPLE_RATE // 2, dtype=next(self.parameters()).dtype)

    def ctc_logits(
        self, features: torch.Tensor, feature_lengths: Lengths, wrap_block: WrapBlock = keep_activations
    ) -> tuple[torch.Tensor, Lengths]:
        """Return logits (B, T', V) and their lengths from the encoder and CTC head alone, for greedy decoding."""
        if self.ctc_head is None:
            raise ValueError("a network without a CTC head has no CTC logits")
        encoded, encoded_lengths = self.encoder(features, feature_lengths, wrap_block)
        return self.ctc_head(encoded), on_host(encoded_lengths)


class KonkaniVaniASR(SpeechNetwork):
    """Conformer or Transformer encoder with a CTC head, a Transformer decoder or both."""

    encoder: Encoder
    decoder: Decoder | None

    def __init__(self, config: ModelConfig, vocab_size: int, mel_bins: int, has_ctc: bool = True) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, mel_bins)
        self.ctc_head = torch.nn.Linear(config.d_model, vocab_size) if has_ctc else None
        # If the blank (token 0) starts rare, every frame raises it at once, and for long the model emits nothing else.
        # This holds for a random encoder; `reset_output_heads` is for a trained one, where a rare blank learns faster.
        if self.ctc_head is not None:
            self.ctc_head.bias.data[0] += 3.0  # docs/experiments.md, "CTC bias towards the blank"
        self.decoder = Decoder(config, vocab_size) if config.decoder_layers else None
        self.losses = HeadLosses()

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: BatchLengths,
        decoder_tokens: torch.Tensor,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> ASROutput:
        frames = self.encoder.with_middle(features, feature_lengths, wrap_block, chunk_frames)
        encoded, _, encoded_lengths = frames
        decoded = None
        if self.decoder is not None:
            decoded = self.decoder(decoder_tokens, encoded, encoded_lengths, wrap_block)
        return ASROutput(*frames, decoded)

    def loss_sums(self, output: ASROutput, labels: Targets, objective: Objective, chunk_frames: int) -> LossSums:
        sums = []
        for term in objective.terms:
            if term.name == "ctc":
                sums.append(self._ctc_loss_sum(output, labels, objective.intermediate_ctc, chunk_frames))
            elif term.name == "attention":
                sums.append(self._attention_loss_sum(output, labels, objective.label_smoothing, chunk_frames))
            else:
                raise ValueError(f"the network has no loss {term.name}")
        return tuple(sums)

    def _attention_loss_sum(
        self, output: ASROutput, labels: Targets, label_smoothing: float, chunk_frames: int
    ) -> torch.Tensor:
        if self.decoder is None or output.decoded is None:
            raise ValueError("a network without a decoder has no attention loss")
        head = self.decoder.output
        return self.losses.attention(output.decoded, head, labels.targets, label_smoothing, chunk_frames)

    def _ctc_loss_sum(
        self, output: ASROutput, labels: Targets, intermediate_ctc: float, chunk_frames: int
    ) -> torch.Tensor:
        """Return the CTC loss; in training, the fraction `intermediate_ctc` of it is the middle block's.

        (1 - w) L_CTC + w L_inter (Lee and Watanabe, 2021); both share the encoder's norm and the head.
        """
        head = self.ctc_head
        if head is None:
            raise ValueError("a network without a CTC head has no CTC loss")
        lengths = output.encoded_lengths
        targets = labels.tokens, labels.token_lengths
        loss = self.losses.ctc(output.encoded, head, lengths, *targets, chunk_frames)
        if not intermediate_ctc or not self.training or output.middle is None:
            return loss
        middle = self.encoder.norm(output.middle)
        middle_loss = self.losses.ctc(middle, head, lengths, *targets, chunk_frames)
        return (1 - intermediate_ctc) * loss + intermediate_ctc * middle_loss


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained parameters in the model's order: only they have gradients, moments and an all-reduce slot."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of trained parameters (scalars)."""
    return sum(parameter.numel() for parameter in trained_parameters(model))


def frozen_count(model: torch.nn.Module) -> int:
    """Return the number of frozen parameters (scalars)."""
    return sum(parameter.numel() for parameter in model.parameters()) - parameter_count(model)


class SkipInit(TorchFunctionMode):
    """Mode that skips the initialisation of parameters, for tensors without storage (device `meta`)."""

    # To "fill" a meta tensor, torch imports its compiler: 116 MiB and one second.
    FILLS = (init.uniform_, init.normal_, init.kaiming_uniform_, torch.Tensor.zero_, torch.Tensor.fill_)

    def __torch_function__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        return None if function in self.FILLS else function(*args, **(kwargs or {}))
