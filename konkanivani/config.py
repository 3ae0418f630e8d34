"""All settings of training and decoding, in groups; the string under each field is its help text.

`flags.py` makes one flag of each field, under the field's own name. Does not import torch.
"""

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeVar

AUTO: Final = "auto"
DEFAULT_RATE = 1e-3
DEFAULT_EFFECTIVE_BATCH_SIZE = 8
AudioContext = Literal["window", "speech"]
Preset = Literal["original", "optimized", "minimal"]
WeightDtype = Literal["fp32", "bf16"]
DecodingMethod = Literal["greedy", "prefix", "attention", "joint"]
IMPORTED: Final = "imported"
Value = TypeVar("Value")
# Type of a setting whose default fits every native model; only an imported checkpoint brings another value. Checkpoints
# store it and command lines accept it, so that older commands work, but `--help` does not list it.
Imported = Annotated[Value, IMPORTED]
# Settings of PretrainedConfig that have no effect without training.
TRAINING_ONLY = ("timestamp_share", "forgetting_manifest", "forgetting_language", "long_texts")
# Old flag names, accepted on command lines and in checkpoints.
OLD_NAMES = {
    # Keys are the old names, values the current ones.
    "rir_share": "rir_prob",
    "noise_share": "noise_prob",
    "micro_batches_at_once": "concurrent_micro_batches",
    "edges": "frame_padding",
    "deviation": "std_ddof",
    "power_guard": "log_floor_mode",
}


@dataclass(frozen=True)
class ModelConfig:
    """Model shape."""

    # The head dimension must be even, since rotary positions rotate pairs of channels.
    d_model: int = 256
    """Model dimension of encoder and decoder."""
    encoder_layers: int = 12
    """Number of encoder blocks."""
    decoder_layers: int = 6
    """Number of decoder blocks (0: CTC only)."""
    attention_heads: int = 4
    """Attention heads; d_model / heads must be even."""
    feedforward_dim: int | None = None
    """Feed-forward dimension (None: 4 x d_model)."""
    encoder_type: Literal["conformer", "transformer"] = "conformer"
    """Type of encoder block."""
    convolution_kernel: int = 31
    """Kernel size of the Conformer convolution (odd)."""
    subsampling_channels: int = 64
    """Channels of the subsampling."""
    dropout: float = 0.1
    """Dropout probability."""
    attention_positions: Imported[Literal["rotary", "relative"]] = "rotary"
    """Position encoding of the encoder's attention: rotary, or relative (Transformer-XL, with biases per head)."""
    convolution_norm: Imported[Literal["layer", "none"]] = "layer"
    """Normalisation after a Conformer block's depthwise convolution; none: for a folded BatchNorm."""
    subsampling: Imported[Literal["valid", "striding", "separable"]] = "valid"
    """Subsampling: valid (4x, unpadded), striding (4x, padded) or separable (8x, padded, depthwise separable)."""
    scaled_input: Imported[bool] = False
    """Multiply the input of the encoder blocks by sqrt(d_model)."""
    # Literal instead of bool, so that the flag takes a value: there are no negative flags.
    entry_norm: Imported[Literal[True, False]] = True
    """Apply a layer norm before the first Conformer block, as before every other block."""
    biases: Imported[Literal[True, False]] = True
    """Add biases to the linear layers and convolutions of the encoder blocks."""

    @property
    def resolved_feedforward_dim(self) -> int:
        """`feedforward_dim`, or 4 x d_model if it is None."""
        return 4 * self.d_model if self.feedforward_dim is None else self.feedforward_dim


