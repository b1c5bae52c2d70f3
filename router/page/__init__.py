"""The page at `/`: chat, the time line of each answer, and the cluster. Its files are in `static/`.

They are plain ES modules, CSS and HTML that browsers run as they are; `static/app.js` is where to begin reading. They
are the same for everybody and hold no data, which the page asks the API for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page.

    Attributes:
        media_type: Its `Content-Type`.
        etag: Changes with its content.
    """

    content: bytes
    media_type: str
    etag: str


def page_files(*, needs_key: bool) -> Mapping[str, PageFile]:
    """Reads all files of the page, by name.

    Args:
        needs_key: The page must ask for a key before anything else.
    """
    read: dict[str, PageFile] = {}
    for entry in files(__name__).joinpath("static").iterdir():
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            if needs_key:
                content = content.replace(b'data-keys="no"', b'data-keys="yes"')
            read[entry.name] = PageFile(content, media_type, f'"{blake2b(content, digest_size=8).hexdigest()}"')
    return read
