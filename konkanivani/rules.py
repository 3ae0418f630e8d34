"""Settings by name, and the rules for their values; shared by command lines, checkpoints and bundles.

Does not import torch.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from konkanivani.config import (
    AUTO,
    AugmentConfig,
    DataConfig,
    DecodingConfig,
    FeatureConfig,
    ModelConfig,
    PretrainedConfig,
    RunConfig,
    TrainConfig,
    TuningConfig,
)
from konkanivani.console import parse_budget, parse_share, parse_snr
from konkanivani.errors import ErrorCollector, UsageError

LORA_LAYERS = {"query_key_value", "query", "key_value", "key", "value", "output", "expand", "contract", "gate"}
# Lower bounds of --longest_piece and --pause, in seconds.
MIN_PIECE = 1.0
MIN_PAUSE = 0.2
SUBSAMPLED_BINS = 7  # minimum input for one output of two convolutions with kernel 3 and stride 2

# Flags of models whose input is text, and of those whose input is audio.
TEXT_FLAGS = ("input_field", "target_field", "max_input_tokens", "max_target_tokens", "long_texts")
SPEECH_FLAGS = frozenset(
    ("language", "task", "audio_context", "timestamp_share", "forgetting_manifest", "forgetting_language", "digits")
    + ("audio_roots", "min_duration", "max_duration", "max_validation_duration", "max_tokens", "conditions")
    + tuple(leaf.name for leaf in dataclasses.fields(AugmentConfig))
)
# Text has no speeds, and a micro-batch of its validation is counted in tokens.
TEXT_DEFAULTS: dict[str, object] = {"speed_perturbation": (1.0,), "validation_batch_seconds": 4096.0}


Rule = tuple[bool, str]
"""(whether the rule holds, message if it does not)."""


@dataclass(frozen=True)
class Setting:
    """One flag with its value and the group (field of TrainConfig) that contains it."""

    group: str
    name: str
    value: object


def settings_of(config: TrainConfig) -> list[Setting]:
    """Return every setting of `config`, in the order of `--help`."""
    return [
        Setting(group.name, leaf.name, getattr(getattr(config, group.name), leaf.name))
        for group in dataclasses.fields(config)
        for leaf in dataclasses.fields(getattr(config, group.name))
    ]


def with_values(config: TrainConfig, values: Mapping[str, object]) -> TrainConfig:
    """Return `config` with these settings changed."""
    for setting in settings_of(config):
        if setting.name in values:
            group = dataclasses.replace(getattr(config, setting.group), **{setting.name: values[setting.name]})
            config = dataclasses.replace(config, **{setting.group: group})
    return config


def check_config(config: TrainConfig) -> None:
    """Raise UsageError that lists every invalid setting with its allowed values."""
    problems = ErrorCollector()
    # The negated comparison also catches NaN, which compares as false with every bound.
    finite = [s.name for s in settings_of(config) if isinstance(s.value, float) and not abs(s.value) < float("inf")]
    rules = [
        *_model_rules(config.model),
        *_data_rules(config.data),
        *_feature_rules(config.features),
        *_augment_rules(config.augment, config.features.mel_bins),
        *_learning_rules(config),
        *_head_rules(config),
        *_tuning_rules(config),
        *_pretrained_rules(config.pretrained),
        *_run_rules(config.run),
        (not finite, f"{', '.join('--' + name for name in finite)} must be a finite number"),
    ]
    with problems.collect():
        raise_broken(rules)
    with problems.collect():
        # Text values are parsed separately, so that their errors are reported along with the broken rules.
        parse_share(config.data.max_rejected, "--max_rejected")
    with problems.collect():
        if config.memory.memory_budget is not None:
            parse_budget(config.memory.memory_budget)
    with problems.collect():
        parse_snr(config.augment.noise_snr)
    problems.raise_all()


def check_decoding(config: DecodingConfig) -> None:
    """Raise UsageError that lists every invalid decoding setting."""
    numbers = config.joint_ctc_weight, config.length_bonus, config.language_model_weight
    rules = [
        (config.beam >= 1, "--beam must be at least 1"),
        (0 < config.joint_ctc_weight < 1, "--joint_ctc_weight must be between 0 and 1"),
        (config.language_model_weight >= 0, "--language_model_weight must be at least 0"),
        (
            config.length_bonus == 0 or config.decode in ("attention", "joint") or config.language_model is not None,
            "--length_bonus works with --decode attention or joint, or with a --language_model",
        ),
        (all(abs(number) < float("inf") for number in numbers), "every weight must be a finite number"),
        (
            config.language_model is None or config.decode != "greedy",
            "--language_model works with --decode prefix, attention or joint",
        ),
    ]
    raise_broken(rules)


def check_pretrained(config: PretrainedConfig) -> None:
    """Raise UsageError if the settings of a pretrained model contradict each other."""
    raise_broken(_pretrained_rules(config))


def check_model_choice(checkpoint: str | None, pretrained: PretrainedConfig, decoding: DecodingConfig) -> None:
    """Raise UsageError for flags of a recognizer that contradict each other: its model, and how it decodes."""
    check_decoding(decoding)
    check_pretrained(pretrained)
    if pretrained.pretrained is not None and checkpoint is not None:
        raise UsageError("--checkpoint and --pretrained are two models: give only one.")


def check_segmentation(longest_piece: float | None, pause: float, max_piece: float, max_pause: float) -> None:
    """Raise UsageError if --longest_piece or --pause, in seconds, is out of bounds."""
    if longest_piece is not None and not MIN_PIECE <= longest_piece <= max_piece:
        raise UsageError(f"--longest_piece must be from {MIN_PIECE:g} to {max_piece:g} seconds.")
    if not MIN_PAUSE <= pause <= max_pause:
        raise UsageError(f"--pause must be from {MIN_PAUSE:g} to {max_pause:g} seconds.")


def check_input_flags(explicit: frozenset[str], is_text: bool) -> None:
    """Raise UsageError for given flags of the other kind of input than the model's."""
    idle = sorted(explicit & (SPEECH_FLAGS if is_text else frozenset(TEXT_FLAGS)))
    if idle:
        listed = ", ".join(f"--{name}" for name in idle)
        kinds = ("text", "speech") if is_text else ("speech", "text")
        raise UsageError(
            f"The input of the --pretrained model is {kinds[0]}, and {listed} {'is' if len(idle) == 1 else 'are'} for "
            f"models of {kinds[1]}: omit {'it' if len(idle) == 1 else 'them'}."
        )


