"""One training step in this trainer, SpeechBrain and ESPnet, on models with the dimensions of the preset `original`.

Conformer, 12 + 6 layers, feed-forward of four times the width, 4 heads, 1,000 tokens; CTC and attention losses, label
smoothing, AdamW. The other toolkits are trained as in their own recipes. The dropout of the workload applies to
residual branches and, as usual in the other toolkits, there also to attention probabilities.

B batch, T feature frames, F mel bins, U tokens.
"""

import bisect
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import bootstrap
import torch
import torch.nn.functional as F

from benchmarks.measuring.common import (
    TOTAL_STEPS,
    VOCABULARY,
    FixedSpeech,
    build_global_batch,
    build_speech,
    peak_mib,
    take_features_as_given,
    warm_up,
)
from benchmarks.peers.processes import Contestant, Entry
from konkanivani.config import PRESETS, DataConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.console import MIB
from konkanivani.data.batching import GlobalBatch
from konkanivani.distributed import choose_device
from konkanivani.errors import ResourceError
from konkanivani.memory.monitor import peak_resident_mib, reset_peak_resident, resident_mib
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import parameter_count
from konkanivani.planning.tensors import LiveBytes
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step

CTC_SHARE, LABEL_SMOOTHING = 0.3, 0.1  # of the joint loss in every toolkit


@dataclass(frozen=True)
class Terms:
    """Workload: utterances of the step, their durations in seconds, width, dropout of the residual branches, device."""

    utterances: int
    shortest: float
    longest: float
    width: int
    dropout: float
    device: str
    mixed_precision: bool


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch: features (B, T, F), frames (B,), tokens (B, U) without start and end, token_lengths (B,)."""

    features: torch.Tensor
    frames: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor

    def to(self, device: str) -> "MicroBatch":
        """Return the micro-batch on another device."""
        return MicroBatch(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def cut(speech: FixedSpeech, micro_batches: int) -> list[MicroBatch]:
    """Split utterances, longest first, into micro-batches of equal numbers, each padded to its own longest."""
    size = len(speech.frames) // micro_batches
    pieces = []
    for start in range(0, len(speech.frames), size):
        rows = slice(start, start + size)
        frames, token_lengths = speech.frames[rows], speech.token_lengths[rows]
        features, tokens = speech.features[rows, : int(frames.max())], speech.tokens[rows, : int(token_lengths.max())]
        pieces.append(MicroBatch(features, frames, tokens, token_lengths))
    return pieces


def peak_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], float], device: str) -> int:
    """Return the peak of one more step in bytes, with weights and moments.

    On CUDA, it is the allocator's; on a CPU, the peak of live tensors.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    live = LiveBytes()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    # Existing storages are counted explicitly: the mode only sees tensors that are created within it.
    live.count([*model.parameters(), *model.buffers(), *filter(torch.is_tensor, moments)])
    with live:
        step()
    return live.peak


def model_of(terms: Terms) -> ModelConfig:
    """Return the preset `original` with the width and dropout of the workload."""
    return dataclasses.replace(PRESETS["original"], d_model=terms.width, dropout=terms.dropout)


class OwnStep:
    """`train_step` of a subclass's `parts` on its `global_batch`, as a contestant that counts its `steps`."""

    version = "this tree"
    parts: StepParts
    global_batch: GlobalBatch
    steps = 0

    def step(self) -> float:
        """Run one optimizer step; return the loss in nats per token."""
        self.steps += 1
        return train_step(self.parts, self.global_batch, self.steps).loss

    def resident_peak_mib(self) -> float:
        """Return the peak resident memory over all phases, in MiB."""
        # On a CPU, the monitor resets VmHWM in each phase, so that it must be read from the monitor.
        return self.parts.monitor.overall_peak_mib()

    def peak_bytes(self) -> int:
        """Return the peak of one more step, in bytes."""
        return round(peak_mib(self.parts, self.global_batch) * MIB)


