"""Binary files that a program has saved again as text: their line ends converted, or with a byte order mark.

Git does this to files that it takes for text (`core.autocrlf`, `* text` in .gitattributes), and editors do. No checksum
matches afterwards, and the bytes cannot be restored: which line feeds were converted is not known.
"""

from pathlib import Path

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LOOKED_AT = 2**24  # bytes from the start of a file
# A binary file has one line feed in 256 bytes, and one of 256 follows a carriage return by chance.
LEAST_LINE_FEEDS = 6


def conversion_hint(path: Path) -> str:
    """Return "; ..." with the likely cause if the bytes at `path` look like a binary file saved as text, else "".

    To be appended to the reason why a file cannot be read. An error of the disk leaves it empty.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LOOKED_AT)
    except (OSError, ValueError):
        return ""
    if b"\0" not in content:
        return ""  # a text in place of a binary file: its line endings are not the cause
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