def with_text_defaults(config: TrainConfig, explicit: frozenset[str]) -> TrainConfig:
    """Return the configuration of a text-to-text model with the defaults of the flags that are not given."""
    return with_values(config, {name: value for name, value in TEXT_DEFAULTS.items() if name not in explicit})


def raise_broken(rules: list[Rule]) -> None:
    """Raise UsageError that lists the rules that do not hold."""
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise UsageError("Invalid flags: " + "; ".join(broken) + ".")


def _model_rules(model: ModelConfig) -> list[Rule]:
    heads = model.attention_heads
    width = model.d_model
    return [
        (
            min(width, model.encoder_layers, heads) > 0,
            "--d_model, --encoder_layers and --attention_heads must be at least 1",
        ),
        (model.decoder_layers >= 0, "--decoder_layers must be at least 0"),
        (
            # Rotary positions rotate pairs of channels within a head.
            heads > 0 and width % (2 * heads) == 0,
            f"--d_model {width} must be a multiple of twice --attention_heads {heads}",
        ),
        (model.resolved_feedforward_dim > 0, "--feedforward_dim must be at least 1"),
        (model.convolution_kernel > 0 and model.convolution_kernel % 2 == 1, "--convolution_kernel must be odd"),
        (model.subsampling_channels > 0, "--subsampling_channels must be at least 1"),
        (0 <= model.dropout < 1, "--dropout must be at least 0 and below 1"),
    ]


