import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engine.text import TextStream


def feed(pieces, stops=()):
    """Return (texts as they were released, whether a stop string ended it)."""
    stream, out = TextStream(tuple(stops)), []
    for piece in pieces:
        out.append(stream.push(piece))
        if stream.stopped:
            return out, True
    return [*out, stream.finish()], False


def test_a_character_split_over_tokens_comes_whole():
    emoji = "👩‍🚀".encode()
    out, _ = feed([emoji[i : i + 1] for i in range(len(emoji))])
    assert "".join(out) == "👩‍🚀"
    assert out[:4] == ["", "", "", "👩"]


def test_an_unfinished_character_at_the_end_is_dropped():
    assert feed([b"ok", "é".encode()[:1]]) == (["ok", "", ""], False)


def test_bytes_that_are_never_utf8_become_the_replacement_character():
    assert "".join(feed([b"a", b"\xff", b"b"])[0]) == "a\ufffdb"


def test_a_stop_string_is_cut_with_what_follows():
    assert feed([b"one two STOP three"], ["STOP"]) == (["one two "], True)


def test_a_stop_string_over_tokens_never_shows():
    assert feed([b"one\n", b"\nQ", b": two"], ["\n\nQ:"]) == (["one", "", ""], True)


def test_text_held_for_a_stop_that_never_came_is_released():
    assert feed([b"a<", b"/", b"b"], ["</s>"]) == (["a", "", "</b", ""], False)
    assert feed([b"a<", b"/s"], ["</s>"]) == (["a", "", "</s"], False)


def test_the_first_stop_to_appear_counts():
    assert feed([b"a END b STOP"], ["STOP", "END"]) == (["a "], True)


def test_a_stop_string_of_several_bytes_per_character():
    raw = "好的。再见".encode()
    out, stopped = feed([raw[i : i + 2] for i in range(0, len(raw), 2)], ["。再"])
    assert ("".join(out), stopped) == ("好的", True)


def test_an_overlapping_start_is_held_correctly():
    assert "".join(feed([b"aaab", b"x"], ["aab"])[0]) == "a"


@pytest.mark.parametrize("stop", ["x", "xy", "🙂", "ab" * 20])
def test_a_stop_at_once_gives_no_text(stop):
    assert feed([stop.encode()], [stop]) == ([""], True)


@given(
    text=st.text(alphabet="abé🙂 \n", max_size=40),
    stops=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=3), max_size=3),
    data=st.data(),
)
def test_cut_points_never_change_the_text(text, stops, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    edges = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    got, stopped = feed(pieces, stops)
    released = "".join(got)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert released == text
    else:
        assert text.startswith(released)
        assert any(text.startswith(stop, len(released)) for stop in stops)


@given(
    text=st.text(alphabet="ab", max_size=60),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=9), min_size=1, max_size=4),
    size=st.integers(1, 5),
)
def test_strings_that_overlap_themselves_are_found_where_they_first_end(text, stops, size):
    out, stopped = feed([text[i : i + size].encode() for i in range(0, len(text), size)], stops)
    # What has been released is never taken back, and what is held back is only what might stop.
    for upto in range(0, len(text), size):
        if any(stop in text[: upto + size] for stop in stops):
            seen = text[: upto + size]
            assert "".join(out) == seen[: min(seen.find(s) for s in stops if s in seen)]
            assert stopped
            return
    assert not stopped
    assert "".join(out) == text


def test_no_stop_string_makes_a_text_cost_more_than_its_length():
    class Counting(str):
        __slots__ = ()
        compared = 0

        def __getitem__(self, at):
            Counting.compared += 1
            return super().__getitem__(at)

    stream = TextStream((Counting("a" * 1000 + "c"), Counting("ab" * 500 + "c")))
    Counting.compared = 0
    for piece in [b"aaaa"] * 2500 + [b"abab"] * 2500:
        stream.push(piece)
    assert Counting.compared <= 2 * 3 * 20_000
