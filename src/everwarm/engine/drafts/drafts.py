"""Drafts of one model: what all its sequences share."""

from collections.abc import Sequence

from everwarm.engine.drafts.acceptance import Acceptance
from everwarm.engine.drafts.lookup import Lookup
from everwarm.engine.drafts.tenant_tokens import TenantTokens


class Drafts:
    """What was said, and how well drafts of it do. From any thread."""

    def __init__(self, most_bytes: int, exact: bool) -> None:
        """Unless the backend is `exact`, only what is certain is drafted: more rows would change the numbers."""
        self._exact = exact
        self._tokens = TenantTokens(most_bytes)
        self._greedy, self._sampled = Acceptance(), Acceptance()

    @property
    def size_bytes(self) -> int:
        """Memory of what the tenants' agents have said."""
        return self._tokens.size_bytes

    def lookup(self, prompt: Sequence[int], context: int, tenant: str | None, *, greedy: bool) -> Lookup | None:
        """Drafts for one sequence; without a tenant only from its own tokens."""
        if not self._exact:
            return None
        others = None if tenant is None else self._tokens.of(tenant)
        return Lookup(prompt, context, Acceptance(self._greedy if greedy else self._sampled), others)

    def forget(self, tenant: str) -> None:
        """An agent of the tenant is removed. What it has said can't be told from what others have: all of it goes."""
        self._tokens.forget(tenant)

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        """An agent of the tenant has heard and said this."""
        if self._exact:
            self._tokens.remember(tenant, tokens)
