"""Parser of an HTML page, for tests that corpus text is escaped."""

from html.parser import HTMLParser


class PageParts(HTMLParser):
    """Tags and attributes of a page, and the elements that are not closed at its end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.opened, self.pictures = set(), set(), [], []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag == "svg":
            self.pictures.append(dict(attrs))
        if tag not in ("meta", "br"):
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag
