"""AdamW with 8-bit moments: 10 bytes per trained parameter including weight and gradient, instead of 16."""

from dataclasses import dataclass

import torch

from konkanivani.training.optimizer import BETAS, EPSILON, MOMENTS, AdamW, Group, gradient_of
from konkanivani.training.optimizers.blocks import BLOCK, Codebook

SMALLEST = 4096  # elements of a tensor with 8-bit moments: norms and biases are smaller, and the most sensitive
SLICE = 1024  # blocks at a time, so that the workspace stays in the CPU's cache


@dataclass(frozen=True)
class Workspace:
    """Buffers of one device for updating a slice of a tensor: both moments and a temporary, each (blocks, 256)."""

    first: torch.Tensor
    second: torch.Tensor
    beside: torch.Tensor
    signed: Codebook
    unsigned: Codebook

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the workspace."""
        books = self.signed, self.unsigned
        return [self.first, self.second, self.beside, *(part for book in books for part in (book.nearest, book.shares))]


class AdamW8bit(AdamW):
    """AdamW with block-wise 8-bit moments (Dettmers et al., 2022).

    One slice of a tensor at a time is dequantized, updated and quantized again. The update uses the kernel of AdamW, so
    the only difference is the rounding of the moments. Tensors with fewer than 4096 elements have unquantized moments.
    """

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups)
        parameters = list(self.state)
        self._workspaces: dict[torch.device, Workspace] = {}
        for device in dict.fromkeys(parameter.device for parameter in parameters):
            large = [p for p in parameters if p.device == device and p.numel() >= SMALLEST]
            if large:
                blocks = min(SLICE, max(len(self.state[parameter]["exp_avg"]) for parameter in large))
                self._workspaces[device] = new_workspace(blocks, large[0])
        self.workspace = [tensor for workspace in self._workspaces.values() for tensor in workspace.tensors]

    def new_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return codes (blocks, 256) and block maxima (blocks,) of both moments; the last block is padded with 0."""
        state = super().new_state(parameter)
        if parameter.numel() < SMALLEST:
            return state
        blocks = -(-parameter.numel() // BLOCK)
        for kind in MOMENTS:
            state[kind] = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=parameter.device)
            state[f"{kind}_largest"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            self.update(group, [parameter for parameter in updated if parameter.numel() < SMALLEST])
            for parameter in updated:
                if parameter.numel() >= SMALLEST:
                    self._update_in_slices(group, parameter)

    def _update_in_slices(self, group: Group, parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        workspace = self._workspaces[parameter.device]
        # The fused kernel reads the step without incrementing it, so once per tensor, not once per slice.
        state["step"].add_(1)
        weights = parameter.view(-1).split(SLICE * BLOCK)
        gradient = gradient_of(parameter).reshape(-1).split(SLICE * BLOCK)
        stored = zip(*(state[kind + of].split(SLICE) for kind in MOMENTS for of in ("", "_largest")), strict=True)
        for weight, slope, (codes, largest, codes_sq, largest_sq) in zip(weights, gradient, stored, strict=True):
            first, second, beside = (one[: len(codes)] for one in (workspace.first, workspace.second, workspace.beside))
            workspace.signed.dequantize(codes, largest, beside, first)
            workspace.unsigned.dequantize(codes_sq, largest_sq, beside, second)
            torch._fused_adamw_(
                [weight],
                [slope],
                [first.view(-1)[: len(weight)]],
                [second.view(-1)[: len(weight)]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=group["weight_decay"],
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )
            workspace.signed.quantize(first, codes, largest, beside)
            workspace.unsigned.quantize(second, codes_sq, largest_sq, beside)


def new_workspace(blocks: int, like: torch.Tensor) -> Workspace:
    """Return a workspace of `blocks` blocks on the device of `like`, in its precision."""
    first, second = (torch.empty(blocks, BLOCK, dtype=like.dtype, device=like.device) for _ in range(2))
    beside = torch.empty(blocks, BLOCK, dtype=torch.float32, device=like.device)
    return Workspace(first, second, beside, Codebook(True, like), Codebook(False, like))
