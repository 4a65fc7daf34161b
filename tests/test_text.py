"""Encoding without holes, and streams that never break a character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax.tokenizer import TextStream, Tokenizer, find_stop, token_pieces
from dllm_jax.training.vocabulary import (
    MASK,
    SPECIAL_TOKENS,
    save_tokenizer,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(200), directory)
    return Tokenizer(directory, SPECIAL_TOKENS.index(MASK))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.integers(0, 3))
def test_no_text_encodes_to_the_mask(tokenizer, text, where):
    text = text.replace("<|", "")
    prompt = text[:where] + MASK + text[where:] + MASK[:4] + MASK
    ids = tokenizer.encode(prompt)
    assert SPECIAL_TOKENS.index(MASK) not in ids
    assert tokenizer.decode(ids) == prompt
    chat = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    assert SPECIAL_TOKENS.index(MASK) not in chat


TEXTS = ["7 + 5 = 12", "naïve ď 歪 각", "👩‍👩‍👧 done", "é combining", "🇪🇸🎉"]


@pytest.mark.parametrize("text", TEXTS)
def test_streams_hold_back_half_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    rng = random.Random(text)
    for _ in range(10):
        stream, sent, cut = TextStream(tokenizer), "", 0
        while cut < len(ids):
            cut = min(len(ids), cut + rng.randint(1, 3))
            piece = stream.push(ids[:cut], final=cut == len(ids))
            assert "\ufffd" not in piece
            sent += piece
        assert sent == text


# Across block borders: what a cluster is made of may be committed forwards apart.
CLUSTERS = {
    "emoji": "🎉🥁",
    "joined emoji": "👩‍👩‍👧‍👦",
    "flag": "🇪🇸",
    "skin tone": "👍🏽",
    "Hangul syllables": "한국어",
    "conjoining jamo": "\u1112\u1161\u11ab",
    "combining marks": "e\u0301 o\u0302\u0323",
    "Devanagari": "क्षि",
}


@pytest.mark.parametrize("text", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_characters_across_block_borders(tokenizer, text, length):
    """Every block border lies once inside each character: no piece has half of one."""
    for shift in range(length):
        ids = tokenizer.encode("x" * shift + text + "!")
        stream, pieces = TextStream(tokenizer), []
        for cut in range(length, len(ids) + length, length):
            pieces.append(stream.push(ids[:cut], final=cut >= len(ids)))
        assert "".join(pieces) == "x" * shift + text + "!"
        assert not any("\ufffd" in piece for piece in pieces)
        # What can be shown is not held back: a piece lacks at most the block's last bytes.
        sent = "".join(pieces[:-1]).encode()
        whole = (len(ids) - 1) // length * length
        assert len(tokenizer.decode(ids[:whole]).rstrip("\ufffd").encode()) == len(sent)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20))
def test_token_pieces_join_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text.replace("<|", ""))
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_token_pieces_of_broken_characters(tokenizer):
    ids = tokenizer.encode("歪歪")
    broken = [*ids[:1], *tokenizer.encode("a"), *ids[:2]]
    assert "".join(token_pieces(tokenizer, broken)) == tokenizer.decode(broken)
    assert token_pieces(tokenizer, tokenizer.encode("a歪"))[-1] == "歪"


def test_a_stream_flushes_what_is_broken_at_the_end(tokenizer):
    ids = tokenizer.encode("歪")[:1]
    stream = TextStream(tokenizer)
    assert stream.push(ids) == ""
    assert stream.push(ids, final=True) == tokenizer.decode(ids)


def test_stop_strings_across_pieces(tokenizer):
    """The earliest of several stops, also when it straddles two pushes."""
    ids = tokenizer.encode("abc END! more STOP")
    for size in range(1, 4):
        stream, sent = TextStream(tokenizer, ["STOP", "END"]), ""
        for cut in range(size, len(ids) + size, size):
            sent += stream.push(ids[:cut], final=cut >= len(ids))
            if stream.stopped:
                break
        assert sent == "abc "
        assert stream.stopped


def test_a_held_back_start_of_a_stop_is_sent_when_it_was_none(tokenizer):
    ids = tokenizer.encode("the EN")
    stream = TextStream(tokenizer, ["END"])
    first = stream.push(ids)
    assert first == "the "
    assert first + stream.push(ids, final=True) == "the EN"


def test_find_stop_takes_the_earliest():
    assert find_stop("x b a", ["a", "b"]) == 2
    assert find_stop("x", ["a"]) is None
