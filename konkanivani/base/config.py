"""Everything that can be set, grouped by owner; a string under each field is its help text. No torch here.

The command line is this file: `flags.py` makes one flag of each field, under the field's own name.
"""

from dataclasses import dataclass, field
from typing import Literal

AUTO = "auto"
DEFAULT_RATE = 1e-3
DEFAULT_EFFECTIVE_BATCH_SIZE = 8
AudioContext = Literal["window", "speech"]
OLD_NAMES = {"rir_share": "rir_prob", "noise_share": "noise_prob"}  # in old command lines and checkpoints


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the network."""

    d_model: int = 256
    """Width of the encoder and the decoder."""
    encoder_layers: int = 12
    """Blocks in the encoder."""
    decoder_layers: int = 6
    """Blocks in the attention decoder (0: none, CTC alone)."""
    attention_heads: int = 4
    """Attention heads; d_model / attention_heads must be even."""
    feedforward_dim: int | None = None
    """Inner width of the feed-forward layers (None: 4 x d_model)."""
    encoder_type: Literal["conformer", "transformer"] = "conformer"
    """Kind of encoder block."""
    convolution_kernel: int = 31
    """Frames seen by a Conformer block's depthwise convolution (odd)."""
    subsampling_channels: int = 64
    """Channels of the convolutions that reduce the frame rate."""
    dropout: float = 0.1
    """Dropout on every residual branch."""
    attention_positions: Literal["rotary", "relative"] = "rotary"
    """How the encoder's attention knows positions; relative: by sines and cosines of distance, with biases a head."""
    convolution_norm: Literal["layer", "none"] = "layer"
    """Norm behind a Conformer block's depthwise convolution; none: where a BatchNorm was folded into it."""
    subsampling: Literal["valid", "striding", "separable"] = "valid"
    """How frames become fewer; valid: 4 times, without padding; striding: 4 times; separable: 8 times, both padded."""
    scaled_input: bool = False
    """Multiply what enters the encoder's blocks by the root of d_model."""
    entry_norm: Literal[True, False] = True
    """Whether a norm stands before the first of a Conformer's blocks, as before each other one."""
    biases: Literal[True, False] = True
    """Whether the encoder's blocks' linear layers and convolutions add a bias."""

    @property
    def resolved_feedforward_dim(self) -> int:
        """`feedforward_dim`, or 4 x d_model where it is None."""
        return 4 * self.d_model if self.feedforward_dim is None else self.feedforward_dim


@dataclass(frozen=True)
class FeatureConfig:
    """What the network hears: the logarithm of mel bands, of audio at 16 kHz."""

    mel_bins: int = 80
    """Mel bands in a feature frame."""
    fft_samples: int = 512
    """Samples in a Fourier transform."""
    window_samples: int = 400
    """Samples in the Hann window in its middle (400: 25 ms)."""
    hop_samples: int = 160
    """Samples from one feature frame to the next (160: 10 ms)."""
    smallest_power: float = 1e-10
    """A band's power is taken for at least this before the logarithm, or this is added to it (--power_guard)."""
    power_guard: Literal["floor", "added"] = "floor"
    """How --smallest_power keeps the logarithm finite."""
    preemphasis: float = 0.0
    """So much of each sample is taken from the next one (0: none)."""
    window: Literal["periodic", "symmetric"] = "periodic"
    """Kind of Hann window."""
    edges: Literal["none", "zeros", "reflected"] = "none"
    """What a frame hears beyond the ends of the waveform; none: no frame reaches there."""
    mel_scale: Literal["htk", "slaney"] = "htk"
    """Where the mel bands lie; slaney: each is divided by its width, too."""
    deviation: Literal["population", "sample"] = "population"
    """Normalise by the standard deviation with n frames in the divisor, or n - 1."""


