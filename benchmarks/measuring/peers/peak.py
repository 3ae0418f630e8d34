"""Peak memory of a step in another toolkit, which does not measure it itself."""

from collections.abc import Callable

import torch

from konkanivani.planning.tensors import LiveBytes


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
