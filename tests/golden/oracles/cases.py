"""All golden cases."""

from golden.oracles import dense, experts, gemma4, hybrid
from golden.oracles.case import Case

CASES: tuple[Case, ...] = (*dense.CASES, *experts.CASES, *gemma4.CASES, *hybrid.CASES)
