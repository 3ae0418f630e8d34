"""Adafactor, 8-bit AdamW, the variants of AdamW and Adafactor for bf16 weights, and the choice of one.

The 8-bit levels are the dynamic ones of Dettmers et al. (2022): seven powers of ten, each with twice the number of
steps of the next lower one, so that values ten thousand times smaller than the maximum are still resolved.
"""

from dataclasses import dataclass

import torch

from konkanivani.config import OptimizerConfig, TuningConfig
from konkanivani.models.asr import trained_parameters
from konkanivani.training.bfloat16 import StochasticRounding, in_bf16
from konkanivani.training.optimizer_state import (
    BETAS,
    EPSILON,
    MOMENTS,
    AdamW,
    Group,
    Optimizer,
    gradient_of,
    parameter_groups,
)

# --------------------
# Block-wise 8-bit quantization: per block of 256 values its maximum, and per value the nearest of 256 fractions of it.


BLOCK = 256
POWERS = 7
DROPPED_BITS = 14  # of a float32; the remaining nine bits of the mantissa exceed the finest step's resolution
KEPT = 1 << (31 - DROPPED_BITS)  # bit patterns per sign


def dynamic_shares(is_signed: bool) -> list[float]:
    """Return the 256 fractions in ascending order, including 0 and 1; each is the middle of its step."""
    steps = [(power, 2 ** (power if is_signed else power + 1)) for power in range(POWERS)]
    above = [10.0 ** (power - POWERS + 1) * (0.1 + 0.9 * (i + 0.5) / n) for power, n in steps for i in range(n)]
    return sorted([*(-share for share in above if is_signed), 0.0, *above, 1.0])


