"""One optimizer step of a Whisper model in this trainer and in transformers, from equal random weights.

The speech is noise, since the time of a step does not depend on its content.
"""

import dataclasses
import os
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import bootstrap
import torch
import torch.nn.functional as F

from benchmarks.measuring.common import MAX_WARM_UP_STEPS, warm_up
from benchmarks.peers.processes import Contestant, Entry
from benchmarks.peers.toolkits import OwnStep, peak_bytes
from konkanivani.config import DataConfig, LossConfig, MemoryConfig, OptimizerConfig, TrainConfig, TuningConfig
from konkanivani.data.batching import Example, same_size, split_into_micro_batches
from konkanivani.data.text import SpecialTokens
from konkanivani.distributed import choose_device
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import peak_resident_mib, reset_peak_resident, resident_mib
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.asr import trained_parameters
from konkanivani.models.fine_tuning import LOW_RANK_TENSORS
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.folder import name_in_file
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.optimizer_state import learning_rate

if TYPE_CHECKING:
    # Imported in functions: the other process of the race must not load it.
    from transformers import WhisperConfig

TINY = WhisperShape(384, 6, 4, 4, 1536, 80, 51_865)
SHAPES = {
    "tiny": TINY,
    "base": replace(TINY, d_model=512, attention_heads=8, encoder_layers=6, decoder_layers=6, feedforward_dim=2048),
    "small": replace(TINY, d_model=768, attention_heads=12, encoder_layers=12, decoder_layers=12, feedforward_dim=3072),
    "digits": WhisperShape(64, 2, 2, 1, 128, 80, 400),  # the model of whisper_learning.py
    "medium_blocks": WhisperShape(
        1024, 16, 4, 1, 4096, 80, 400
    ),  # a sixth of medium's encoder, and one block of its decoder
}
DEFAULT_WINDOWS = {"digits": 6}  # seconds; other sizes: 30
END = 50_257  # the end token of the published vocabularies
SCHEDULE = OptimizerConfig(learning_rate=1e-5)
TOTAL_STEPS = 1000  # for the learning-rate schedule
LORA_RANK = 32
POSITIONS_PER_SECOND = 50  # encoder frames
LOUDNESS = 0.1
DEVIATION = 0.02


@dataclass(frozen=True)
class WhisperTerms:
    """Parameters of the workload.

    `train` is the trained part of the model. A step has `utterances` utterances of `shortest` to `longest` seconds,
    `together` of them per micro-batch. Only this trainer supports `audio_context`.
    """

    size: Literal["tiny", "base", "small", "digits", "medium_blocks"]
    train: Literal["all", "decoder", "lora"]
    utterances: int
    together: int
    shortest: float
    longest: float
    tokens_per_second: float
    device: str
    mixed_precision: bool
    audio_context: Literal["window", "speech"]
    window_seconds: int

    @property
    def shape(self) -> WhisperShape:
        """Dimensions of the network."""
        return replace(SHAPES[self.size], source_positions=POSITIONS_PER_SECOND * self.window_seconds)

    @property
    def special(self) -> SpecialTokens:
        """Special tokens, after the text tokens: the end token, then the start token."""
        end = min(END, self.shape.vocab_size - 2)
        return SpecialTokens(blank=end + 1, unknown=end + 1, start=end + 1, end=end)

    @property
    def seconds(self) -> list[float]:
        """Duration of each utterance, longest first; equal on every machine."""
        lengths = random.Random(0)
        return sorted((lengths.uniform(self.shortest, self.longest) for _ in range(self.utterances)), reverse=True)

    @property
    def labels(self) -> list[int]:
        """Number of labels of each utterance with its end token, limited by the positions of the decoder."""
        most = self.shape.target_positions
        return [1 + min(most - 1, max(1, round(self.tokens_per_second * length))) for length in self.seconds]


def build_speech(terms: WhisperTerms) -> list[Example]:
    """Return the utterances, equal on every machine."""
    generator = torch.Generator().manual_seed(0)
    return [
        Example(
            utterance_id=str(number),
            waveform=LOUDNESS * torch.randn(round(seconds * SAMPLE_RATE), generator=generator),
            tokens=torch.randint(terms.special.end, (labels - 1,), generator=generator).tolist(),
            augment_seed=None,  # no SpecAugment, as in transformers
        )
        for number, (seconds, labels) in enumerate(zip(terms.seconds, terms.labels, strict=True))
    ]


