"""Files of JSON lines, whole or absent."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one line a row beside `path` and renames the file into place; an OSError where that cannot be done."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(partial, path)
