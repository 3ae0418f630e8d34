"""One case of a step: planned, or measured in one of three ways.

Each belongs in a process of its own: a trace and a count of live bytes take memory themselves.
"""

import torch

from benchmarks.measuring.cells import Case, Planned
from benchmarks.measuring.fixed_step import TOTAL_STEPS, VOCABULARY, wait_for_device, warm_up
from benchmarks.measuring.random_speech import TOKENS_PER_SECOND, build_speech
from konkanivani.base.device import choose_device
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.data.batch import GlobalBatch, collate
from konkanivani.data.text import OUR_TOKENS
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.live_bytes import LiveBytes
from konkanivani.memory.monitor import MIB, reset_peak_resident, resident_mib, set_mmap_threshold
from konkanivani.memory.tracer import BatchShape
from konkanivani.model.architecture import architecture_of
from konkanivani.recipe.build_step import build_step_parts
from konkanivani.recipe.planning.state import device_costs
from konkanivani.recipe.planning.tracing import build_tracer
from konkanivani.training.step import StepParts, train_step

STEPS = 3  # that the resident memory and CUDA's allocator are watched for


def trace_plan(case: Case) -> Planned:
    """The plan of this case as `--memory_budget` would make it."""
    costs = device_costs(choose_device(case.device))
    load = BatchShape(case.utterances, case.seconds, round(case.seconds * TOKENS_PER_SECOND))
    config = case.config()
    tracer = build_tracer(config, architecture_of(config, VOCABULARY), costs)
    peak = tracer.trace(load, RecomputePolicy(case.recompute))
    return Planned(peak.bytes, costs.workspace, costs.context)


def measure_live(case: Case) -> tuple[int, int]:
    """Live bytes at the peak of a second step on a CPU, and those of the inputs that then wait.

    The first has weights, gradients, optimizer, the front end's buffers and one micro-batch's input in it.
    """
    parts, global_batch = build_parts(case), build_global_batch(case)
    train_step(parts, global_batch, 0)
    live = LiveBytes()
    live.count(parts.state_tensors())
    inputs = [batch.tensors() for batch in global_batch.micro_batches]
    live.count(tensor for tensors in inputs for tensor in tensors)
    with live:
        train_step(parts, global_batch, 1)
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in inputs]
    waiting = sum(sizes) - max(sizes)
    return live.peak - waiting, waiting


def measure_resident(case: Case) -> int:
    """Bytes from the resident memory before the model is built to the process's largest in a few steps.

    As in a run under a memory budget, which keeps holes out of the heap.
    """
    set_mmap_threshold()
    reset_peak_resident()
    before = resident_mib()
    parts, global_batch = build_parts(case), build_global_batch(case)
    for step in range(STEPS):
        train_step(parts, global_batch, step)
    return round((parts.forward.monitor.overall_peak_mib() - before) * MIB)


def measure_cuda(case: Case) -> tuple[int, int, int]:
    """Bytes that CUDA's allocator gave at most and reserved, and what the process holds of the card beside these.

    The last one is right where nothing else is on the card.
    """
    parts, global_batch = build_parts(case), build_global_batch(case)
    device = parts.forward.device
    warm_up(parts, global_batch)
    for step in range(1, STEPS):
        train_step(parts, global_batch, step)
    wait_for_device(device)
    free, total = torch.cuda.mem_get_info(device)
    # The monitor begins the allocator's peak anew at the end of each phase, and keeps the largest.
    allocated = round(max(parts.forward.monitor.overall_peak_mib() * MIB, torch.cuda.max_memory_allocated(device)))
    reserved = torch.cuda.max_memory_reserved(device)
    return allocated, reserved, total - free - torch.cuda.memory_reserved(device)


def build_parts(case: Case) -> StepParts:
    """The product's own step."""
    config, device = case.config(), choose_device(case.device)
    return build_step_parts(config, architecture_of(config, VOCABULARY), device, TOTAL_STEPS)


def build_global_batch(case: Case) -> GlobalBatch:
    """Noise of the case's lengths with random tokens, the same numbers on every machine."""
    shorter = 1 if case.utterances > 1 else 0
    seconds = [case.seconds] * (case.utterances - shorter) + [0.9 * case.seconds] * shorter
    generator = torch.Generator().manual_seed(0)
    pieces = [[build_speech(length, VOCABULARY, generator) for length in seconds] for _ in range(case.micro_batches)]
    batches = tuple(collate(piece, OUR_TOKENS) for piece in pieces)
    samples = sum(len(speech.waveform) for piece in pieces for speech in piece)
    return GlobalBatch(
        micro_batches=batches,
        tokens=sum(len(speech.tokens) for piece in pieces for speech in piece),
        utterances=case.micro_batches * case.utterances,
        audio_seconds=samples / SAMPLE_RATE,
        padding_share=1 - samples / sum(batch.waveforms.numel() for batch in batches),
    )
