"""Reasoning that a client carries for us: the text of it, sealed so that we know it again.

Clients that keep nothing on the server send reasoning back as an opaque text (`encrypted_content`, `signature`). Ours
holds the reasoning itself and a code that only this server could have made for this tenant. What was not made here is
not an error: it was made by another model, and is ignored.
"""

import base64
import binascii
import hashlib
import hmac
import zlib

PREFIX = "ew1."
MOST_TEXT = 4 << 20
_CODE_BYTES = 16


class Seals:
    """Seals of one tenant. `secret` must be the tenant's alone, and the same after a restart."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"everwarm-seal").digest()

    def seal(self, text: str) -> str:
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
        return PREFIX + base64.urlsafe_b64encode(self._code(packed) + packed).decode()

    def open(self, sealed: object) -> str | None:
        """The text; None if it was not sealed here for this tenant."""
        if not isinstance(sealed, str) or not sealed.startswith(PREFIX) or len(sealed) > MOST_TEXT:
            return None
        try:
            data = base64.b64decode(sealed[len(PREFIX) :], b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        code, packed = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(packed)):
            return None
        inflate = zlib.decompressobj()
        return inflate.decompress(packed, MOST_TEXT).decode("utf-8", "surrogatepass")

    def _code(self, packed: bytes) -> bytes:
        return hmac.digest(self._key, packed, "sha256")[:_CODE_BYTES]
