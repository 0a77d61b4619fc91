"""The tree of prefixes against brute force over everything that was put into it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.kv.chain import Key, child_key, root_key, token_bytes, token_list
from everwarm.kv.index.tree import Node, Tree, common_tokens

BLOCK = 3
tokens = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), max_size=14)
histories = st.lists(tokens, max_size=8)


def insert(tree: Tree, root: Node, history: Sequence[int]) -> list[Node]:
    """A chain of blocks, all of them on disk."""
    node, chain = root, []
    for low in range(0, len(history), BLOCK):
        node = tree.child(node, token_bytes(history[low : low + BLOCK]))
        node.on_disk = True
        chain.append(node)
    return chain


def same_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def blocks(history: Sequence[int]) -> list[tuple[int, ...]]:
    """Each block is known by all the tokens up to its end."""
    return [tuple(history[: low + BLOCK]) for low in range(0, len(history), BLOCK)]


def usable(history: Sequence[int], lost: set[tuple[int, ...]]) -> Sequence[int]:
    """Up to the first block whose bytes are lost."""
    for number, block in enumerate(blocks(history)):
        if block in lost:
            return history[: number * BLOCK]
    return history


@given(histories, tokens, st.data())
def test_a_walk_finds_the_longest_prefix_of_all_histories(
    known: list[list[int]], wanted: list[int], data: st.DataObject
) -> None:
    tree = Tree(BLOCK)
    root = tree.root(root_key(b"", "", "", ""))
    nodes: dict[tuple[int, ...], Node] = {}
    for history in known:
        nodes |= zip(blocks(history), insert(tree, root, history), strict=True)
    every = sorted(nodes)
    lost = set(data.draw(st.lists(st.sampled_from(every), unique=True))) if every else set()
    for name in lost:
        nodes[name].on_disk = False
    path, partial, shared = tree.walk(root, token_bytes(wanted))
    found = len(path) * BLOCK + shared
    assert found == max((same_beginning(usable(history, lost), wanted) for history in known), default=0)
    assert (partial is None) == (shared == 0)
    chain = [*path, *([partial] if partial else [])]
    assert all(node.available for node in chain)
    assert chain == (chain[-1].path() if chain else [])
    spelt = token_list(b"".join(node.tokens for node in chain))
    assert spelt[:found] == wanted[:found]
    assert [node.end for node in path] == [BLOCK * (number + 1) for number in range(len(path))]


@given(histories, st.data())
def test_what_is_forgotten_is_gone_and_the_rest_stays(known: list[list[int]], data: st.DataObject) -> None:
    """Histories are taken out one by one, in any order; at last only the root is left."""
    tree = Tree(BLOCK)
    root = tree.root(root_key(b"", "", "", ""))
    chains = [(history, insert(tree, root, history)) for history in known]
    for _, chain in chains:
        for node in chain:
            node.named += 1
    for history, chain in data.draw(st.permutations(chains)):
        chains = [other for other in chains if other[1] is not chain]
        for node in chain:
            node.named -= 1
            node.on_disk = node.owned
        for node in reversed(chain):
            tree.forget(node)
        left = {block for other, _ in chains for block in blocks(other)}
        assert len(tree.nodes) == 1 + len(left)
        for other, nodes in chains:
            assert insert(tree, root, other) == nodes
        path, _, shared = tree.walk(root, token_bytes(history))
        longest = max((same_beginning(other, history) for other, _ in chains), default=0)
        assert len(path) * BLOCK + shared == longest
    assert (list(tree.nodes.values()), root.children) == ([root], [])


@pytest.mark.parametrize("why", ["block", "on_disk", "writing", "named", "anonymous", "claims"])
def test_a_node_stays_while_anything_speaks_for_it(why: str) -> None:
    tree = Tree(BLOCK)
    root = tree.root(root_key(b"", "", "", ""))
    parent = tree.child(root, token_bytes([1, 2, 3]))
    node = tree.child(parent, token_bytes([4]))
    setattr(node, why, 0 if why == "block" else 1)
    tree.forget(node)
    assert len(tree.nodes) == 3
    setattr(node, why, None if why == "block" else 0)
    tree.forget(node)
    assert len(tree.nodes) == 1


def test_a_node_that_was_forgotten_and_made_again_is_not_forgotten_through_the_old_one() -> None:
    tree = Tree(BLOCK)
    root = tree.root(root_key(b"", "", "", ""))
    old = tree.child(root, token_bytes([1]))
    tree.forget(old)
    new = tree.child(root, token_bytes([1]))
    tree.forget(old)
    assert (root.children, tree.nodes[new.key]) == ([new], new)


@given(tokens, tokens)
def test_common_tokens(a: list[int], b: list[int]) -> None:
    assert common_tokens(token_bytes(a), token_bytes(b)) == same_beginning(a, b)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_bytes_are_in_the_order_of_tokens(ids: list[int]) -> None:
    assert token_list(token_bytes(ids)) == ids
    assert sorted([[token] for token in ids]) == [token_list(data) for data in sorted(token_bytes([t]) for t in ids)]


def test_names_depend_on_everything_that_decides_the_bytes() -> None:
    given = ["salt", "layout", "weights", "numerics"]
    keys = {root_key(b"salt", *given[1:])}
    for place in range(4):
        changed = [word + "x" if number == place else word for number, word in enumerate(given)]
        keys.add(root_key(changed[0].encode(), *changed[1:]))
    keys.add(root_key(b"salt", "layoutweights", "", "numerics"))
    assert len(keys) == 6
    root = Key(b"r" * 16)
    one = child_key(root, token_bytes([1]))
    assert len({one, child_key(root, token_bytes([1, 1])), child_key(one, token_bytes([1])), root}) == 4
