"""Channel selection for recordings with one speaker per channel; channels are counted from 0."""

from collections.abc import Mapping

import numpy as np

MEAN = "omit it for the mean of all channels"
NO_COLUMN = "none"
"""Value of --channel_column for not reading channels from a table."""


def parse_channel(fields: Mapping[str, object]) -> int | None:
    """Return the channel of a JSON row; None if it has none, which means the average of all channels.

    The field is `channel`, or NeMo's `channel_selector`, in which `"average"` is allowed too. Raise a `ValueError` for
    any other value: a bool, a float, a string or a negative number is never rounded or converted.
    """
    name = "channel" if fields.get("channel") is not None else "channel_selector"
    value = fields.get(name)
    if value is None or (name == "channel_selector" and value == "average"):
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be the number of a channel, from 0, not {value!r:.200}: {MEAN}")
    return value


def parse_channel_cell(cell: object, column: str) -> int | None:
    """Return the channel in a table's cell, None if it is empty; raise a `ValueError` as `parse_channel` does.

    The cells of a text table are strings of digits, the cells of a typed table are integers.
    """
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    # A bool is an int, but its repr is not decimal, so that it is rejected below.
    text = cell.strip() if isinstance(cell, str) else repr(cell)
    if isinstance(cell, (int, str)) and text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    raise ValueError(
        f"its column {column} must be the number of a channel, from 0, not {cell!r:.200}: leave it empty for "
        f"the mean of all channels, or give --channel_column {NO_COLUMN} if the column is something else"
    )


def channel_error(channel: int | None, channels: int) -> str:
    """Return an error message if a file with `channels` channels lacks `channel`; otherwise an empty string."""
    if channel is None or channel < channels:
        return ""
    holds = "1 channel" if channels == 1 else f"{channels} channels"
    return f"it has no channel {channel}: it has {holds}, counted from 0"


def select_channel(samples: np.ndarray, channel: int | None) -> np.ndarray:
    """Return the channel's samples (frames, 1), or `samples` (frames, channels) if `channel` is None."""
    # A copy, so that the memory of the other channels can be freed.
    return samples if channel is None else np.ascontiguousarray(samples[:, channel : channel + 1])
