"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), as far as a stream of
completions uses them."""

# A server that sends this much without ending its event sends no events.
MAX_EVENT_BYTES = 1 << 20

_OTHER_FIELDS = (b"id", b"retry")


class EventSplitter:
    """Cuts the body of one response, which comes in pieces of any size, into its events."""

    def __init__(self) -> None:
        self._pending = b""
        self._skip_lf = False

    @property
    def pending(self) -> bytes:
        """The begin of an event that has not ended yet."""
        return self._pending

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Takes the next piece.

        Returns:
            The events that end in it: (name, data), the name mostly empty. Those without data are left out.

        Raises:
            ValueError: This is no stream of events; the message quotes it.
        """
        if self._skip_lf and data:
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        if b"\r" in data:
            # A line may end with CR LF, cut in two here. The CR alone ends the line; waiting would make the event late.
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
            # The standard skips unknown fields. Here they mean that something else than events is sent.
            raise ValueError(f"no server-sent event: {_quoted(block)}")
    return (name, b"\n".join(data)) if any(data) else None


def _quoted(data: bytes) -> str:
    return repr(data[:200].decode(errors="replace"))
