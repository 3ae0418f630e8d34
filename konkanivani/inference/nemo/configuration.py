"""The YAML of a .nemo file, read as plain values; and a part of it, of which every value has to be asked for."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from konkanivani.base.errors import CheckpointError, ResourceError
from konkanivani.inference.nemo.archive import refused

MAX_DEPTH = 64
PACKAGE = "PyYAML"  # the extra `import` of setup.cfg


class Section:
    """A part of a configuration; what nobody has asked for is `left`, and refused at the end."""

    def __init__(self, path: Path, name: str, values: object) -> None:
        if not isinstance(values, dict):
            raise refused(path, f"its configuration has no {name}", "Use a file saved by NeMo")
        self._path, self._name, self.left = path, name, dict(values)

    def get(self, key: str, default: object = None) -> object:
        """The value, or the default where it is not given."""
        return self.left.pop(key, default)

    def only(self, key: str, *built: object) -> object:
        """One of the values that are built, the first where none is given."""
        value = self.get(key, built[0])
        if not any(type(value) is type(one) and value == one for one in built):
            raise self.unbuilt(key, value, " or ".join(map(repr, built)))
        return value

    def only_all(self, built: Mapping[str, tuple[object, ...]]) -> None:
        """The same of several values."""
        for key, values in built.items():
            self.only(key, *values)

    def number(self, key: str, default: float | None, least: float, most: float) -> int | float:
        """A number within bounds."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.unbuilt(key, value, f"a number from {least} to {most}")
        return value

    def count(self, key: str, default: int | None, least: int = 1) -> int:
        """A whole number, of a size that a model may have."""
        value = self.number(key, default, least, 2**16)
        if type(value) is not int:
            raise self.unbuilt(key, value, "a whole number")
        return value

    def ignore(self, *keys: str) -> None:
        """Leaves aside what changes nothing of what is heard."""
        for key in keys:
            self.get(key)

    def unbuilt(self, key: str, value: object, built: str) -> CheckpointError:
        """The error of a value that is not built."""
        reason = f"its {self._name}.{key} is {value!r:.80}, but only {built} is supported"
        return refused(self._path, reason, "Use another model")

    def finish(self) -> None:
        """Raises a CheckpointError for what nobody has asked for."""
        for key, value in self.left.items():
            reason = f"its {self._name}.{key!s:.80} is {value!r:.80}, which this version does not know"
            raise refused(self._path, reason, "Use another model, or a newer version")


def read_yaml(text: bytes, path: Path) -> object:
    """What a YAML text holds: no alias, no tag of a class, no great depth; PyYAML is asked for where it is missing.

    Ten aliases, each of ten of the next, are ten thousand million to whoever walks what was read.
    """
    if importlib.util.find_spec("yaml") is None:
        raise ResourceError(
            f"Reading a .nemo file needs the package {PACKAGE}, which is not installed. Install: "
            f"{sys.executable} -m pip install {PACKAGE}"
        )
    import yaml

    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
                raise refused(path, "its configuration has an alias, or is nested too deeply")
        reader = loader(text)
        try:
            return reader.get_single_data()
        finally:
            reader.dispose()
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise refused(path, f"its configuration is not plain YAML ({reason:.200})") from None