class Codebook:
    """Quantization levels on a device, with a table from the upper bits of a float32 to the nearest level's code.

    A search takes 40 times the time.
    """

    def __init__(self, is_signed: bool, like: torch.Tensor) -> None:
        shares = torch.tensor(dynamic_shares(is_signed), dtype=torch.float32, device=like.device)
        bounds = (shares[1:] + shares[:-1]) / 2
        if not is_signed:
            # Positive values never round to code 0 in an unsigned codebook: Adam divides by the second moment.
            bounds[0] = 0
        # Upper 18 bits of all floats; negative int32 patterns are the floats with the sign bit set.
        patterns = torch.arange(-KEPT, KEPT, dtype=torch.int32, device=like.device) << DROPPED_BITS
        middles = (patterns + (1 << (DROPPED_BITS - 1))).view(torch.float32)
        # Pattern 0 contains exact zeros, so it maps to level 0 and not to the middle of its interval.
        middles[KEPT] = 0
        self.nearest = torch.bucketize(middles, bounds).to(torch.uint8)
        self.shares = shares.to(like.dtype)

    def quantize(
        self, numbers: torch.Tensor, codes: torch.Tensor, largest: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        """Quantize numbers (blocks, 256) into `codes` (blocks, 256) and each block's maximum `largest`.

        `workspace` is a float32 tensor of the same shape. A block of zeros has maximum 0 and arbitrary codes. The
        relative error of a value s is at most half its quantization step, and at most s / 1024.
        """
        torch.amax(workspace.copy_(numbers).abs_(), 1, out=largest)
        shares = workspace.copy_(numbers).div_(largest[:, None])
        # In place on the bits of the workspace. An arithmetic shift keeps the sign, so patterns range from -KEPT to
        # KEPT - 1.
        patterns = shares.view(torch.int32).bitwise_right_shift_(DROPPED_BITS).add_(KEPT)
        # index_select with `out` allocates nothing, unlike indexing.
        torch.index_select(self.nearest, 0, patterns.view(-1), out=codes.view(-1))

    def dequantize(
        self, codes: torch.Tensor, largest: torch.Tensor, workspace: torch.Tensor, numbers: torch.Tensor
    ) -> None:
        """Dequantize the codes into `numbers` (blocks, 256); `workspace` as in `quantize`."""
        indices = workspace.view(torch.int32).copy_(codes)
        torch.index_select(self.shares, 0, indices.view(-1), out=numbers.view(-1))
        numbers.mul_(largest[:, None])


# --------------------
# Adafactor: 8 bytes per trained parameter for weight and gradient, and almost no optimizer state.


DECAY = -0.8  # exponent of the step: weight of the newest gradient in the mean square
# AdamW's epsilon, not the paper's 1e-30: a gradient of pure rounding error (a bias that a softmax cancels) would move
# its weight by a whole learning rate, to another value if the step is split after an OOM.
SMALLEST_SQUARE = EPSILON**2
LARGEST_UPDATE = 1.0  # root mean square of a tensor's update, in units of the learning rate
MAX_ELEMENTS = 2**20  # elements at a time: fits in the CPU's cache, and wakes threads rarely


@dataclass(frozen=True)
class FactoredWorkspace:
    """Buffers of one device for updating a tensor: one slice, values per row and per column, and scalars."""

    slice: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    more_columns: torch.Tensor
    newest: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor
    more_squares: torch.Tensor


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018) without first moment: running row and column means of the squared gradient.

    The learning rate is the schedule's: neither relative steps nor scaling by the parameter's norm. A convolution
    kernel is a matrix with one row per output channel. A vector is a matrix with a single row, for which the
    factorization is exact.
    """

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups)
        parameters = list(self.state)
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        self._workspaces = {
            device: factored_buffers([p for p in parameters if p.device == device]) for device in devices
        }
        self.workspace = [tensor for workspace in self._workspaces.values() for tensor in vars(workspace).values()]

    def new_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the row and column means of the squared gradient."""
        rows, columns = matrix_shape(parameter)
        dtype = in_at_least_fp32(parameter)
        means = {"row": parameter.new_zeros(rows, dtype=dtype), "column": parameter.new_zeros(columns, dtype=dtype)}
        return super().new_state(parameter) | means

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _update(self, group: Group, parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        workspace = self._workspaces[parameter.device]
        rows, columns = shape = matrix_shape(parameter)
        weights = parameter.view(shape)
        gradient = gradient_of(parameter).reshape(shape)
        per_slice = rows_of_a_slice(columns)
        slices = gradient.split(per_slice)
        row = workspace.rows[:rows]
        column = workspace.columns[:columns]
        more = workspace.more_columns[:columns]

        # Running means of the squared gradient over rows and columns, one slice at a time.
        torch.pow(state["step"].add_(1), DECAY, out=workspace.newest)
        column.zero_()
        for part, mean in zip(slices, row.split(per_slice), strict=True):
            squares = squared(part, place_of(part, workspace)).add_(SMALLEST_SQUARE)
            torch.mean(squares, 1, out=mean)
            column.add_(torch.sum(squares, 0, out=more))
        state["row"].lerp_(row, workspace.newest)
        state["column"].lerp_(column.div_(rows), workspace.newest)

        # Root mean square of the whole update, to clip it.
        torch.mean(state["row"], 0, out=workspace.mean)
        torch.div(state["row"], workspace.mean, out=row).rsqrt_()
        torch.rsqrt(state["column"], out=column)
        workspace.squares.zero_()
        for part, factor in zip(slices, row.split(per_slice), strict=True):
            change = torch.mul(part, column, out=place_of(part, workspace)).mul_(factor[:, None]).view(-1)
            workspace.squares.add_(torch.dot(change, change, out=workspace.more_squares))
        workspace.squares.div_(parameter.numel()).sqrt_().div_(LARGEST_UPDATE).clamp_(min=1)

        row.div_(workspace.squares)
        first = 0
        # The updates are computed a second time: storing them would need a copy of the tensor.
        for part, factor, weight in zip(slices, row.split(per_slice), weights.split(per_slice), strict=True):
            change = torch.mul(part, column, out=place_of(part, workspace)).mul_(factor[:, None])
            self.apply(parameter, weight, change, first, group)
            first += part.numel()

    def apply(
        self, parameter: torch.nn.Parameter, weight: torch.Tensor, change: torch.Tensor, first: int, group: Group
    ) -> None:
        """Decay `weight` (rows, columns), a slice of the parameter, and subtract `change` times the learning rate.

        `first` is the position of the slice's first element in the parameter.
        """
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])


def matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of a parameter that is treated as a matrix."""
    rows = len(parameter) if parameter.dim() >= 2 else 1
    return rows, parameter.numel() // rows


def in_at_least_fp32(tensor: torch.Tensor) -> torch.dtype:
    """Return the tensor's dtype, or fp32 for half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def squared(numbers: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the squares of numbers in `out`, computed in its dtype."""
    if numbers.dtype == out.dtype:
        return torch.mul(numbers, numbers, out=out)
    # The product of two bf16 numbers would be rounded to bf16 first.
    return out.copy_(numbers).square_()


