"""Planned and measured memory of one training step.

Run each function in a new process, since tracing and counting live bytes take memory themselves.
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
from konkanivani.memory.monitor import MIB, reset_peak_resident, resident_mib, set_mmap_threshold
from konkanivani.model.architecture import architecture_of
from konkanivani.planning.sizes import device_costs
from konkanivani.planning.tensors import LiveBytes
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import build_tracer
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step

STEPS = 3  # steps over which the resident memory and CUDA's allocator are measured


def trace_plan(case: Case) -> Planned:
    """Return the memory plan of this case, computed as for `--memory_budget`."""
    costs = device_costs(choose_device(case.device))
    load = BatchShape(case.utterances, case.seconds, round(case.seconds * TOKENS_PER_SECOND))
    config = case.config()
    tracer = build_tracer(config, architecture_of(config, VOCABULARY), costs)
    peak = tracer.trace(load, RecomputePolicy(case.recompute))
    return Planned(peak.bytes, costs.workspace, costs.context)


def measure_live(case: Case) -> tuple[int, int]:
    """Return the peak of live bytes in the second step on a CPU, and the bytes of the waiting inputs.

    The peak includes weights, gradients, optimizer state, buffers of the front end and the input of one micro-batch.
    """
    parts, global_batch = build_parts(case), build_global_batch(case)
    train_step(parts, global_batch, 0)  # allocates the optimizer state
    live = LiveBytes()
    live.count(parts.state_tensors())
    inputs = [batch.tensors() for batch in global_batch.micro_batches]
    live.count(tensor for tensors in inputs for tensor in tensors)
    with live:
        train_step(parts, global_batch, 1)
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in inputs]
    # The plan includes one input, the largest; the others of the global batch wait in host memory.
    waiting = sum(sizes) - max(sizes)
    return live.peak - waiting, waiting


def measure_resident(case: Case) -> int:
    """Return the growth in bytes from the resident memory before the model is built to the peak of a few steps."""
    set_mmap_threshold()  # as in a run with a memory budget: freed tensors leave no holes in the heap
    reset_peak_resident()
    before = resident_mib()
    parts, global_batch = build_parts(case), build_global_batch(case)
    for step in range(STEPS):
        train_step(parts, global_batch, step)
    return round((parts.monitor.overall_peak_mib() - before) * MIB)


def measure_cuda(case: Case) -> tuple[int, int, int]:
    """Return the peaks of allocated and reserved bytes, and the process's GPU memory outside of the allocator.

    The last value is correct only if no other process uses the GPU.
    """
    parts, global_batch = build_parts(case), build_global_batch(case)
    device = parts.forward.device
    warm_up(parts, global_batch)
    for step in range(1, STEPS):
        train_step(parts, global_batch, step)
    wait_for_device(device)
    free, total = torch.cuda.mem_get_info(device)
    # The monitor resets the allocator's peak at the end of each phase and keeps the largest value.
    allocated = round(max(parts.monitor.overall_peak_mib() * MIB, torch.cuda.max_memory_allocated(device)))
    reserved = torch.cuda.max_memory_reserved(device)
    return allocated, reserved, total - free - torch.cuda.memory_reserved(device)


def build_parts(case: Case) -> StepParts:
    """Return the step parts of this trainer for the case."""
    config, device = case.config(), choose_device(case.device)
    return build_step_parts(config, architecture_of(config, VOCABULARY), device, TOTAL_STEPS)


def build_global_batch(case: Case) -> GlobalBatch:
    """Return a global batch of noise with the case's durations and random tokens, equal on every machine."""
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
