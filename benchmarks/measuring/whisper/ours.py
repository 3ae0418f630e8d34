"""This trainer's step of a Whisper model as a contestant."""

import dataclasses
import sys
from collections.abc import Iterator

import torch

from benchmarks.measuring.fixed_step import peak_mib, warm_up
from benchmarks.measuring.peers.contest import Entry
from benchmarks.measuring.whisper.work import LORA_RANK, SCHEDULE, TOTAL_STEPS, WhisperTerms, build_speech, fill
from konkanivani.base.config import DataConfig, LossConfig, MemoryConfig, TrainConfig, TuningConfig
from konkanivani.base.device import choose_device
from konkanivani.base.units import MIB
from konkanivani.data.batching import same_size, split_into_micro_batches
from konkanivani.memory.monitor import resident_mib
from konkanivani.memory.weights.placement import ON_CARD, Placement
from konkanivani.model.adapters import LOW_RANK_TENSORS
from konkanivani.model.asr import trained_parameters
from konkanivani.model.whisper.architecture import WhisperArchitecture
from konkanivani.model.whisper.folder import name_in_file
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.step import train_step

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


class KonkaniVani:
    """`train_step` with all blocks recomputed and `together` utterances per micro-batch."""

    version = "this tree"

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
        self.steps = 0
        warm_up(self.parts, self.global_batch)

    def step(self) -> float:
        """Run one optimizer step; return the loss in nats per label."""
        self.steps += 1
        return train_step(self.parts, self.global_batch, self.steps).loss

    def features(self) -> float:
        """Compute only the features of the step; return their mean."""
        means = []
        for batch in self.global_batch.micro_batches:
            batch = batch.to(self.parts.forward.device)
            made, _ = self.parts.forward.front_end(batch.waveforms, batch.sample_lengths, None)
            means.append(made.mean())
        return float(torch.stack(means).mean())

    def resident_peak_mib(self) -> float:
        """Return the peak resident memory over all phases, in MiB."""
        # On a CPU, the monitor resets VmHWM in each phase, so that it must be read from the monitor.
        return self.parts.monitor.overall_peak_mib()

    def peak_bytes(self) -> int:
        """Return the peak of one more step, in bytes."""
        return round(peak_mib(self.parts, self.global_batch) * MIB)


def _named_as_in_files(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters under the names of transformers and peft, from which `fill` derives their values."""
    down, up = LOW_RANK_TENSORS
    for name, parameter in model.named_parameters():
        name = name.replace(down, "lora_A").replace(up, "lora_B")
        yield name_in_file(name), parameter
