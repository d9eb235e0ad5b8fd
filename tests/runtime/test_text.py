"""Streaming text: whatever the tokens, the pieces joined are the whole decoded, cut before the first stop string."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgeinfer.text import TextStream


def stream(pieces, stop=()):
    """(pieces shown, the stop string hit) with token i of the bytes pieces[i]."""
    texts = TextStream(lambda i: pieces[i], stop)
    shown = [texts.push(i) for i in range(len(pieces))]
    return [*shown, texts.finish()], texts.stopped


def whole(data: bytes, stop=()):
    """The same in one go: (text, the stop string hit)."""
    text = data.decode(errors="replace")
    found = [(text.find(s), len(s), s) for s in stop if s in text]
    return (text[: min(found)[0]], min(found)[2]) if found else (text, None)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [
        (["x E", "ND", "-O", "F y"], ["END-OF"], "x ", "END-OF"),
        (["x E", "ND", "-Q"], ["END-OF"], "x END-Q", None),
        (["a", "a", "b"], ["ab"], "a", "ab"),
        (["OF y END", "-OF"], ["END-OF"], "OF y ", "END-OF"),  # the prompt ended with "END-": it does not count
        (["1 EN", "D-OF"], ["END-OF", "END"], "1 ", "END"),  # one is a prefix of the other
        (["1 EN", "D-OF"], ["END", "END-OF"], "1 ", "END"),
        (["ab", "c", "d", "e"], ["bc", "abcd"], "", "abcd"),  # begins earlier, though complete later
        (["ab", "c", "x", "e"], ["bc", "abcd"], "a", "bc"),
        (["ab", "c"], ["bc", "abcd"], "a", "bc"),  # decided by the end of the text
        (["aab", "aab", "aac"], ["aabaac"], "aab", "aabaac"),
        (["hello"], ["hello"], "", "hello"),
        (["", "é", "", "!"], ["é!"], "", "é!"),
        ([], ["x"], "", None),
    ],
)
def test_stop_strings_across_tokens(pieces, stop, text, stopped):
    shown, found = stream([piece.encode() for piece in pieces], stop)
    assert ("".join(shown), found) == (text, stopped)


def test_only_what_may_become_a_stop_string_is_held_back():
    texts = TextStream(lambda i: [b"x E", b"ND", b"-Q", b" EN", b"END-OF", b"more"][i], ["END-OF"])
    assert [texts.push(i) for i in range(6)] == ["x ", "", "END-Q", " ", "EN", ""]
    assert (texts.stopped, texts.finish(), texts.push(0), texts.finish()) == ("END-OF", "", "", "")


def test_half_characters_are_held_back():
    euro, face = "€".encode(), "🙂".encode()
    pieces = [b"a" + euro[:1], euro[1:], face[:2], face[2:3], face[3:] + b"b", euro[:2]]
    assert stream(pieces)[0] == ["a", "€", "", "", "🙂b", "", "\ufffd"]


def test_a_stop_string_is_found_in_replaced_bytes_at_the_end():
    assert stream([b"ab\xe2\x82"], ["b\ufffd"]) == (["a", ""], "b\ufffd")


@pytest.mark.parametrize("stop", ["END", [""], ["a", ""], [b"a"], [None]])
def test_bad_stop_strings_are_refused(stop):
    with pytest.raises(ValueError, match="stop is"):
        TextStream(lambda i: b"", stop)


# few letters, so that matches, overlaps and broken UTF-8 are common; bytes of 2-, 3- and 4-byte characters
tokens = st.lists(st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", "é".encode(), b"\xf0\x9f", b"\xe2\x82"])))
stops = st.lists(st.text(alphabet="abé\ufffd", min_size=1, max_size=5), max_size=4)


@given(tokens, stops)
@example([[b"a"], [b"a", b"b"], [b"a"]], ["aba", "ab", "b"])
def test_the_joined_stream_is_the_whole(token_bytes, stop):
    pieces = [b"".join(parts) for parts in token_bytes]
    shown, stopped = stream(pieces, stop)
    assert ("".join(shown), stopped) == whole(b"".join(pieces), stop)


@given(st.text(), st.data())
def test_any_split_of_any_text(text, data):
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    parts = st.integers(0, max(0, len(text) - 1)).map(lambda i: text[i : i + 3])
    stop = data.draw(st.lists(parts.filter(bool), max_size=3)) if text else []
    shown, stopped = stream(pieces, stop)
    assert ("".join(shown), stopped) == whole(encoded, stop)


@given(st.lists(st.binary(max_size=4)))
def test_any_bytes(pieces):
    assert "".join(stream(pieces)[0]) == b"".join(pieces).decode(errors="replace")


@given(tokens, stops)
def test_nothing_that_was_shown_is_taken_back(token_bytes, stop):
    """What is shown after each token is the beginning of every text that could follow."""
    pieces = [b"".join(parts) for parts in token_bytes]
    texts = TextStream(lambda i: pieces[i], stop)
    shown = ""
    for i in range(len(pieces)):
        shown += texts.push(i)
        for tail in [b"", b"aba", *(s.encode() for s in stop)]:
            assert whole(b"".join(pieces[: i + 1]) + tail, stop)[0].startswith(shown)


def test_time_is_linear():
    """A long stop string that is nearly matched all the time: rescanning would take minutes."""
    stop = ["a" * 100_000 + "b"]
    texts = TextStream(lambda i: b"a", stop)
    start = time.perf_counter()
    shown = sum(len(texts.push(0)) for _ in range(300_000)) + len(texts.finish())
    assert shown == 300_000
    assert time.perf_counter() - start < 20
