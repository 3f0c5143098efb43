import random

import pytest

from agent.engine.blocks import BlockPool, chain_digest

SIZE = 4


@pytest.fixture
def pool():
    return BlockPool(4, SIZE, b"root")


def fill(pool, tokens):
    """Take blocks for `tokens` and publish the full ones, as a step would."""
    table = pool.take(pool.blocks_for(len(tokens)))
    parent = pool.root
    for index in range(len(tokens) // SIZE):
        parent = chain_digest(parent, tokens[index * SIZE : (index + 1) * SIZE])
        pool.publish(table[index], parent)
    return table


def test_too_few_blocks_change_nothing(pool):
    assert pool.take(5) is None
    assert pool.available == 4


def test_released_blocks_come_back(pool):
    table = pool.take(3)
    assert (pool.available, pool.held) == (1, 3)
    pool.release(table)
    assert (pool.available, pool.held, pool.cached) == (4, 0, 0)


def test_the_lowest_free_block_is_taken_first(pool):
    first = pool.take(2)
    pool.take(1)
    pool.release(first)
    assert pool.take(2) == [0, 1]


def test_a_published_prefix_is_found_and_shared(pool):
    tokens = list(range(9))
    table = fill(pool, tokens)
    blocks, digests = pool.match([*tokens, 99])
    assert blocks == table[:2]
    assert digests[0] == chain_digest(b"root", tokens[:4])
    pool.hold(blocks)
    pool.release(table)
    assert pool.held == 2


def test_the_last_token_is_never_matched(pool):
    fill(pool, list(range(8)))
    assert len(pool.match(list(range(8)))[0]) == 1
    assert len(pool.match(list(range(9)))[0]) == 2
    assert pool.match([0]) == ([], [])


def test_equal_tokens_after_another_prefix_do_not_match(pool):
    fill(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert pool.match([2, 2, 2, 2, 0])[0] == []


def test_another_root_shares_nothing(pool):
    fill(pool, list(range(8)))
    other = BlockPool(4, SIZE, b"other")
    fill(other, [7] * 8)
    assert chain_digest(b"root", [1]) != chain_digest(b"other", [1])
    assert other.match(list(range(9)))[0] == []


def test_cached_blocks_are_used_before_failing_and_then_forgotten(pool):
    tokens = list(range(16))
    pool.release(fill(pool, tokens))
    assert (pool.cached, pool.available) == (4, 4)
    assert pool.take(4) is not None
    assert pool.match([*tokens, 1])[0] == []


def test_the_end_of_a_prefix_is_forgotten_before_its_start(pool):
    tokens = list(range(16))
    pool.release(fill(pool, tokens))
    pool.take(1)
    assert len(pool.match([*tokens, 1])[0]) == 3


def test_a_second_block_of_the_same_content_stays_unnamed(pool):
    one = fill(pool, list(range(4)))
    two = fill(pool, list(range(4)))
    assert pool.match([0, 1, 2, 3, 9])[0] == one
    pool.release(two)
    assert pool.cached == 0
    pool.release(one)
    assert pool.cached == 1


def test_without_caching_nothing_is_kept():
    pool = BlockPool(4, SIZE, b"root", caching=False)
    pool.release(fill(pool, list(range(8))))
    assert (pool.cached, pool.match(list(range(9)))[0]) == (0, [])


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_pool_is_refused(total, size):
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(total, size, b"")


def test_any_order_of_use_keeps_the_books_straight():
    rng = random.Random(7)
    pool = BlockPool(12, SIZE, b"root")
    tables = []
    for _ in range(2_000):
        if tables and rng.random() < 0.5:
            pool.release(tables.pop(rng.randrange(len(tables))))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            matched, _ = pool.match(tokens)
            need = pool.blocks_for(len(tokens)) - len(matched)
            if need <= pool.available - pool.idle_among(matched):
                pool.hold(matched)
                table = matched + pool.take(need)
                parent = pool.root
                for index in range(len(tokens) // SIZE):
                    parent = chain_digest(parent, tokens[index * SIZE : (index + 1) * SIZE])
                    pool.publish(table[index], parent)
                tables.append(table)
        used = {block for table in tables for block in table}
        assert pool.held == len(used)
        assert pool.available == pool.total - len(used)
    for table in tables:
        pool.release(table)
    assert (pool.held, pool.available) == (0, 12)