def rows_of_a_slice(columns: int) -> int:
    """Return the number of rows that are updated at a time."""
    return max(1, MAX_ELEMENTS // columns)


def place_of(part: torch.Tensor, workspace: FactoredWorkspace) -> torch.Tensor:
    """Return the part of the workspace for a slice (rows, columns)."""
    return workspace.slice[: part.numel()].view(part.shape)


def factored_buffers(parameters: list[torch.nn.Parameter]) -> FactoredWorkspace:
    """Return a workspace for the largest of the parameters, all on one device."""
    shapes = [matrix_shape(parameter) for parameter in parameters]
    largest = max(min(rows, rows_of_a_slice(columns)) * columns for rows, columns in shapes)
    rows, columns = map(max, zip(*shapes, strict=True))
    sizes = (largest,), (rows,), (columns,), (columns,), (), (), (), ()
    dtype = in_at_least_fp32(parameters[0])
    return FactoredWorkspace(*(parameters[0].new_empty(size, dtype=dtype) for size in sizes))


# --------------------
# AdamW with 8-bit moments: 10 bytes per trained parameter including weight and gradient, instead of 16.


SMALLEST = 4096  # elements of a tensor with 8-bit moments: norms and biases are smaller, and the most sensitive
MAX_BLOCKS = 1024  # blocks at a time, so that the workspace stays in the CPU's cache


@dataclass(frozen=True)
class QuantizedWorkspace:
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
        self._workspaces: dict[torch.device, QuantizedWorkspace] = {}
        for device in dict.fromkeys(parameter.device for parameter in parameters):
            large = [p for p in parameters if p.device == device and p.numel() >= SMALLEST]
            if large:
                blocks = min(MAX_BLOCKS, max(len(self.state[parameter]["exp_avg"]) for parameter in large))
                self._workspaces[device] = quantized_workspace(blocks, large[0])
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
        weights = parameter.view(-1).split(MAX_BLOCKS * BLOCK)
        gradient = gradient_of(parameter).reshape(-1).split(MAX_BLOCKS * BLOCK)
        stored = zip(*(state[kind + of].split(MAX_BLOCKS) for kind in MOMENTS for of in ("", "_largest")), strict=True)
        for weight, slope, (codes, largest, codes_sq, largest_sq) in zip(weights, gradient, stored, strict=True):
            first, second, scratch = (
                buffer[: len(codes)] for buffer in (workspace.first, workspace.second, workspace.beside)
            )
            workspace.signed.dequantize(codes, largest, scratch, first)
            workspace.unsigned.dequantize(codes_sq, largest_sq, scratch, second)
            moments = first.view(-1)[: len(weight)], second.view(-1)[: len(weight)]
            update_slice(weight, slope, moments, state["step"], group)
            workspace.signed.quantize(first, codes, largest, scratch)
            workspace.unsigned.quantize(second, codes_sq, largest_sq, scratch)


def update_slice(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    step: torch.Tensor,
    group: Group,
) -> None:
    """Apply AdamW's fused update to a slice of a weight and its moments, all (N,), in place; `step` is only read."""
    first, second = moments
    torch._fused_adamw_(
        [weight],
        [gradient],
        [first],
        [second],
        [],
        [step],
        lr=group["lr"],
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=group["weight_decay"],
        eps=EPSILON,
        amsgrad=False,
        maximize=False,
    )


def quantized_workspace(blocks: int, like: torch.Tensor) -> QuantizedWorkspace:
    """Return a workspace of `blocks` blocks on the device of `like`, in its precision."""
    first, second = (torch.empty(blocks, BLOCK, dtype=like.dtype, device=like.device) for _ in range(2))
    scratch = torch.empty(blocks, BLOCK, dtype=torch.float32, device=like.device)
    return QuantizedWorkspace(first, second, scratch, Codebook(True, like), Codebook(False, like))


# --------------------
# Optimizers of bf16 weights: updates in fp32, slice by slice, rounded stochastically.


SLICE = 2**18  # elements at a time, so that the workspace stays in the CPU's cache


@dataclass(frozen=True)
class SliceWorkspace:
    """Buffers of one device for the update of a slice in fp32: weight, gradient and both moments."""

    weight: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    rounding: StochasticRounding

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the workspace."""
        return [self.weight, self.gradient, self.first, self.second, *self.rounding.tensors]


class BFloat16AdamW(AdamW):
    """AdamW whose bf16 parameters and moments are updated in fp32, slice by slice, and rounded stochastically.

    Parameters in fp32 are updated as by `AdamW`.
    """

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups)
        self._numbers = {parameter: number for number, parameter in enumerate(self.state)}
        self._workspaces = {p.device: slice_workspace(p.device) for p in self.state if in_bf16(p)}
        self.workspace = [tensor for workspace in self._workspaces.values() for tensor in workspace.tensors]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            self.update(group, [parameter for parameter in updated if not in_bf16(parameter)])
            for parameter in updated:
                if in_bf16(parameter):
                    self._update_in_slices(group, parameter)

    def _update_in_slices(self, group: Group, parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        workspace = self._workspaces[parameter.device]
        state["step"].add_(1)
        first, second = MOMENTS
        stored = parameter.view(-1), state[first].view(-1), state[second].view(-1)
        gradient = gradient_of(parameter).reshape(-1)
        for start in range(0, parameter.numel(), SLICE):
            parts = [tensor[start : start + SLICE] for tensor in stored]
            size = len(parts[0])
            slope = workspace.gradient[:size].copy_(gradient[start : start + SLICE])
            buffers = workspace.weight[:size], workspace.first[:size], workspace.second[:size]
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part)
            weight, mean, square = buffers
            update_slice(weight, slope, (mean, square), state["step"], group)
            for kind, (buffer, part) in enumerate(zip(buffers, parts, strict=True)):
                number = len(buffers) * self._numbers[parameter] + kind
                workspace.rounding.round_into(part, buffer, state["step"], number, start)


def slice_workspace(device: torch.device) -> SliceWorkspace:
    """Return the workspace of `BFloat16AdamW` on a device."""
    weight, gradient, first, second = (torch.empty(SLICE, dtype=torch.float32, device=device) for _ in range(4))
    return SliceWorkspace(weight, gradient, first, second, StochasticRounding(SLICE, device))


class BFloat16Adafactor(Adafactor):
    """Adafactor whose bf16 parameters are updated in fp32, slice by slice, and rounded stochastically."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups)
        self._numbers = {parameter: number for number, parameter in enumerate(self.state)}
        self._roundings: dict[torch.device, StochasticRounding] = {}
        self._weights: dict[torch.device, torch.Tensor] = {}
        for device in dict.fromkeys(parameter.device for parameter in self.state if in_bf16(parameter)):
            largest = len(self._workspaces[device].slice)
            self._roundings[device] = StochasticRounding(largest, device)
            self._weights[device] = torch.empty(largest, dtype=torch.float32, device=device)
            self.workspace += [*self._roundings[device].tensors, self._weights[device]]

    def apply(
        self, parameter: torch.nn.Parameter, weight: torch.Tensor, change: torch.Tensor, first: int, group: Group
    ) -> None:
        """Subtract `change` (rows, columns) from a slice of the parameter, `first` elements after its start."""
        if not in_bf16(parameter):
            super().apply(parameter, weight, change, first, group)
            return
        exact = self._weights[parameter.device][: weight.numel()].view(weight.shape).copy_(weight)
        super().apply(parameter, exact, change, first, group)
        step = self.state[parameter]["step"]
        rounding = self._roundings[parameter.device]
        rounding.round_into(weight.view(-1), exact.view(-1), step, self._numbers[parameter], first)


# --------------------
# Construction of the optimizer that `--optimizer` and `--weight_dtype` name.


WHOLE = TuningConfig()  # all layers are trained, with the same learning rate
KINDS = {"adamw": AdamW, "adamw8bit": AdamW8bit, "adafactor": Adafactor}
BF16_KINDS = {"adamw": BFloat16AdamW, "adafactor": BFloat16Adafactor}


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig, tuning: TuningConfig = WHOLE) -> Optimizer:
    """Return an optimizer over the trainable parameters of `model`."""
    kinds = BF16_KINDS if any(map(in_bf16, trained_parameters(model))) else KINDS
    return kinds[config.optimizer](parameter_groups(model, config, tuning))