class KonkaniVani(OwnStep):
    """`train_step` on the preset `original`; the setting `recompute` is --gradient_checkpointing always.

    Within a limit, the fewest possible blocks are recomputed, as with --gradient_checkpointing auto.
    """

    def __init__(self, entry: Entry, terms: Terms) -> None:
        recompute = "always" if entry.setting == "recompute" else "never"
        config = dataclasses.replace(
            TrainConfig(),
            data=DataConfig(
                batch_size=terms.utterances // entry.micro_batches,
                gradient_accumulation_steps=entry.micro_batches,
                concurrent_micro_batches=entry.at_once,
            ),
            model=model_of(terms),
            memory=MemoryConfig(mixed_precision=terms.mixed_precision, gradient_checkpointing=recompute),
        )
        device = choose_device(terms.device)
        self.global_batch = build_global_batch(
            build_speech(terms.utterances, terms.shortest, terms.longest), entry.micro_batches
        )
        # Measured after the data are in memory and before the model is built.
        self.resident_before = resident_mib()
        architecture = architecture_of(config, VOCABULARY)
        self.parts = build_step_parts(config, architecture, device, TOTAL_STEPS, take_features_as_given)
        self.parameters = parameter_count(self.parts.model)
        warm_up(self.parts, self.global_batch)
        # After the warm-up: the optimizer state is part of the measured peak.
        if entry.limit_mib:
            self.parts = min_recomputed(self.parts, self.global_batch, entry.limit_mib)


def min_recomputed(parts: StepParts, global_batch: GlobalBatch, limit_mib: int) -> StepParts:
    """Return the step with the fewest recomputed blocks whose measured peak is within the limit.

    Raises ResourceError if the peak exceeds the limit with all blocks recomputed.
    """
    ways = [parts.recomputing(RecomputePolicy.first(count)) for count in range(len(parts.model.blocks) + 1)]
    # The peak decreases with the number of recomputed blocks; each comparison runs a step.
    fewest = bisect.bisect_left(ways, True, key=lambda way: peak_mib(way, global_batch) <= limit_mib)
    if fewest == len(ways):
        raise ResourceError(f"No step fits into {limit_mib} MiB. Give a higher limit, or cut the batch finer.")
    return ways[fewest]


BINS, HEADS, ENCODER_LAYERS, DECODER_LAYERS, KERNEL = 80, 4, 12, 6, 31
BLANK, START, END = 0, 1, 2


class ESPnet(torch.nn.Module):
    """ESPnet 2 model: espnet2.asr with relative positions and conv2d subsampling, as in its Conformer recipes."""

    package = "espnet"

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        from espnet2.asr.ctc import CTC
        from espnet2.asr.decoder.transformer_decoder import TransformerDecoder
        from espnet2.asr.encoder.conformer_encoder import ConformerEncoder
        from espnet2.asr.espnet_model import ESPnetASRModel

        rates = {"dropout_rate": dropout, "positional_dropout_rate": dropout}
        encoder = ConformerEncoder(
            BINS,
            output_size=width,
            attention_heads=HEADS,
            linear_units=4 * width,
            num_blocks=ENCODER_LAYERS,
            attention_dropout_rate=dropout,
            input_layer="conv2d",
            macaron_style=True,
            rel_pos_type="latest",
            pos_enc_layer_type="rel_pos",
            selfattention_layer_type="rel_selfattn",
            activation_type="swish",
            use_cnn_module=True,
            cnn_module_kernel=KERNEL,
            **rates,
        )
        decoder = TransformerDecoder(
            VOCABULARY,
            width,
            attention_heads=HEADS,
            linear_units=4 * width,
            num_blocks=DECODER_LAYERS,
            self_attention_dropout_rate=dropout,
            src_attention_dropout_rate=dropout,
            **rates,
        )
        tokens = ["<blank>", "<unk>", *(str(number) for number in range(VOCABULARY - 3)), "<sos/eos>"]
        self.model = ESPnetASRModel(
            VOCABULARY,
            tokens,
            **dict.fromkeys(("frontend", "specaug", "normalize", "preencoder", "postencoder", "joint_network")),
            encoder=encoder,
            decoder=decoder,
            ctc=CTC(VOCABULARY, width),
            ctc_weight=CTC_SHARE,
            lsm_weight=LABEL_SMOOTHING,
            report_cer=False,
            report_wer=False,
        )

    def loss(self, piece: MicroBatch) -> torch.Tensor:
        """Return ESPnet's joint loss."""
        return self.model(piece.features, piece.frames, piece.tokens, piece.token_lengths)[0]