def _data_rules(data: DataConfig) -> list[Rule]:
    return [
        (
            all(number == AUTO or number > 0 for number in (data.batch_size, data.gradient_accumulation_steps)),
            "--batch_size and --gradient_accumulation_steps must be at least 1",
        ),
        (
            data.effective_batch_size is None or data.effective_batch_size > 0,
            "--effective_batch_size must be at least 1",
        ),
        (
            data.concurrent_micro_batches == AUTO or 1 <= data.concurrent_micro_batches <= 64,
            "--concurrent_micro_batches must be between 1 and 64",
        ),
        (0 < data.train_subset <= 100, "--train_subset is a percentage: above 0, at most 100"),
        (0 <= data.min_duration < data.max_duration, "--min_duration must be below --max_duration"),
        (
            min(data.max_validation_duration, data.validation_batch_seconds, data.loader_timeout) > 0,
            "--max_validation_duration, --validation_batch_seconds and --loader_timeout must be above 0",
        ),
        (data.max_tokens > 0, "--max_tokens must be at least 1"),
        (0 <= data.num_workers <= 64, "--num_workers must be between 0 and 64"),
        (data.test_manifest is not None or not data.conditions, "--conditions needs --test_manifest"),
    ]


def _feature_rules(features: FeatureConfig) -> list[Rule]:
    return [
        (SUBSAMPLED_BINS <= features.mel_bins <= 512, f"--mel_bins must be between {SUBSAMPLED_BINS} and 512"),
        (0 < features.fft_samples <= 2**14, "--fft_samples must be between 1 and 16384"),
        (
            0 < features.window_samples <= features.fft_samples,
            "--window_samples must be at least 1 and at most --fft_samples",
        ),
        (0 < features.hop_samples <= features.fft_samples, "--hop_samples must be between 1 and --fft_samples"),
        (features.smallest_power > 0, "--smallest_power must be above 0"),
        (0 <= features.preemphasis < 1, "--preemphasis must be at least 0 and below 1"),
        (0 <= features.dynamic_range <= 200, "--dynamic_range must be between 0 and 200 dB"),
        (
            # The padding is half an FFT.
            features.frame_padding == "none" or features.fft_samples % 2 == 0,
            "--fft_samples must be even with --frame_padding",
        ),
    ]


def _augment_rules(augment: AugmentConfig, mel_bins: int) -> list[Rule]:
    speeds = augment.speed_perturbation
    return [
        (
            speeds == AUTO or (len(speeds) > 0 and all(0.5 <= speed <= 2 for speed in speeds)),
            "--speed_perturbation takes speeds between 0.5 and 2",
        ),
        (
            augment.frequency_masks >= 0 and 0 <= augment.frequency_mask_bins <= mel_bins,
            f"--frequency_masks must be at least 0 and --frequency_mask_bins between 0 and {mel_bins}",
        ),
        (
            augment.time_masks >= 0 and 0 <= augment.time_mask_share <= 1,
            "--time_masks must be at least 0 and --time_mask_share between 0 and 1",
        ),
        (
            0 <= augment.rir_prob <= 1 and 0 <= augment.noise_prob <= 1,
            "--rir_prob and --noise_prob must be between 0 and 1",
        ),
        (0 <= augment.gain <= 40, "--gain must be between 0 and 40 dB"),
    ]