@dataclass(frozen=True)
class FeatureConfig:
    """Log-mel features of 16 kHz audio."""

    mel_bins: int = 80
    """Number of mel bins."""
    fft_samples: Imported[int] = 512
    """FFT size, in samples."""
    window_samples: Imported[int] = 400
    """Length of the centred Hann window, in samples (400: 25 ms)."""
    hop_samples: Imported[int] = 160
    """Hop between feature frames, in samples (160: 10 ms)."""
    smallest_power: Imported[float] = 1e-16
    """Lower bound of the mel power before the logarithm, or a constant added to it (see --log_floor_mode)."""
    log_floor_mode: Imported[Literal["floor", "added"]] = "floor"
    """How --smallest_power keeps the logarithm finite: floor (clamp) or added."""
    preemphasis: Imported[float] = 0.0
    """Pre-emphasis coefficient: x[n] - c x[n-1] (0: off)."""
    window: Imported[Literal["periodic", "symmetric"]] = "periodic"
    """Periodic or symmetric Hann window."""
    frame_padding: Imported[Literal["none", "zeros", "reflected"]] = "none"
    """Padding at both ends of the waveform: none, zeros, or reflected."""
    mel_scale: Imported[Literal["htk", "slaney"]] = "htk"
    """Mel scale: htk, or slaney with area normalisation."""
    std_ddof: Imported[Literal["population", "sample"]] = "population"
    """Divisor of the standard deviation in feature normalisation: n (population) or n - 1 (sample)."""
    dynamic_range: Imported[float] = 80.0
    """Floor of the log-mel features, in dB below the utterance's maximum (0: none)."""
    dc_removal: Imported[Literal["none", "frame"]] = "frame"
    """Remove the DC offset of each feature frame."""
    normalization: Imported[Literal["utterance", "speech", "peak"]] = "speech"
    """Feature normalisation: mean and variance of all frames of the utterance, of its speech frames, or constants
    relative to its maximum."""


@dataclass(frozen=True)
class DataConfig:
    """Training data and batching."""

    train_manifest: str | None = None
    """JSONL manifest to train on: audio_filepath, duration, text, optionally speaker."""
    valid_manifest: str | None = None
    """JSONL manifest for validation after each epoch."""
    test_manifest: str | None = None
    """JSONL manifest to score after training."""
    audio_roots: tuple[str, ...] = ()
    """Folders that may contain audio, besides each manifest's own."""
    test_decode: Literal["auto", "greedy", "prefix", "attention", "joint"] = "auto"
    """Second scoring of the test manifest, with beam 10 (auto: joint if possible; greedy: none)."""
    conditions: bool = False
    """Score the test manifest also with simulated noise, rooms and lines."""
    batch_size: int | Literal["auto"] = 2
    """Utterances per micro-batch; auto: chosen per length to fit the memory."""
    gradient_accumulation_steps: int | Literal["auto"] = "auto"
    """Micro-batches per optimizer step (auto: an effective batch of 8 utterances; under ten hours of speech, 20 s of
    audio)."""
    effective_batch_size: int | None = None
    """Utterances per optimizer step with --batch_size auto (None: as --gradient_accumulation_steps auto)."""
    concurrent_micro_batches: int | Literal["auto"] = "auto"
    """CPU only: run N micro-batches in parallel, each on a share of the cores; faster, but needs more memory (auto: 2
    if there are two threads and the memory plan allows it)."""
    train_subset: float = 100.0
    """Percentage of the training utterances to use."""
    first_epoch: Literal["auto", "shuffled", "shortest_first"] = "auto"
    """Order of the first epoch: shuffled, or shortest_first, which helps CTC to align early (auto: shortest_first from
    scratch under ten hours of speech)."""
    min_duration: float = 0.2
    """Skip shorter training utterances, in seconds."""
    max_duration: float = 20.0
    """Skip longer training utterances, in seconds."""
    max_tokens: int = 400
    """Skip training utterances with more tokens."""
    max_validation_duration: float = 30.0
    """Skip longer validation and test utterances, in seconds."""
    validation_batch_seconds: float = 60.0
    """Seconds of padded audio per validation batch."""
    # Parsed in console.py, which also accepts a plain fraction.
    max_rejected: str = "1%"
    """Maximum share of broken manifest rows, which are skipped, such as 1% or 0.01."""
    num_workers: int = 2
    """Data loading processes (0: the training process)."""
    loader_timeout: float = 300.0
    """Loading process timeout in seconds."""