@torch.no_grad()
def fill(parameters: Iterator[tuple[str, torch.nn.Parameter]]) -> None:
    """Fill every matrix with random values that depend only on its name in the checkpoint files.

    LoRA's B matrices stay 0, as at the start of training, and the sinusoids of the encoder are kept.
    """
    for name, parameter in parameters:
        if parameter.dim() > 1 and "encoder.embed_positions" not in name and not name.endswith("lora_B"):
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.empty(parameter.shape).normal_(std=DEVIATION, generator=drawn))


TUNINGS = {
    "all": TuningConfig(),
    "decoder": TuningConfig(freeze="encoder"),
    "lora": TuningConfig(lora_rank=LORA_RANK, lora_targets=("query", "value")),
}


PLACEMENTS = {
    "": ON_CARD,
    "half": Placement(half_precision=True),
    "host": Placement(offloaded_blocks=sys.maxsize),  # all blocks
    "ahead": Placement(offloaded_blocks=sys.maxsize, prefetch=True),
}


class KonkaniVani(OwnStep):
    """`train_step` with all blocks recomputed and `together` utterances per micro-batch."""

    def __init__(self, entry: Entry, terms: WhisperTerms) -> None:
        config = dataclasses.replace(
            TrainConfig(),
            data=DataConfig(
                batch_size=terms.together,
                gradient_accumulation_steps=terms.utterances // terms.together,
                concurrent_micro_batches=entry.at_once,
            ),
            # The loss of transformers: cross entropy without smoothing.
            loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0),
            optimizer=SCHEDULE,
            memory=MemoryConfig(mixed_precision=terms.mixed_precision, gradient_checkpointing="always"),
        )
        self.global_batch = split_into_micro_batches(build_speech(terms), same_size(terms.together), terms.special)
        self.resident_before = resident_mib()
        architecture = WhisperArchitecture(terms.shape, TUNINGS[terms.train], terms.audio_context)
        device, layout = choose_device(terms.device), StateLayout(placement=PLACEMENTS[entry.setting])
        self.parts = build_step_parts(config, architecture, device, TOTAL_STEPS, layout=layout)
        # Both sides get equal weights, since both derive them from the names in the checkpoint files.
        fill(_named_as_in_files(self.parts.model))
        self.parameters = sum(parameter.numel() for parameter in trained_parameters(self.parts.model))
        warm_up(self.parts, self.global_batch)

    def features(self) -> float:
        """Compute only the features of the step; return their mean."""
        means = []
        for batch in self.global_batch.micro_batches:
            batch = batch.to(self.parts.forward.device)
            made, _ = self.parts.forward.front_end(batch.waveforms, batch.sample_lengths, None)
            means.append(made.mean())
        return float(torch.stack(means).mean())