def _learning_rules(config: TrainConfig) -> list[Rule]:
    loss = config.loss
    optimizer = config.optimizer
    return [
        (config.text.vocab_size > 4, "--vocab_size must be above 4"),
        (loss.ctc_weight == AUTO or 0 <= loss.ctc_weight <= 1, "--ctc_weight must be between 0 and 1"),
        (0 <= loss.intermediate_ctc_weight < 1, "--intermediate_ctc_weight must be at least 0 and below 1"),
        (0 <= loss.label_smoothing < 1, "--label_smoothing must be at least 0 and below 1"),
        (optimizer.learning_rate == AUTO or optimizer.learning_rate > 0, "--learning_rate must be above 0"),
        (
            (optimizer.warmup_steps == AUTO or optimizer.warmup_steps >= 0) and optimizer.weight_decay >= 0,
            "--warmup_steps and --weight_decay must be at least 0",
        ),
        (optimizer.max_grad_norm > 0, "--max_grad_norm must be above 0"),
        (
            optimizer.optimizer == "adamw" or config.memory.shard != "always",
            "--shard always supports only AdamW: omit it, or use --optimizer adamw",
        ),
        *_bf16_rules(config),
        (config.memory.empty_cache_interval >= 0, "--empty_cache_interval must be at least 0"),
    ]


def _bf16_rules(config: TrainConfig) -> list[Rule]:
    memory = config.memory
    if memory.weight_dtype != "bf16":
        return []
    return [
        (
            memory.mixed_precision and (memory.amp_dtype == "bf16" or config.run.device == "cpu"),
            "--weight_dtype bf16 needs products in bf16: give --mixed_precision --amp_dtype bf16",
        ),
        (
            config.optimizer.optimizer in ("adamw", "adafactor"),
            f"--weight_dtype bf16 does not support --optimizer {config.optimizer.optimizer}: use adamw or adafactor",
        ),
        (
            memory.weights != "half",
            "--weights half keeps fp32 masters on the host, --weight_dtype bf16 has none: omit one of them",
        ),
        (memory.shard != "always", "--shard always needs weights in fp32: omit it, or --weight_dtype bf16"),
        (memory.cuda_graphs == "off", "--cuda_graphs needs weights in fp32: omit it, or --weight_dtype bf16"),
    ]


def _head_rules(config: TrainConfig) -> list[Rule]:
    loss = config.loss
    has_decoder = config.model.decoder_layers > 0
    decode = config.data.test_decode
    has_ctc = loss.ctc_weight != 0
    is_ours = config.pretrained.pretrained is None
    without_ctc = "--ctc_weight is 0" if is_ours else "a --pretrained model has no CTC head"
    return [
        (
            has_decoder or loss.ctc_weight in (AUTO, 1),
            "--decoder_layers 0 leaves only CTC: use --ctc_weight 1, or omit it",
        ),
        (
            has_ctc or not loss.intermediate_ctc_weight or not is_ours,
            "--intermediate_ctc_weight is a share of the CTC loss, but --ctc_weight is 0",
        ),
        (
            has_decoder or decode not in ("attention", "joint"),
            f"--test_decode {decode} needs a decoder, but --decoder_layers is 0: use auto, greedy or prefix",
        ),
        (
            has_ctc or decode not in ("prefix", "joint"),
            f"--test_decode {decode} needs CTC, but {without_ctc}: use auto, greedy or attention",
        ),
    ]


def _tuning_rules(config: TrainConfig) -> list[Rule]:
    tuning = config.tuning
    starts = (config.pretrained.pretrained, config.run.init_from, config.run.resume)
    # --resume counts too: its checkpoint is read later and may hold a fine-tuned model.
    begins = any(start is not None for start in starts)
    is_ours = config.pretrained.pretrained is None
    # The upper bound, the number of blocks in the initial model, is checked when the model is read.
    counts = [number for number in (tuning.freeze, tuning.train_layers) if isinstance(number, int)]
    return [
        (
            not tuning.is_used or begins,
            "--freeze, --train_layers and --lora_rank need a model with initial weights: give --pretrained or "
            "--init_from",
        ),
        (
            begins or tuning.encoder_rate_factor is None,
            "--encoder_rate_factor needs an encoder with initial weights: give --pretrained or --init_from",
        ),
        (
            is_ours and begins or not (tuning.new_tokenizer or tuning.freeze_steps),
            "--new_tokenizer and --freeze_steps need the output head of a checkpoint: give --init_from",
        ),
        (all(number >= 0 for number in counts), "--freeze and --train_layers take a number of blocks, at least 0"),
        (
            tuning.freeze == "none" or tuning.train_layers is None,
            "--train_layers and --freeze both select the trained encoder blocks: give only one of them",
        ),
        (tuning.freeze_steps is None or tuning.freeze_steps >= 0, "--freeze_steps must be at least 0"),
        (
            tuning.encoder_rate_factor is None or 0 < tuning.encoder_rate_factor <= 100,
            "--encoder_rate_factor must be above 0 and at most 100",
        ),
        (
            tuning.is_used or tuning.frozen_dtype == "fp32",
            "--frozen_dtype half needs frozen weights: give --freeze, --train_layers or --lora_rank",
        ),
    ] + _lora_rules(tuning)