@dataclass(frozen=True)
class TextConfig:
    """Text normalisation and tokenizer."""

    tokenizer_type: Literal["auto", "unigram", "bpe", "char"] = "auto"
    """SentencePiece model type (auto: char under ten hours of speech, else unigram)."""
    vocab_size: int = 1000
    """Vocabulary size; reduced if the text is too short."""
    digits: Literal["keep", "spell"] = "keep"
    """Keep digits, or spell each as its Konkani word."""


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of the training audio.

    Drawn per (seed, epoch, utterance).
    """

    speed_perturbation: tuple[float, ...] | Literal["auto"] = "auto"
    """Speed factors to draw from (auto: by the amount of speech, docs/training.md)."""
    rir_manifest: str | None = None
    """JSONL manifest of room impulse responses: audio_filepath, duration."""
    rir_prob: float = 0.3
    """Probability of reverberation, with --rir_manifest."""
    noise_manifest: str | None = None
    """JSONL manifest of noise to add: audio_filepath, duration."""
    noise_snr: str = "5:25"
    """Signal-to-noise ratio in dB, lowest:highest."""
    noise_prob: float = 0.5
    """Probability of noise, with --noise_manifest."""
    gain: float = 0.0
    """Random gain of up to N dB up or down (0: off)."""
    augmentation: Literal["auto", "none", "light", "strong"] = "auto"
    """Simulate other recordings: silence, noise, rooms, telephones (auto: light from scratch)."""
    frequency_masks: int = 2
    """SpecAugment: number of frequency masks."""
    frequency_mask_bins: int = 15
    """SpecAugment: maximum width in bins."""
    time_masks: int = 2
    """SpecAugment: time masks per utterance."""
    time_mask_share: float = 0.08
    """SpecAugment: maximum length, as a fraction of the utterance."""


@dataclass(frozen=True)
class LossConfig:
    """Training loss."""

    ctc_weight: float | Literal["auto"] = "auto"
    """Weight of the CTC loss; the attention loss gets the rest (0: no CTC; auto: 0.7 under ten hours of speech, else
    0.3; 1 without a decoder)."""
    intermediate_ctc_weight: float = 0.0
    """Share of the CTC loss computed after the middle encoder block, with the same head."""
    label_smoothing: float = 0.1
    """Label smoothing of attention."""


@dataclass(frozen=True)
class PretrainedConfig:
    """Pretrained Whisper or T5 model."""

    pretrained: str | None = None
    """Folder of a Whisper or T5 model in Hugging Face format, or a name on the hub such as openai/whisper-small."""
    revision: str | None = None
    """Branch, tag or commit of a --pretrained name on the hub (None: main); checkpoints store the commit."""
    language: str | None = None
    """Language code of the transcripts; Whisper has no Konkani: use mr or hi."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """Transcribe in the spoken language, or translate to English."""
    audio_context: AudioContext | None = None
    """Encoder input: the full 30 s window, or only the speech, which needs far less memory and time for short
    utterances (None: as the folder says, else window)."""
    timestamp_share: float = 0.0
    """Fraction of the training utterances, drawn each epoch, with timestamp labels, so that the model does not unlearn
    timestamps."""
    forgetting_manifest: str | None = None
    """JSONL manifest of speech the model already knows, scored before and after training to measure forgetting."""
    forgetting_language: str | None = None
    """Language of --forgetting_manifest (None: --language)."""
    input_field: str = "input"
    """T5: field of a manifest's rows with the input text."""
    target_field: str = "text"
    """T5: field of a manifest's rows with the target text."""
    max_input_tokens: int | None = None
    """T5: largest number of tokens of an input, end token included (None: 512)."""
    max_target_tokens: int | None = None
    """T5: largest number of tokens of a target, end token included (None: 512)."""
    long_texts: Literal["cut", "skip"] = "cut"
    """T5: cut texts beyond these limits, or skip their rows."""


