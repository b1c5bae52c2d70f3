"""The part of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) that streams of
completions use."""

# A longer piece without the end of an event is not a stream of events.
MAX_EVENT_BYTES = 1 << 20

_OTHER_FIELDS = (b"id", b"retry")


class EventSplitter:
    """Splits the body of one response, in pieces of any size, into events."""

    def __init__(self) -> None:
        self._pending = b""
        self._skip_lf = False

    @property
    def pending(self) -> bytes:
        """The beginning of an incomplete event."""
        return self._pending

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Takes the next piece.

        Returns:
            The events that end in it, as (name, data); most names are empty. Events without data are left out.

        Raises:
            ValueError: It is not a stream of events; the message quotes it.
        """
        if self._skip_lf and data:
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        if b"\r" in data:
            # CR LF may be split between two pieces. The CR already ends the line, so that the event is not delayed.
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._pending:
            data = self._pending + data
        blocks = data.split(b"\n\n")
        self._pending = blocks.pop()
        if len(self._pending) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes: {_quoted(self._pending)}")
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append((b"", block[6:]))
            elif event := _parse(block):
                events.append(event)
        return events


def _parse(block: bytes) -> tuple[bytes, bytes] | None:
    name, data = b"", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
        elif field and field not in _OTHER_FIELDS:  # a line that begins with a colon is a comment
            # The standard ignores unknown fields. Here they show that the body has no events.
            raise ValueError(f"not a server-sent event: {_quoted(block)}")
    return (name, b"\n".join(data)) if any(data) else None


def _quoted(data: bytes) -> str:
    return repr(data[:200].decode(errors="replace"))
