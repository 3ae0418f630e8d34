"""Adafactor: 8 bytes per trained parameter for weight and gradient, and almost no optimizer state."""

from dataclasses import dataclass

import torch

from konkanivani.training.optimizer import EPSILON, Group, Optimizer, gradient_of

DECAY = -0.8  # exponent of the step: weight of the newest gradient in the mean square
# AdamW's epsilon, not the paper's 1e-30: a gradient of pure rounding error (a bias that a softmax cancels) would move
# its weight by a whole learning rate, to another value if the step is split after an OOM.
SMALLEST_SQUARE = EPSILON**2
LARGEST_UPDATE = 1.0  # root mean square of a tensor's update, in units of the learning rate
SLICE = 2**20  # elements at a time: fits in the CPU's cache, and wakes threads rarely


@dataclass(frozen=True)
class Workspace:
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
        self._workspaces = {device: new_workspace([p for p in parameters if p.device == device]) for device in devices}
        self.workspace = [tensor for workspace in self._workspaces.values() for tensor in vars(workspace).values()]

    def new_state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the row and column means of the squared gradient."""
        rows, columns = matrix_shape(parameter)
        return super().new_state(parameter) | {"row": parameter.new_zeros(rows), "column": parameter.new_zeros(columns)}

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
            squares = torch.mul(part, part, out=place_of(part, workspace)).add_(SMALLEST_SQUARE)
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

        weights.mul_(1 - group["lr"] * group["weight_decay"])
        row.div_(workspace.squares)
        # The updates are computed a second time: storing them would need a copy of the tensor.
        for part, factor, weight in zip(slices, row.split(per_slice), weights.split(per_slice), strict=True):
            change = torch.mul(part, column, out=place_of(part, workspace)).mul_(factor[:, None])
            weight.add_(change, alpha=-group["lr"])


def matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of a parameter that is treated as a matrix."""
    rows = len(parameter) if parameter.dim() >= 2 else 1
    return rows, parameter.numel() // rows


def rows_of_a_slice(columns: int) -> int:
    """Return the number of rows that are updated at a time."""
    return max(1, SLICE // columns)


def place_of(part: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Return the part of the workspace for a slice (rows, columns)."""
    return workspace.slice[: part.numel()].view(part.shape)


def new_workspace(parameters: list[torch.nn.Parameter]) -> Workspace:
    """Return a workspace for the largest of the parameters, all on one device."""
    shapes = [matrix_shape(parameter) for parameter in parameters]
    largest = max(min(rows, rows_of_a_slice(columns)) * columns for rows, columns in shapes)
    rows, columns = map(max, zip(*shapes, strict=True))
    sizes = (largest,), (rows,), (columns,), (columns,), (), (), (), ()
    return Workspace(*(parameters[0].new_empty(size) for size in sizes))