@dataclass(frozen=True)
class TuningConfig:
    """Fine-tuning with --init_from or --pretrained: trained parts and LoRA."""

    freeze: Literal["none", "encoder"] | int = "none"
    """Freeze the encoder, or everything up to its first N blocks."""
    train_layers: int | None = None
    """Train only the last N encoder blocks and everything after them (None: train all)."""
    new_tokenizer: bool = False
    """With --init_from: train a new tokenizer and head."""
    freeze_steps: int | None = None
    """Train only the head for the first N steps, then warm up the other layers (None: the warm-up steps with
    --new_tokenizer, else 0)."""
    encoder_rate_factor: float | None = None
    """Multiplier of the encoder's learning rate (None: 0.1 with --new_tokenizer, else 1)."""
    frozen_dtype: Literal["fp32", "half"] = "fp32"
    """Number format of frozen weight matrices."""
    lora_rank: int = 0
    """LoRA rank; all other weights are frozen (0: no LoRA)."""
    lora_alpha: float = 0.0
    """LoRA scale is alpha / rank (0: twice the rank)."""
    lora_targets: tuple[str, ...] = ("query_key_value", "query", "key_value", "value")
    """Layers that get a LoRA adapter; also available: key, output, expand, contract, gate."""

    @property
    def is_used(self) -> bool:
        """Whether some weights are frozen."""
        return self.freeze not in ("none", 0) or self.train_layers is not None or self.lora_rank > 0

    @property
    def encoder_factor(self) -> float:
        """Multiplier of the encoder's learning rate."""
        return (0.1 if self.new_tokenizer else 1.0) if self.encoder_rate_factor is None else self.encoder_rate_factor

    @property
    def scale(self) -> float:
        """Multiplier of the product of the LoRA matrices: alpha / rank."""
        # Rank 0 means no LoRA; max() only avoids the division by zero.
        return (self.lora_alpha or 2 * self.lora_rank) / max(1, self.lora_rank)


@dataclass(frozen=True)
class DecodingConfig:
    """Decoding."""

    decode: DecodingMethod = "greedy"
    """greedy (best CTC path), prefix (CTC beam search), attention (decoder beam search) or joint (both scores)."""
    beam: int = 10
    """Beam size."""
    joint_ctc_weight: float = 0.5
    """Weight of CTC in --decode joint; the attention decoder gets the rest."""
    length_bonus: float = 0.0
    """Score added to a hypothesis per token."""
    language_model: str | None = None
    """ARPA file of a token n-gram model for shallow fusion (written by train_language_model.py)."""
    language_model_weight: float = 0.3
    """Weight of the language model's log probability."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate schedule."""

    optimizer: Literal["adamw", "adamw8bit", "adafactor"] = "adamw"
    """AdamW, AdamW with 8-bit moments, or Adafactor: 16, 10 and 8 bytes per trained parameter."""
    learning_rate: float | Literal["auto"] = "auto"
    """Peak learning rate (auto: 1e-3, or 2e-3 for a small model from scratch on 45 min to 10 h of speech)."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """Decay after warm-up: cosine to 1 % of the peak at the last step, or inverse square root."""
    warmup_steps: int | Literal["auto"] = "auto"
    """Linear warm-up steps (auto: 10 %, at most 500)."""
    continue_schedule: Literal["keep", "stretch", "warm"] = "keep"
    """With --resume and a different number of steps: keep the schedule, then its final rate; stretch it over the new
    length; or warm: stretch it after a linear ramp from the latest rate, over --warmup_steps."""
    weight_decay: float = 0.01
    """Decoupled weight decay of weight matrices."""
    max_grad_norm: float = 1.0
    """Clip gradients to this norm."""


@dataclass(frozen=True)
class MemoryConfig:
    """Memory use."""

    mixed_precision: bool = False
    """Mixed precision: fp16 on CUDA, bf16 on a CPU."""
    amp_dtype: Literal["fp16", "bf16"] = "fp16"
    """Number format of --mixed_precision on CUDA."""
    gradient_checkpointing: Literal["always", "auto", "never"] = "never"
    """Recompute activations in the backward pass: always, in as few blocks as needed (auto), or never."""
    # Parsed in console.py: GB and GiB differ.
    memory_budget: str | None = None
    """Maximum memory, such as 4GiB: all of the process on a GPU, its growth on a CPU (None: unlimited, or with auto the
    free memory)."""
    weights: Literal["card", "half", "host", "auto"] = "auto"
    """Weight placement: on the GPU, in half precision on the GPU with fp32 masters on the host, or on the host and
    fetched block by block."""
    weight_dtype: WeightDtype = "fp32"
    """Format of weights, gradients and moments; bf16 rounds stochastically."""
    host_budget: str | None = None
    """Maximum host memory for offloaded state, such as 12GiB (None: the free memory)."""
    rehearsal: Literal["always", "auto", "never"] = "auto"
    """Try the largest batches before the first epoch (auto: with a memory budget or an auto setting)."""
    shard: Literal["always", "auto", "never"] = "auto"
    """Under torchrun: shard weights, gradients and optimizer over the ranks with FSDP2 (auto: if they do not fit on
    one)."""
    replan: bool = False
    """Make a new memory plan and discard recorded OOM limits, instead of resuming with the checkpoint's."""
    cuda_graphs: Literal["off", "auto", "on"] = "off"
    """Replay micro-batches as CUDA graphs; not yet run on a GPU (auto: if the GPU idles 40 % of the time)."""
    empty_cache_interval: int = 50
    """Release cached memory every N micro-batches (0: never)."""


