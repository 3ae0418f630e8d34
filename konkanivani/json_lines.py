"""Files of JSON lines, whole or absent."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from konkanivani.whole_file import published


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one line a row beside `path` and renames the file into place; an OSError where that cannot be done."""
    with published(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
