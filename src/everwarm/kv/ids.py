"""Which model's blocks these are: the ids that are compared whole, never by shape."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from everwarm.errors import StoreError
from everwarm.kv.chain import Key, root_key
from everwarm.kv.layout import Group, Layout


@dataclass(frozen=True, slots=True)
class ModelIds:
    """The identity of one model's KV."""

    weights_id: str
    numerics_id: str
    layout: Layout
    name: str  # for people
    kv_type: str

    @property
    def directory(self) -> str:
        """The model's place in a store."""
        return f"{self.weights_id[:16]}-{self.numerics_id[:16]}"

    def root(self, salt: bytes) -> Key:
        """The name that the histories of one salt begin with."""
        return _root(salt, self)

    def as_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self) | {"layout": self.layout.as_json()}))
        return plain

    @staticmethod
    def from_json(value: Any) -> "ModelIds":
        """Raises StoreError."""
        try:
            groups = tuple(Group(**group) for group in value["layout"]["groups"])
            return ModelIds(**{**value, "layout": Layout(int(value["layout"]["block_tokens"]), groups)})
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"model.json: {error!r}") from None


@lru_cache(maxsize=1024)
def _root(salt: bytes, ids: ModelIds) -> Key:
    """Every look-up asks for it; the digest of the layout takes longer than all else."""
    return root_key(salt, ids.layout.digest, ids.weights_id, ids.numerics_id)
