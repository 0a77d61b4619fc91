"""What a generation needs of a loaded model, and nothing else."""

from dataclasses import dataclass

from everwarm.engine.admission import Admission
from everwarm.engine.drafts.drafts import Drafts
from everwarm.engine.engine import Engine
from everwarm.kernels.backend import RowOperations
from everwarm.kv.index.index import Index
from everwarm.kv.store import AgentStore
from everwarm.model.transformer import Transformer
from everwarm.text.tokenizer import Tokenizer
from everwarm.waiting import Line
from everwarm.weights.cache.cache import WeightCache


@dataclass(frozen=True, slots=True)
class Runtime:
    """Made by whoever owns a model; every generation gets one."""

    tokenizer: Tokenizer
    control_ids: frozenset[int]  # of the tokenizer's control tokens
    long_texts: Line[None]  # only one long text is tokenised at a time
    store: AgentStore | None  # None: nothing is looked up, nothing is kept
    index: Index  # the memory of sequences that no agent owns
    admission: Admission
    engine: Engine
    model: Transformer
    rows: RowOperations  # for sampling
    weights: WeightCache
    drafts: Drafts | None  # None: no tokens are drafted
    exact: bool  # whether the same bits are computed with and without a cache
