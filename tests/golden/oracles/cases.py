"""All golden cases."""

from golden.oracles import dense
from golden.oracles.case import Case

CASES: tuple[Case, ...] = dense.CASES
