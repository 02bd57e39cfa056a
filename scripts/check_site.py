# SPDX-License-Identifier: Apache-2.0
"""Checks a built site (`make docs`): each link inside it leads to a file, and to a heading or a name there."""

import functools
import pathlib
import sys
import urllib.parse

import bs4


@functools.cache
def read(path: pathlib.Path) -> tuple[set[str], list[str]]:
    """The ids of a page, and the targets of its links, pictures and scripts."""
    tags = bs4.BeautifulSoup(path.read_text(), "html.parser").find_all(True)
    ids = {tag[name] for tag in tags for name in ("id", "name") if tag.has_attr(name)}
    return ids | {""}, [tag[name] for tag in tags for name in ("href", "src") if tag.has_attr(name)]


def broken(site: pathlib.Path) -> list[str]:
    """Links without a target, each with its page."""
    links = []
    for path in sorted(page for page in site.rglob("*.html") if "_static" not in page.parts):
        for link in read(path)[1]:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = path.parent / urllib.parse.unquote(url.path) if url.path else path
            target = target / "index.html" if target.is_dir() else target
            exists = target.exists()
            if exists and target.suffix == ".html":
                exists = urllib.parse.unquote(url.fragment) in read(target.resolve())[0]
            links += [] if exists else [f"{path.relative_to(site)}: {link}"]
    return links


if __name__ == "__main__":
    links = broken(pathlib.Path(sys.argv[1]).resolve())
    print("\n".join(links) or "every link inside the site leads somewhere")
    sys.exit(bool(links))
