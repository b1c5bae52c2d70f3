"""How both ends of a connection prove that they know the key of the receiver's address, which is never sent.

A sender may otherwise be led to write into any process: the receiver says into which one, and where. So what a receiver
says is believed only with a code over it and the sender's nonce, and a sender is let in only with a code over the
receiver's nonce. The address with the key reaches the sender over an authenticated stream (`PrefillStart`).
"""

import hmac
import secrets

from cpd.common.errors import TransferError
from kvtransfer.session.frames import CODE_BYTES, NONCE_BYTES, CloseNotice, Hello, Proof, Welcome


class SenderGreeting:
    """The sender's part.

    Args:
        key: From the receiver's address.
        page_bytes: Page size that the sender expects of the receiver.
        details: What the transport adds.

    Attributes:
        hello: To send first.
    """

    def __init__(self, key: bytes, page_bytes: int, details: bytes = b"") -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.hello = Hello(self._nonce, _hello_code(key, self._nonce, page_bytes, details), page_bytes, details)

    def answer(self, welcome: Welcome) -> Proof:
        """Returns what to send next.

        Raises:
            TransferError: What the receiver says was not said by the transport with this address.
        """
        if not hmac.compare_digest(welcome.code, _welcome_code(self._key, self._nonce, welcome.nonce, welcome.details)):
            raise TransferError("the receiver does not prove that it has this address, so nothing is written to it")
        return Proof(_code(self._key, b"proof", self._nonce, welcome.nonce))


class ReceiverGreeting:
    """The receiver's part.

    Args:
        key: Key of this transport's address.

    Attributes:
        proved: True once the sender has proved that it knows the key.
    """

    def __init__(self, key: bytes) -> None:
        self.proved = False
        self._key = key
        self._expected = b""

    def knows_key(self, opening: Hello | CloseNotice) -> bool:
        """True if somebody with the key has said this, perhaps at another time."""
        if isinstance(opening, CloseNotice):
            return hmac.compare_digest(opening.code, _code(self._key, b"close", opening.connection))
        code = _hello_code(self._key, opening.nonce, opening.page_bytes, opening.details)
        return hmac.compare_digest(opening.code, code)

    def welcome(self, hello: Hello, details: bytes) -> Welcome:
        """Returns the answer to a Hello."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._expected = _code(self._key, b"proof", hello.nonce, nonce)
        return Welcome(nonce, _welcome_code(self._key, hello.nonce, nonce, details), details)

    def check(self, proof: Proof) -> None:
        """Raises TransferError if the sender does not know the key."""
        if self.proved or not hmac.compare_digest(proof.code, self._expected):
            raise TransferError("the sender does not prove that it knows this transport's address")
        self.proved = True


def close_notice(key: bytes, connection: bytes) -> CloseNotice:
    """Returns the close notice of a connection to the transport with this key."""
    return CloseNotice(connection, _code(key, b"close", connection))


def _hello_code(key: bytes, nonce: bytes, page_bytes: int, details: bytes) -> bytes:
    return _code(key, b"hello", nonce, page_bytes.to_bytes(8, "little"), details)


def _welcome_code(key: bytes, sender_nonce: bytes, nonce: bytes, details: bytes) -> bytes:
    return _code(key, b"welcome", sender_nonce, nonce, details)


def _code(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """A code over parts that have the same length each time, but for the last."""
    return hmac.digest(key, b" ".join((label, b"".join(parts))), "sha256")[:CODE_BYTES]