@dataclass(frozen=True)
class RunConfig:
    """Run length, folders and checkpoints."""

    preset: Preset = "original"
    """Model size (dimension, encoder + decoder layers): original 256, 12 + 6; optimized 192, 8 + 4; minimal 128, 6 + 3.
    With --init_from: the checkpoint's."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on."""
    epochs: int | Literal["auto"] = "auto"
    """Passes over the training data (auto: 20 to 60, for 30 hours in total)."""
    max_steps: int | None = None
    """Stop after N optimizer steps."""
    early_stop_epochs: int | None = None
    """Stop after N epochs without validation improvement."""
    seed: int = 1234
    """Seed of all random numbers."""
    checkpoint_dir: str = "checkpoints"
    """Folder for checkpoints."""
    log_dir: str = "runs"
    """Folder for logs; the run writes to its own subfolder."""
    run_name: str = "default"
    """Name of the run."""
    save_minutes: float = 10.0
    """Save checkpoint_last.pt every N minutes (0: off)."""
    save_steps: int = 0
    """Save checkpoint_last.pt every N steps (0: off)."""
    keep_checkpoints: int = 3
    """Number of epoch checkpoints to keep."""
    resume: str | None = None
    """Checkpoint to resume, or auto: the newest valid one in --checkpoint_dir."""
    fresh: bool = False
    """Start a new run; move old checkpoints to a subfolder."""
    new_corpus: bool = False
    """With --resume: allow a different training corpus."""
    init_from: str | None = None
    """Start a new run with the weights, shape and tokenizer of this checkpoint."""
    rank_timeout: float = 600.0
    """Under torchrun: seconds to wait for other ranks."""
    dry_run: bool = False
    """Test everything in a minute and leave no files."""


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a training run, in the order of `--help all`."""

    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=TextConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)

    @property
    def global_batch_size(self) -> int:
        """Utterances per optimizer step."""
        data = self.data
        micro_batches = self.data.gradient_accumulation_steps
        if data.batch_size == AUTO:
            return data.effective_batch_size or DEFAULT_EFFECTIVE_BATCH_SIZE
        if micro_batches == AUTO:
            # Rounded up: at least the default global batch.
            micro_batches = -(-DEFAULT_EFFECTIVE_BATCH_SIZE // max(1, data.batch_size))
        return data.batch_size * micro_batches

    @property
    def has_fixed_global_batch(self) -> bool:
        """Whether flags set the utterances per optimizer step; otherwise they follow from the corpus and the ranks."""
        data = self.data
        if data.batch_size == AUTO:
            return data.effective_batch_size is not None
        return data.gradient_accumulation_steps != AUTO

    @property
    def is_planned(self) -> bool:
        """Whether a memory plan chooses the micro-batches and the recomputed blocks."""
        asks = self.data.batch_size, self.memory.gradient_checkpointing
        return "auto" in asks or self.memory.memory_budget is not None


# The name "original" is the default shape of ModelConfig.
PRESETS: dict[Preset, ModelConfig] = {
    "original": ModelConfig(d_model=256, encoder_layers=12, decoder_layers=6),
    "optimized": ModelConfig(d_model=192, encoder_layers=8, decoder_layers=4),
    "minimal": ModelConfig(d_model=128, encoder_layers=6, decoder_layers=3),
}
