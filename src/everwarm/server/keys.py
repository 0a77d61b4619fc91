"""Who asks: API keys, and what each of them opens.

A tenant's key opens everything of that tenant. A reader's key opens the same to look at, and changes nothing. An
operator's key opens `/metrics`, with the figures of all tenants, and nothing else. Without tenants' keys everyone is
the tenant `default`; without any key everyone is the operator, too.
"""

import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers

from everwarm.kv.warm.tenants import DEFAULT_TENANT
from everwarm.server.errors import ApiError

CALLER = "everwarm.caller"
"""Where a request's scope says whose it is, once that is known."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is."""

    tenant: str | None  # None: an operator, who is nobody's tenant
    is_operator: bool = False
    reads_only: bool = False


class Keys:
    """All keys. They are compared in constant time, all of them each time."""

    def __init__(
        self, tenants: Mapping[str, str], operators: Collection[str] = (), readers: Mapping[str, str] | None = None
    ) -> None:
        """`tenants` by key; `readers`: the same for keys that may only look."""
        readers = readers or {}
        self.is_open = not tenants and not readers
        """Everyone may ask, without a key."""
        self.tenants = frozenset([*tenants.values(), *readers.values()]) or frozenset(
            [DEFAULT_TENANT] if operators else []
        )
        """Those whose figures are told apart from all others'."""
        self._callers = {key.encode(): Caller(tenant) for key, tenant in tenants.items()}
        self._callers |= {key.encode(): Caller(tenant, reads_only=True) for key, tenant in readers.items()}
        self._callers |= {key.encode(): Caller(None, is_operator=True) for key in operators}
        self._nobody = None if not self.is_open else Caller(DEFAULT_TENANT, is_operator=not operators)

    def caller(self, headers: Headers) -> Caller:
        """Whose key was sent. Raises ApiError 401."""
        given = headers.get("x-api-key") or ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        found = self._nobody
        for key, caller in self._callers.items():
            if hmac.compare_digest(key, given.encode("utf-8", "surrogateescape")):
                found = caller
        if found is None:
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key", "authentication_error"
            )
        return found

    def tenant(self, headers: Headers, *, reading: bool = True) -> Caller:
        """Whose key was sent. Raises ApiError 401, or 403 if it is an operator's, or a reader's that would change
        something.
        """
        caller = self.caller(headers)
        if caller.tenant is None:
            raise ApiError(403, "this is an operator's key: it opens /metrics only", "permission_error")
        if caller.reads_only and not reading:
            raise ApiError(403, "this key may only look: it generates nothing and changes nothing", "permission_error")
        return caller
