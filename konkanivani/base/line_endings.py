"""Diagnosis of binary files saved as text: converted line endings, or a byte order mark.

Git does this to files that it treats as text (`core.autocrlf`, `* text` in .gitattributes), and editors do. Checksums
no longer match, and the bytes cannot be restored: the converted line feeds are indistinguishable from the others.
"""

from pathlib import Path

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LOOKED_AT = 2**24  # bytes examined, from the start of the file
# In random bytes one in 256 is a line feed, and one line feed in 256 follows a carriage return by chance.
LEAST_LINE_FEEDS = 6


def conversion_hint(path: Path) -> str:
    """Return "; ..." with the likely cause if the file at `path` looks like a binary file saved as text, else "".

    The result is for appending to the reason why a file cannot be read. It is "" if the file cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LOOKED_AT)
    except (OSError, ValueError):
        return ""
    if b"\0" not in content:
        return ""  # a text file where a binary one is expected: line endings are not the cause
    line_feeds = content.count(b"\n")
    is_converted = line_feeds >= LEAST_LINE_FEEDS and content.count(b"\r\n") == line_feeds
    if not is_converted and not content.startswith(BYTE_ORDER_MARK):
        return ""
    found = "each LF in it follows a CR" if is_converted else "it starts with a byte order mark"
    pattern = f"*{path.suffix}" if path.suffix else path.name
    return (
        f"; {found}, so its line endings were probably converted by git or an editor that treated it as text: "
        f"copy it again as a binary file, in git with `{pattern} -text` in .gitattributes"
    )
