"""The peak of a step of another toolkit's model, which does not count it itself."""

from collections.abc import Callable

import torch

from konkanivani.memory.live_bytes import LiveBytes


def peak_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], float], device: str) -> int:
    """Of one more step: the allocator's on CUDA, that of live tensors on a CPU, weights and moments included."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    live = LiveBytes()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    live.count([*model.parameters(), *model.buffers(), *filter(torch.is_tensor, moments)])
    with live:
        step()
    return live.peak