def _lora_rules(tuning: TuningConfig) -> list[Rule]:
    return [
        (0 <= tuning.lora_rank <= 1024, "--lora_rank must be between 0 and 1024"),
        (
            tuning.lora_rank == 0 or tuning.new_tokenizer or not tuning.freeze_steps,
            "--freeze_steps first trains only the output head, which --lora_rank freezes: omit it, or give "
            "--new_tokenizer",
        ),
        (tuning.lora_alpha >= 0, "--lora_alpha must be at least 0"),
        (
            tuning.lora_rank == 0 or (tuning.freeze == "none" and tuning.train_layers is None),
            "--lora_rank freezes all layers: omit --freeze and --train_layers",
        ),
        (
            tuning.lora_rank == 0 or set(tuning.lora_targets) <= LORA_LAYERS and len(tuning.lora_targets) > 0,
            f"--lora_targets must be among {', '.join(sorted(LORA_LAYERS))}",
        ),
    ]


def _pretrained_rules(config: PretrainedConfig) -> list[Rule]:
    return [
        (config.pretrained != "", "--pretrained must be the path of a folder, or a name on the hub"),
        (
            config.pretrained is not None or config.revision is None,
            "--revision selects a revision of a model on the hub: give --pretrained",
        ),
        (
            all(limit is None or 2 <= limit < 2**16 for limit in (config.max_input_tokens, config.max_target_tokens)),
            "--max_input_tokens and --max_target_tokens must be between 2 and 65535",
        ),
        (
            config.input_field != config.target_field and "" not in (config.input_field, config.target_field),
            "--input_field and --target_field must be the names of two different fields",
        ),
        (0 <= config.timestamp_share <= 1, "--timestamp_share must be between 0 and 1"),
        (
            config.pretrained is not None or not config.timestamp_share,
            "--timestamp_share needs a model with timestamp tokens: give --pretrained",
        ),
        (
            config.pretrained is not None or config.forgetting_manifest is None,
            "--forgetting_manifest measures a --pretrained model: give both",
        ),
        (
            config.forgetting_manifest is not None or config.forgetting_language is None,
            "--forgetting_language needs --forgetting_manifest: give both",
        ),
    ]


def _run_rules(run: RunConfig) -> list[Rule]:
    return [
        (run.epochs == AUTO or run.epochs > 0, "--epochs must be at least 1"),
        (run.max_steps is None or run.max_steps > 0, "--max_steps must be at least 1"),
        (run.early_stop_epochs is None or run.early_stop_epochs > 0, "--early_stop_epochs must be at least 1"),
        (0 <= run.seed < 2**63, "--seed must be between 0 and 2^63 - 1"),
        (min(run.save_minutes, run.save_steps) >= 0, "--save_minutes and --save_steps must be at least 0"),
        (run.rank_timeout > 0, "--rank_timeout must be above 0"),
        (run.keep_checkpoints >= 2, "--keep_checkpoints must be at least 2"),
        (
            run.run_name not in ("", ".", "..") and "/" not in run.run_name and "\0" not in run.run_name,
            "--run_name must be a plain folder name",
        ),
        (run.resume is not None or not run.new_corpus, "--new_corpus applies to a resumed run: give --resume too"),
        (
            not (run.resume and run.fresh),
            "--resume continues a run and --fresh starts a new one: give only one of them",
        ),
    ]