class SpeechBrain(torch.nn.Module):
    """SpeechBrain model: convolutional front end and TransformerASR, as in its LibriSpeech recipe."""

    package = "speechbrain"

    def __init__(self, width: int, dropout: float, attention: str = "RoPEMHA") -> None:
        super().__init__()
        from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
        from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

        self.convolutions = ConvolutionFrontEnd(
            (8, 10, BINS),
            num_blocks=2,
            num_layers_per_block=1,
            out_channels=(64, 32),
            kernel_sizes=(3, 3),
            strides=(2, 2),
            residuals=(False, False),
            dropout=dropout,
        )
        self.transformer = TransformerASR(
            tgt_vocab=VOCABULARY,
            input_size=BINS // 4 * 32,  # two strides of 2, 32 channels
            d_model=width,
            nhead=HEADS,
            num_encoder_layers=ENCODER_LAYERS,
            num_decoder_layers=DECODER_LAYERS,
            d_ffn=4 * width,
            dropout=dropout,
            activation=torch.nn.GELU,
            conformer_activation=torch.nn.GELU,
            encoder_module="conformer",
            attention_type=attention,
            normalize_before=True,
            causal=False,
        )
        self.by_ctc = torch.nn.Linear(width, VOCABULARY)
        self.by_attention = torch.nn.Linear(width, VOCABULARY)

    def loss(self, piece: MicroBatch) -> torch.Tensor:
        """Return the joint loss of the recipe; SpeechBrain expects lengths as fractions of the longest."""
        from speechbrain.nnet.losses import ctc_loss, kldiv_loss

        frames = piece.frames / piece.frames.max()
        # Decoder inputs are start and tokens, targets are tokens and end.
        begun, ended = F.pad(piece.tokens, (1, 0), value=START), F.pad(piece.tokens, (0, 1), value=BLANK)
        # The end follows the last token of each utterance, before the padding.
        ended = ended.scatter(1, piece.token_lengths[:, None], END)
        encoded, predicted = self.transformer(self.convolutions(piece.features), begun, frames, pad_idx=BLANK)
        by_ctc, by_attention = self.by_ctc(encoded).log_softmax(-1), self.by_attention(predicted).log_softmax(-1)
        tokens, until_end = piece.token_lengths / piece.token_lengths.max(), piece.token_lengths + 1
        ctc = ctc_loss(by_ctc, piece.tokens, frames, tokens, blank_index=BLANK)
        attention = kldiv_loss(
            by_attention, ended, length=until_end / until_end.max(), label_smoothing=LABEL_SMOOTHING, pad_idx=BLANK
        )
        return CTC_SHARE * ctc + (1 - CTC_SHARE) * attention


class OtherToolkit:
    """One of the models above in a typical training loop; on CUDA, mixed precision is fp16 with loss scaling."""

    def __init__(self, entry: Entry, terms: Terms) -> None:
        import_toolkit(entry)
        self.resident_before = resident_mib()
        reset_peak_resident()
        model = build_model(entry, terms)
        self.version = version(model.package)
        self.model, self.terms = model.to(terms.device).train(), terms
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.dtype = torch.float16 if terms.device == "cuda" else torch.bfloat16
        # bf16 has the exponent range of fp32 and needs no loss scale.
        self.scaler = torch.amp.GradScaler(terms.device, enabled=terms.mixed_precision and self.dtype == torch.float16)
        self.pieces = cut(build_speech(terms.utterances, terms.shortest, terms.longest), entry.micro_batches)

    def step(self) -> float:
        """Run one optimizer step; return the mean of the micro-batches' losses."""
        losses = []
        for piece in self.pieces:
            with torch.autocast(self.terms.device, self.dtype, enabled=self.terms.mixed_precision):
                loss = self.model.loss(piece.to(self.terms.device)) / len(self.pieces)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        # The norm must be that of the true gradients, hence the scale is removed before clipping.
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    def resident_peak_mib(self) -> float:
        """Return VmHWM in MiB on a CPU; only the constructor resets it."""
        return peak_resident_mib()

    def peak_bytes(self) -> int:
        """Return the peak of one more step, in bytes."""
        return peak_bytes(self.model, self.optimizer, self.step, self.terms.device)


def import_toolkit(entry: Entry) -> None:
    """Import the modules of the model, so that their code does not count as memory of the training."""
    if entry.toolkit == "espnet":
        import espnet2.asr.encoder.conformer_encoder
        import espnet2.asr.espnet_model  # noqa: F401
    else:
        import speechbrain.lobes.models.convolution
        import speechbrain.lobes.models.transformer.TransformerASR
        import speechbrain.nnet.losses  # noqa: F401


def build_model(entry: Entry, terms: Terms) -> ESPnet | SpeechBrain:
    """Return the toolkit's model with its random initial weights."""
    torch.manual_seed(0)
    if entry.toolkit == "espnet":
        return ESPnet(terms.width, terms.dropout)
    return SpeechBrain(terms.width, terms.dropout, "RelPosMHAXL" if entry.setting == "relative" else "RoPEMHA")


def build(entry: dict, terms: dict) -> Contestant:
    """Import the toolkit of an entry and return the contestant."""
    contestant = Entry(**entry)
    workload = Terms(**terms)
    if contestant.toolkit == "konkanivani":
        bootstrap.set_malloc_options(os.environ)  # as in every training script
        return KonkaniVani(contestant, workload)
    return OtherToolkit(contestant, workload)
