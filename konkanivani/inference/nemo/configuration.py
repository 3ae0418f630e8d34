"""Safe reading of the YAML configuration of a .nemo file, with checks that every setting is known."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard, TypeVar

from konkanivani.base.errors import CheckpointError, ResourceError
from konkanivani.inference.nemo.archive import refused

MAX_DEPTH = 64
PACKAGE = "PyYAML"  # the extra `import` of setup.cfg

Value = TypeVar("Value")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an int or a float; a bool, which `isinstance` would accept, is neither."""
    return type(value) in (int, float)


class Section:
    """One mapping of a configuration; keys that have not been read yet are in `left`, and `finish` rejects them."""

    def __init__(self, path: Path, name: str, values: object) -> None:
        if not isinstance(values, dict):
            raise refused(path, f"its configuration has no {name}", "Use a file saved by NeMo")
        self._path = path
        self._name = name
        self.left = dict(values)

    def get(self, key: str, default: object = None) -> object:
        """Return the value of `key` and mark it as read, or return the default if the key is missing."""
        return self.left.pop(key, default)

    def only(self, key: str, *built: Value) -> Value:
        """Return the value of `key`, which must be one of the supported values `built`; the first is the default."""
        value = self.get(key, built[0])
        for one in built:
            # Compare types too: in Python True == 1 and 1 == 1.0.
            if type(value) is type(one) and value == one:
                return one
        raise self.unbuilt(key, value, " or ".join(map(repr, built)))

    def only_all(self, built: Mapping[str, tuple[object, ...]]) -> None:
        """Apply `only` to several keys."""
        for key, values in built.items():
            self.only(key, *values)

    def number(self, key: str, default: float | None, least: float, most: float) -> int | float:
        """Return a number from `least` to `most`."""
        value = self.get(key, default)
        # A NaN fails the comparison.
        if not is_number(value) or not least <= value <= most:
            raise self.unbuilt(key, value, f"a number from {least} to {most}")
        return value

    def count(self, key: str, default: int | None, least: int = 1) -> int:
        """Return an integer from `least` to 65,536."""
        value = self.number(key, default, least, 2**16)
        if type(value) is not int:
            raise self.unbuilt(key, value, "a whole number")
        return value

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that do not change the recognised text."""
        for key in keys:
            self.get(key)

    def unbuilt(self, key: str, value: object, built: str) -> CheckpointError:
        """Return the error for an unsupported value."""
        reason = f"its {self._name}.{key} is {value!r:.80}, but only {built} is supported"
        return refused(self._path, reason, "Use another model")

    def finish(self) -> None:
        """Raise a CheckpointError if a key has not been read."""
        for key, value in self.left.items():
            reason = f"its {self._name}.{key!s:.80} is {value!r:.80}, which this version does not know"
            raise refused(self._path, reason, "Use another model, or a newer version")


def read_yaml(text: bytes, path: Path) -> object:
    """Parse YAML into plain values.

    Raises a CheckpointError for aliases, tags of classes, or nesting deeper than `MAX_DEPTH`, and a ResourceError with
    an install command if PyYAML is missing.
    """
    if importlib.util.find_spec("yaml") is None:
        raise ResourceError(
            f"Reading a .nemo file needs the package {PACKAGE}, which is not installed. Install: "
            f"{sys.executable} -m pip install {PACKAGE}"
        )
    import yaml

    # Safe loaders construct no Python objects. libyaml, if available, is faster.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    depth = 0
    try:
        # First pass over events only, before any value is built. Ten nested aliases that each refer ten times to the
        # next expand to 10^10 items when the result is traversed.
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
                raise refused(path, "its configuration has an alias, or is nested too deeply")
        reader = loader(text)
        try:
            return reader.get_single_data()
        finally:
            reader.dispose()
    # Malformed dates raise ValueError, unhashable keys TypeError.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise refused(path, f"its configuration is not plain YAML ({reason:.200})") from None
