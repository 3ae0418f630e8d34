"""A Whisper model of transformers in a typical training loop, as a contestant; LoRA by peft.

Unlike transformers' Trainer, which divides each micro-batch's loss by its own labels, the loop divides by the labels of
the global batch.
"""

import torch
import torch.nn.functional as F
import transformers
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from benchmarks.measuring.fixed_step import MAX_WARM_UP_STEPS
from benchmarks.measuring.peers.peak import peak_bytes
from benchmarks.measuring.whisper.work import LORA_RANK, SCHEDULE, TOTAL_STEPS, WhisperTerms, build_speech, fill
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import peak_resident_mib, reset_peak_resident, resident_mib
from konkanivani.model.whisper.shape import WhisperShape
from konkanivani.training.optimizer import learning_rate


class Transformers:
    """WhisperForConditionalGeneration, gradient checkpointing, AdamW (fused), `together` utterances per micro-batch.

    The features of a micro-batch are computed before its forward pass, by transformers' extractor on the device.
    """

    version = transformers.__version__

    def __init__(self, terms: WhisperTerms) -> None:
        if terms.train == "lora":
            import peft  # noqa: F401, so that its code does not count as memory of the training
        self.terms, self.speech = terms, build_speech(terms)
        self.extractor = WhisperFeatureExtractor(feature_size=terms.shape.mel_bins, chunk_length=terms.window_seconds)
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
        given, wanted = (torch.tensor(rows, device=self.terms.device) for rows in (given, wanted))
        logits = self.model(input_features=features, decoder_input_ids=given, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")

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


def config_of(shape: WhisperShape) -> WhisperConfig:
    """Return the configuration of this shape in transformers."""
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