@dataclass(frozen=True)
class DataConfig:
    """Which speech is read, and how it is laid into batches."""

    train_manifest: str | None = None
    """JSONL manifest to train on: audio_filepath, duration, text, optionally speaker."""
    valid_manifest: str | None = None
    """JSONL manifest for validation after each epoch."""
    test_manifest: str | None = None
    """JSONL manifest scored once at the end, by greedy CTC."""
    audio_roots: tuple[str, ...] = ()
    """Folders beside each manifest's own that its audio may lie in; rows that name other places are broken."""
    test_decode: Literal["auto", "greedy", "prefix", "attention", "joint"] = "auto"
    """How the test manifest is scored once more, with a beam of 10; greedy: not (auto: joint, or by the only head)."""
    batch_size: int | Literal["auto"] = 2
    """Utterances in one micro-batch; auto: by their length, as many as --memory_budget (or what is free) allows."""
    gradient_accumulation_steps: int | Literal["auto"] = "auto"
    """Micro-batches in one optimizer step; the effective batch is the product (auto: as many as make 8 utterances, with
    less than ten hours of speech 20 seconds where that is less)."""
    effective_batch_size: int | None = None
    """Utterances in one optimizer step, with --batch_size auto (None: as with --gradient_accumulation_steps auto)."""
    micro_batches_at_once: int | Literal["auto"] = "auto"
    """On a CPU, run so many micro-batches side by side, each on its share of the cores: less time, more memory (auto: 2
    where there are two threads and, with a memory plan, room)."""
    train_subset: float = 100.0
    """Percent of the training utterances to use, chosen by the seed."""
    first_epoch: Literal["auto", "shuffled", "shortest_first"] = "auto"
    """Order of the first epoch: as that of others, or from short utterances to long ones, of which CTC learns sooner
    what it aligns (auto: shortest_first for less than ten hours of speech where the model begins from nothing)."""
    min_duration: float = 0.2
    """Shortest utterance trained on, in seconds."""
    max_duration: float = 20.0
    """Longest utterance trained on, in seconds."""
    max_tokens: int = 400
    """Longest transcript trained on, in tokens."""
    max_validation_duration: float = 30.0
    """Longest utterance validated and tested on, in seconds."""
    validation_batch_seconds: float = 60.0
    """Padded audio in one validation batch, in seconds."""
    max_rejected: str = "1%"
    """Share of a manifest's rows that may be broken and are left out, such as 1% or 0.01; more end the run."""
    num_workers: int = 2
    """Processes that read and resample audio (0: the training process does)."""
    loader_timeout: float = 300.0
    """Seconds to wait for the workers before giving up."""


@dataclass(frozen=True)
class TextConfig:
    """How transcripts become tokens."""

    tokenizer_type: Literal["auto", "unigram", "bpe", "char"] = "auto"
    """SentencePiece model trained on the training manifest (auto: char for less than ten hours, else unigram)."""
    vocab_size: int = 1000
    """Tokens in the vocabulary; lowered to what the text allows."""
    digits: Literal["keep", "spell"] = "keep"
    """Leave digits as they are, or spell each one as its Konkani word."""


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training speech, drawn per (seed, epoch, utterance)."""

    speed_perturbation: tuple[float, ...] | Literal["auto"] = "auto"
    """Playing speeds to choose from (auto: 1 for less than ten hours of speech, else 0.9, 1 and 1.1)."""
    rir_manifest: str | None = None
    """JSONL manifest of room impulse responses, to make speech sound as in a room: audio_filepath, duration."""
    rir_prob: float = 0.3
    """Probability that an utterance is put into a room, with --rir_manifest."""
    noise_manifest: str | None = None
    """JSONL manifest of noise to mix with speech: audio_filepath, duration; text may be left out."""
    noise_snr: str = "5:25"
    """Lowest and highest signal-to-noise ratio in dB, drawn evenly, with --noise_manifest."""
    noise_prob: float = 0.5
    """Probability that an utterance gets noise, with --noise_manifest."""
    gain: float = 0.0
    """Up to so many dB louder or quieter, then clipped at full scale (0: off); normalised features show little else."""
    frequency_masks: int = 2
    """SpecAugment: bands masked per utterance."""
    frequency_mask_bins: int = 15
    """SpecAugment: widest band, in mel bins."""
    time_masks: int = 2
    """SpecAugment: spans masked per utterance."""
    time_mask_share: float = 0.08
    """SpecAugment: longest span, as a share of the utterance."""


@dataclass(frozen=True)
class LossConfig:
    """What is minimised."""

    ctc_weight: float | Literal["auto"] = "auto"
    """Share of the CTC loss; the rest is the attention loss (0: no CTC; auto: 0.7 for less than ten hours of speech,
    else 0.3; 1 without a decoder)."""
    intermediate_ctc_weight: float = 0.0
    """Share of the CTC loss computed after the encoder's middle block, with the same head."""
    label_smoothing: float = 0.1
    """Label smoothing of the attention loss."""