def _named_as_in_files(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters under the names of transformers and peft, from which `fill` derives their values."""
    down, up = LOW_RANK_TENSORS
    for name, parameter in model.named_parameters():
        name = name.replace(down, "lora_A").replace(up, "lora_B")
        yield name_in_file(name), parameter


class Transformers:
    """WhisperForConditionalGeneration, gradient checkpointing, AdamW (fused), `together` utterances per micro-batch.

    The features of a micro-batch are computed before its forward pass, by transformers' extractor on the device.
    """

    def __init__(self, terms: WhisperTerms) -> None:
        import transformers

        self.version = transformers.__version__
        if terms.train == "lora":
            import peft  # noqa: F401, so that its code does not count as memory of the training
        self.terms, self.speech = terms, build_speech(terms)
        self.extractor = transformers.WhisperFeatureExtractor(
            feature_size=terms.shape.mel_bins, chunk_length=terms.window_seconds
        )
        self.resident_before = resident_mib()
        reset_peak_resident()
        self.model = build_model(terms).to(terms.device).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.trained, self.parameters = trained, sum(parameter.numel() for parameter in trained)
        decay = SCHEDULE.weight_decay
        self.optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.98), eps=1e-8, weight_decay=decay, fused=True)
        self.dtype = torch.float16 if terms.device == "cuda" else torch.bfloat16
        # bf16 has the exponent range of fp32 and needs no loss scale.
        self.scaler = torch.amp.GradScaler(terms.device, enabled=terms.mixed_precision and self.dtype == torch.float16)
        self.steps = 0
        self.warm_up()

    def warm_up(self) -> None:
        """Train until a step has changed the weights; in fp16, steps are skipped until the loss scale is low enough."""
        # AdamW creates its state in the first step that is not skipped.
        while not self.optimizer.state and self.steps < MAX_WARM_UP_STEPS:
            self.step()
        self.steps = 1  # without the skipped ones

    def step(self) -> float:
        """Run one optimizer step; return the loss in nats per label."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(SCHEDULE, self.steps, TOTAL_STEPS)
        # All labels of the global batch, for a loss that does not depend on the micro-batches.
        labels, losses = sum(self.terms.labels), []
        for first in range(0, len(self.speech), self.terms.together):
            some = self.speech[first : first + self.terms.together]
            with torch.autocast(self.terms.device, self.dtype, enabled=self.terms.mixed_precision):
                features = torch.cat([self.features_of(one.waveform) for one in some])
                loss = self.loss_sum([one.tokens for one in some], features) / labels
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        # The norm must be that of the true gradients, hence the scale is removed before clipping.
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.trained, SCHEDULE.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return float(torch.stack(losses).sum())

    def loss_sum(self, tokens: list[list[int]], features: torch.Tensor) -> torch.Tensor:
        """Return the summed cross entropy over all labels of utterances with features (B, F, T)."""
        special, longest = self.terms.special, max(map(len, tokens))
        # Teacher forcing: the inputs are the labels shifted by one. -100 is ignored by the loss.
        given = [[special.start, *said, *[special.end] * (longest - len(said))] for said in tokens]
        wanted = [[*said, special.end, *[-100] * (longest - len(said))] for said in tokens]
        inputs = torch.tensor(given, device=self.terms.device)
        labels = torch.tensor(wanted, device=self.terms.device)
        logits = self.model(input_features=features, decoder_input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")

    def features_of(self, waveform: torch.Tensor) -> torch.Tensor:
        """Return the features (1, F, T) of Whisper's window."""
        made = self.extractor(
            waveform.numpy(), sampling_rate=SAMPLE_RATE, return_tensors="pt", device=self.terms.device
        )
        return made.input_features.to(self.terms.device)

    def features(self) -> float:
        """Compute only the features of the step; return their mean."""
        return float(torch.stack([self.features_of(one.waveform).mean() for one in self.speech]).mean())

    def resident_peak_mib(self) -> float:
        """Return VmHWM in MiB on a CPU; only the constructor resets it."""
        return peak_resident_mib()

    def peak_bytes(self) -> int:
        """Return the peak of one more step, in bytes."""
        return peak_bytes(self.model, self.optimizer, self.step, self.terms.device)


def config_of(shape: WhisperShape) -> "WhisperConfig":
    """Return the configuration of this shape in transformers."""
    from transformers import WhisperConfig

    return WhisperConfig(
        vocab_size=shape.vocab_size,
        num_mel_bins=shape.mel_bins,
        d_model=shape.d_model,
        encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers,
        encoder_attention_heads=shape.attention_heads,
        decoder_attention_heads=shape.attention_heads,
        encoder_ffn_dim=shape.feedforward_dim,
        decoder_ffn_dim=shape.feedforward_dim,
        max_source_positions=shape.source_positions,
        max_target_positions=shape.target_positions,
        use_cache=False,
        pad_token_id=shape.vocab_size - 1,
    )


def build_model(terms: WhisperTerms) -> torch.nn.Module:
    """Return the model with gradient checkpointing and with its untrained parameters frozen."""
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(config_of(terms.shape))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if terms.train == "decoder":
        model.model.freeze_encoder()
    if terms.train == "lora":
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, settings)
    fill((_plain_name(name), parameter) for name, parameter in model.named_parameters())
    return model


def _plain_name(name: str) -> str:
    """Return a parameter name without peft's prefixes and suffixes."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return name.removesuffix(".default.weight") if ".lora_" in name else name


def build(entry: dict, terms: dict) -> Contestant:
    """Import the toolkit of an entry and return the contestant."""
    contestant = Entry(**entry)
    workload = WhisperTerms(**terms)
    if contestant.toolkit == "konkanivani":
        bootstrap.set_malloc_options(os.environ)  # as in every training script
        return KonkaniVani(contestant, workload)
    return Transformers(workload)
