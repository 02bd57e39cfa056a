# SPDX-License-Identifier: Apache-2.0
"""Checks a built site: each link inside it leads to a file, and to a heading or name that is there.

    python scripts/check_site.py out/docs
"""

import functools
import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    """The ids of a page, and where its links, pictures and scripts lead."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self.ids: set[str] = {""}
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Notes the attributes that name something or lead to it."""
        del tag
        values = {name: value for name, value in attributes if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]


read = functools.cache(Page)


def broken(site: pathlib.Path) -> list[str]:
    """Links that lead nowhere, each with the page that has it."""
    found = []
    for path in sorted(site.rglob("*.html")):
        for link in read(path).links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = path.parent / urllib.parse.unquote(url.path) if url.path else path
            target = target / "index.html" if target.is_dir() else target
            fragment = urllib.parse.unquote(url.fragment)
            is_there = target.exists() and (target.suffix != ".html" or fragment in read(target.resolve()).ids)
            found += [] if is_there else [f"{path.relative_to(site)}: {link}"]
    return found


if __name__ == "__main__":
    found = broken(pathlib.Path(sys.argv[1]).resolve())
    print("\n".join(found) or "every link inside the site leads somewhere")
    sys.exit(bool(found))