@dataclass(frozen=True)
class PretrainedConfig:
    """A recogniser that others have trained, to begin with in place of one of our own."""

    pretrained: str | None = None
    """Folder of a Whisper model as Hugging Face lays it out; its shape, features and tokens are its own."""
    language: str | None = None
    """Language that it shall write, by a code that it has a token for (Konkani has none: mr or hi)."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """What it shall write: the language itself, or English."""
    audio_context: AudioContext | None = None
    """What its encoder hears: a whole window of 30 s, or the speech alone, which takes much less memory and time where
    utterances are short (None: what its folder says, else window)."""
    timestamp_share: float = 0.0
    """Share of the training utterances, drawn each epoch, whose labels say when speech begins and ends, so that the
    model does not forget to say times."""
    forgetting_manifest: str | None = None
    """JSONL manifest of speech that it knew before, scored before and after: what training here costs there."""
    forgetting_language: str | None = None
    """Language of that speech (None: that of --language)."""


@dataclass(frozen=True)
class TuningConfig:
    """What is trained of a model that begins with weights (--pretrained, --init_from)."""

    freeze: Literal["none", "encoder"] | int = "none"
    """Keep as it is: the encoder, or so many of its blocks from the input on (with all before them)."""
    train_layers: int | None = None
    """Train the last so many of the encoder's blocks and all behind them, and keep what is before (None: all)."""
    new_tokenizer: bool = False
    """Make a tokenizer of the corpus's text, and a head for it, in place of the ones of --init_from."""
    freeze_steps: int | None = None
    """Train the head alone for so many steps, and then all that is to be trained, which warms up by itself (None: as
    many as the warm-up with --new_tokenizer, else 0)."""
    encoder_rate_factor: float | None = None
    """The encoder's learning rate is so many times the others' (None: 0.1 with --new_tokenizer, else 1)."""
    frozen_dtype: Literal["fp32", "half"] = "fp32"
    """Keep the matrices of frozen blocks in fp32, or in half precision, in half the memory."""
    lora_rank: int = 0
    """LoRA: train products of this rank beside frozen layers, and nothing else (0: no LoRA)."""
    lora_alpha: float = 0.0
    """LoRA: the products count --lora_alpha / --lora_rank times (0: twice)."""
    lora_targets: tuple[str, ...] = ("query_key_value", "query", "key_value", "value")
    """LoRA: names of the layers that get one; key, output, expand, contract and gate are others."""

    @property
    def is_used(self) -> bool:
        """Whether anything is not to be trained."""
        return self.freeze not in ("none", 0) or self.train_layers is not None or self.lora_rank > 0

    @property
    def encoder_factor(self) -> float:
        """What the encoder's learning rate is multiplied by."""
        return (0.1 if self.new_tokenizer else 1.0) if self.encoder_rate_factor is None else self.encoder_rate_factor

    @property
    def scale(self) -> float:
        """What a low-rank product is multiplied by."""
        return (self.lora_alpha or 2 * self.lora_rank) / max(1, self.lora_rank)


@dataclass(frozen=True)
class DecodingConfig:
    """How encoded speech becomes text."""

    decode: Literal["greedy", "prefix", "attention", "joint"] = "greedy"
    """greedy: the best CTC path; prefix: beam search by CTC; attention: by the decoder; joint: by both."""
    beam: int = 10
    """Hypotheses kept in a beam search."""
    joint_ctc_weight: float = 0.5
    """Share of CTC in --decode joint; the rest is the attention decoder's."""
    length_bonus: float = 0.0
    """Added to a hypothesis's log probability for each of its tokens."""
    language_model: str | None = None
    """ARPA file of token n-grams whose log probability is added (train_language_model.py writes one)."""
    language_model_weight: float = 0.3
    """What the language model's log probability is multiplied by."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule, a pure function of the step."""

    optimizer: Literal["adamw", "adamw8bit", "adafactor"] = "adamw"
    """AdamW; with its moments in 8 bits; or Adafactor, which has next to none: 16, 10 and 8 bytes a trained number."""
    learning_rate: float | Literal["auto"] = "auto"
    """Peak learning rate (auto: 1e-3; twice that of a small model that learns many words of 45 min to 10 h anew)."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """After the warm-up: cosine to a hundredth at the run's last step, or 1/sqrt(step)."""
    warmup_steps: int | Literal["auto"] = "auto"
    """Steps of linear warm-up (auto: a tenth of the run, at most 500)."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm over the whole effective batch."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is given up for memory."""

    mixed_precision: bool = False
    """Autocast: fp16 with loss scaling on CUDA, bf16 on a CPU."""
    amp_dtype: Literal["fp16", "bf16"] = "fp16"
    """Number format of --mixed_precision."""
    gradient_checkpointing: Literal["always", "auto", "never"] = "never"
    """Recompute blocks' activations in the backward pass instead of keeping them: all, or as few as must be (auto)."""
    memory_budget: str | None = None
    """Memory that training may take, such as 4GiB or 4G (4GB is 7 % less): on a GPU all that the process has there, on
    a CPU all that it adds to itself (None: no bound; with auto, what is free)."""
    weights: Literal["card", "half", "host", "auto"] = "auto"
    """On the card, in half precision there with masters on the host, or fetched from there a block at a time."""
    host_budget: str | None = None
    """What may lie in the machine's memory beside a card, such as 12GiB (None: what is free)."""
    rehearsal: Literal["always", "auto", "never"] = "auto"
    """Try the costliest batches before the first epoch and undo them; auto: when a budget or auto is given."""
    shard: Literal["always", "auto", "never"] = "auto"
    """Under torchrun: shard weights, gradients and optimizer over ranks (FSDP2); auto: where they do not fit whole."""
    replan: bool = False
    """Make a new memory plan and forget what did not fit, instead of going on with the checkpoint's."""
    empty_cache_interval: int = 50
    """Return cached GPU memory, on a CPU the heap's free pages, every so many micro-batches (0: never)."""


@dataclass(frozen=True)
class RunConfig:
    """How long, where to, and from where."""

    preset: Literal["original", "optimized", "minimal"] = "original"
    """Model shape: original 256, 12+6; optimized 192, 8+4; minimal 128, 6+3. Single flags override it; with --init_from
    and without this flag the shape is the checkpoint's."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train."""
    epochs: int | Literal["auto"] = "auto"
    """Passes over the training data (auto: thirty hours of speech in all, between 20 and 60 passes)."""
    max_steps: int | None = None
    """Stop after so many optimizer steps, whatever --epochs says."""
    early_stop_epochs: int | None = None
    """Stop after so many epochs without a better validation result."""
    seed: int = 1234
    """Everything random follows from it."""
    checkpoint_dir: str = "checkpoints"
    """Folder of the checkpoints."""
    log_dir: str = "runs"
    """Folder of the logs; the run's own is log_dir/run_name."""
    run_name: str = "default"
    """Name of the run."""
    save_minutes: float = 10.0
    """Save checkpoint_last.pt every so many minutes (0: only by steps and epochs)."""
    save_steps: int = 0
    """Save checkpoint_last.pt every so many steps (0: only by minutes and epochs)."""
    keep_checkpoints: int = 3
    """Epoch checkpoints to keep, at least 2."""
    resume: str | None = None
    """A checkpoint to go on from, or auto: the newest sound one in --checkpoint_dir."""
    fresh: bool = False
    """Begin anew in a folder that holds checkpoints; the old ones are moved into a folder beside them."""
    new_corpus: bool = False
    """Go on with another training corpus than the checkpoint's, which is else refused; with --resume."""
    init_from: str | None = None
    """Begin anew with this checkpoint's weights, shape and tokens, cut down where flags ask for less."""
    rank_timeout: float = 600.0
    """Under torchrun: seconds that a rank waits for the others before it takes them for lost."""
    dry_run: bool = False
    """Try everything in a minute and leave nothing behind: data, plan, two steps, a save, going on from it."""


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a training run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    text: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    @property
    def window_size(self) -> int:
        """Utterances in one optimizer step."""
        data, micro_batches = self.data, self.data.gradient_accumulation_steps
        if data.batch_size == AUTO:
            return data.effective_batch_size or DEFAULT_EFFECTIVE_BATCH_SIZE
        if micro_batches == AUTO:
            micro_batches = -(-DEFAULT_EFFECTIVE_BATCH_SIZE // max(1, data.batch_size))
        return data.batch_size * micro_batches

    @property
    def is_planned(self) -> bool:
        """Whether the run's micro-batches and recomputed blocks follow from a memory plan."""
        asks = self.data.batch_size, self.memory.gradient_checkpointing
        return "auto" in asks or self.memory.memory_budget is not None


PRESETS = {
    "original": ModelConfig(d_model=256, encoder_layers=12, decoder_layers=6),
    "optimized": ModelConfig(d_model=192, encoder_layers=8, decoder_layers=4),
    "minimal": ModelConfig(d_model=128, encoder_layers=6, decoder_layers=3),
}
