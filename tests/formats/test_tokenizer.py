"""Tokenizers: exact ids on published vocabularies, no marker from plain text, and clear refusals."""

import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.formats.errors import TokenizerError
from edgeinfer.formats.finder import Finder
from edgeinfer.formats.gguf import open_gguf
from edgeinfer.formats.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_chars() -> list[str]:
    """GPT-2's published byte alphabet, written another way than in the product."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in kept]
    table = dict(zip(kept, map(chr, kept), strict=True)) | {byte: chr(256 + n) for n, byte in enumerate(rest)}
    return [table[byte] for byte in range(256)]


def bpe_metadata(pre="qwen2", merges=("h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2"), **changes):
    tokens = byte_chars() + [merge.replace(" ", "") for merge in merges]
    types = [NORMAL] * len(tokens)
    for text, kind in [
        ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<s>", CONTROL), ("<|im_end|>x", CONTROL),
        ("<unk>", UNKNOWN),
        ("<tool_call>", USER_DEFINED), ("[INST]", USER_DEFINED), ("   ", USER_DEFINED), ("<b>", USER_DEFINED),
        ("</b>", USER_DEFINED), ("<i>", USER_DEFINED), ("[PAD9]", UNUSED),
    ]:  # fmt: skip
        tokens.append(text)
        types.append(kind)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    return with_changes(metadata, changes)


def spm_metadata(**changes):
    pieces = {
        "▁": -1.0,
        "he": -2.0,
        "l": -9.0,
        "ll": -3.0,
        "hell": -4.0,
        "hello": -5.0,
        "h": -9.0,
        "e": -9.0,
        "o": -9.0,
        "▁hello": -6.0,
    }
    pieces |= {"<": -9.0, "s": -9.0, ">": -9.0, "<s": -3.5, "é": -9.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool_call>", "  ", "▁▁▁"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, USER_DEFINED, NORMAL]
    scores = [0.0] * 259 + list(pieces.values()) + [0.0, 0.0, -20.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return with_changes(metadata, changes)


def with_changes(metadata, changes):
    for name, value in changes.items():
        metadata["tokenizer.ggml." + name] = value
    return {key: value for key, value in metadata.items() if value is not None}


def build(metadata):
    return Tokenizer.from_metadata(metadata, "model.gguf")


BPE, SPM = build(bpe_metadata()), build(spm_metadata())
SPM_NO_PREFIX = build(spm_metadata(add_space_prefix=False))
ALL = pytest.mark.parametrize("tokenizer", [BPE, SPM, SPM_NO_PREFIX], ids=["bpe", "spm", "spm-no-prefix"])


def spelled(tokenizer, ids):
    return [tokenizer.text(i) for i in ids]


def merged(pieces, rank):
    """The textbook algorithm: join the adjacent pair that ranks best, the leftmost of equals, until none is left."""
    while True:
        ranks = [
            (rank(a, b), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if rank(a, b) is not None
        ]
        if not ranks:
            return pieces
        i = min(ranks)[1]
        pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]


@settings(deadline=None)
@given(st.text("hel o<s>é", max_size=30))
def test_spm_is_the_textbook_algorithm(text):
    metadata = spm_metadata(add_space_prefix=False)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist()
    score = {
        t: s for t, s, k in zip(tokens, metadata["tokenizer.ggml.scores"].tolist(), types, strict=True) if k == NORMAL
    }
    want = []
    for n, part in enumerate(text.split("  ")):  # "  " is a user-defined token: taken out first
        want += ["  "] * (n > 0) + merged(
            list(part.replace(" ", "▁")), lambda a, b: -score[a + b] if a + b in score else None
        )
    assert spelled(SPM_NO_PREFIX, SPM_NO_PREFIX.encode(text, bos=False)) == want


@settings(deadline=None)
@given(st.text("helo1", max_size=30))
def test_bpe_is_the_textbook_algorithm(text):
    ranks = {merge: i for i, merge in enumerate(bpe_metadata()["tokenizer.ggml.merges"])}
    want = []
    digits = [(c, c) if c.isdigit() else ("a", c) for c in text]
    word = []
    for kind, char in [*digits, ("end", "")]:
        if kind != "a":
            want += merged(word, lambda a, b: ranks.get(f"{a} {b}"))
            want += [char] if char else []
            word = []
        else:
            word.append(char)
    assert spelled(BPE, BPE.encode(text)) == want


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("qwen2", "12", ["1", "2"]),  # digits stand alone
        ("smollm", "12", ["1", "2"]),
        ("llama-bpe", "12", ["12"]),  # up to three together
        ("gpt-2", "12", ["12"]),
        ("qwen2", "I'LL", ["I", "'", "L", "L"]),
    ],
)
def test_pre_tokenizers(pre, text, want):
    tokenizer = build(bpe_metadata(pre, add_bos_token=False))
    assert spelled(tokenizer, tokenizer.encode(text)) == want


def test_llama_bpe_takes_a_whole_word_that_is_a_token():
    merges = ("a b", "c d", "ab cd")
    words = {"tokens": bpe_metadata(merges=merges)["tokenizer.ggml.tokens"]}
    words["tokens"][words["tokens"].index("abcd")] = "xyz"  # a word that no merge makes
    merges = list(merges[:2])
    for pre, want in (("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])):
        metadata = bpe_metadata(pre, merges=("a b", "c d", "ab cd"), **words, add_bos_token=False) | {
            "tokenizer.ggml.merges": merges
        }
        tokenizer = build(metadata)
        assert spelled(tokenizer, tokenizer.encode("xyz")) == want


ANY_TEXT = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from([*BPE.marker_texts, *SPM.marker_texts, " ", "  ", "\n", "a", "<", "|>", "é", "\0"]), max_size=8
    ).map("".join),
)


@ALL
@settings(deadline=None, max_examples=300)
@given(text=ANY_TEXT.filter(lambda s: "▁" not in s))  # SPM spells a space so: it cannot tell the two apart
def test_text_round_trips_and_yields_no_marker(tokenizer, text):
    ids = tokenizer.encode(text, bos=False)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_control(i) for i in ids)
    prefix = " " if tokenizer is SPM and text else ""
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == prefix + text


@ALL
def test_every_marker_split_and_joined_stays_text(tokenizer):
    rng = random.Random(0)
    for text in tokenizer.marker_texts:
        assert tokenizer.encode(text, special=True, bos=False) == [tokenizer.find_markers(text)[0][2]]
        for cut in range(len(text) + 1):
            other = rng.choice(tokenizer.marker_texts)
            for typed in (
                text,
                text[:cut] + other + text[cut:],
                text[:cut] + text,
                text + text[cut:],
                f" {text}\n{other}",
            ):
                assert not any(map(tokenizer.is_control, tokenizer.encode(typed, bos=False)))
                assert tokenizer.decode(tokenizer.encode(typed, bos=False)) == typed


def test_special_text_is_parsed_longest_first_and_protected_characters_are_not():
    parse = lambda text, **more: spelled(BPE, BPE.encode(text, special=True, **more))  # noqa: E731
    assert parse("<|im_start|>hello<|im_end|>x") == ["<|im_start|>", "hello", "<|im_end|>x"]
    assert parse("<|im_end|>y[INST]<tool_call>") == ["<|im_end|>", "y", "[INST]", "<tool_call>"]
    assert "<|im_end|>" not in parse("<|im_end|>y", plain=[(3, 4)])
    assert parse("y<s><s>", plain=[(1, 4)])[-1] == "<s>"
    assert parse("y<s><s>", plain=[(1, 4)]).count("<s>") == 1


def test_white_space_and_html_tokens_are_text_but_brackets_are_markers():
    assert spelled(BPE, BPE.encode("a   <b></b>")) == ["a", "   ", "<b>", "</b>"]
    assert not BPE.is_control(BPE.encode("<b>")[0])
    assert len(BPE.encode("<i>")) == 3  # no </i> in this vocabulary: then <i> is no HTML tag but a marker
    assert len(BPE.encode("[PAD9]", special=True)) == 6  # unused: never made


def test_spm_puts_a_space_before_text_and_decode_takes_it_away():
    assert spelled(SPM, SPM.encode("hello")) == ["<s>", "▁hello"]
    assert spelled(SPM_NO_PREFIX, SPM_NO_PREFIX.encode("hello")) == ["<s>", "hello"]
    assert spelled(SPM, SPM.encode("hello</s>hello", special=True)) == ["<s>", "▁hello", "</s>", "▁hello"]
    assert SPM.decode(SPM.encode("hello</s>hello", special=True), special=True) == "<s>hello</s>hello"
    assert SPM.decode(SPM.encode("hello</s>hello", special=True)) == "hellohello"


def test_phi3_markers_swallow_the_white_space_behind_them():
    tokenizer = build(spm_metadata() | {"general.architecture": "phi3"})
    assert tokenizer.encode("<tool_call>\n hello", special=True) == tokenizer.encode("<tool_call>hello", special=True)


def test_bos_and_eos():
    both = build(bpe_metadata(add_bos_token=True, add_eos_token=True))
    bos, eos = both.bos_id, both.eos_id
    assert both.encode("") == [bos, eos]
    assert both.encode("", bos=False) == []
    assert both.encode("<s>a<|im_end|>", special=True) == [bos, both.encode("a", bos=False)[0], eos]  # not doubled
    assert both.encode("<s>", bos=False).count(bos) == 0
    assert BPE.encode("a", bos=True)[0] == BPE.bos_id and BPE.encode("a")[0] != BPE.bos_id
    assert build(bpe_metadata("llama-bpe", add_bos_token=None)).adds_bos  # this family's default
    assert not build(bpe_metadata("qwen2", add_bos_token=None)).adds_bos
    assert SPM.adds_bos


def test_end_of_generation_tokens():
    def ends(metadata):
        tokenizer = build(metadata)
        return {tokenizer.text(i) for i in tokenizer.eog_ids}

    assert ends(bpe_metadata()) == {"<|im_end|>"}
    assert ends(spm_metadata()) == {"</s>"}
    start = bpe_metadata()["tokenizer.ggml.tokens"].index("<|im_start|>")
    assert ends(bpe_metadata(eot_token_id=start)) == {"<|im_end|>", "<|im_start|>"}
    assert ends(bpe_metadata(eom_token_id=start, eos_token_id=5)) == {"<|im_end|>", "<|im_start|>", byte_chars()[5]}


def test_decode_replaces_what_is_no_utf8():
    euro = BPE.encode("€")
    assert b"".join(map(BPE.token_bytes, euro)) == "€".encode()
    assert BPE.decode(euro[:2]) == "\N{REPLACEMENT CHARACTER}"
    for wrong in (-1, BPE.n_vocab):
        with pytest.raises(TokenizerError, match="outside the vocabulary"):
            BPE.decode([wrong])
    assert BPE.token_bytes(BPE.eos_id) == b"" and BPE.token_bytes(BPE.eos_id, special=True) == b"<|im_end|>"


def test_half_a_surrogate_pair_is_refused():
    for tokenizer in (BPE, SPM):
        with pytest.raises(TokenizerError, match="surrogate"):
            tokenizer.encode("a\ud800")


def test_a_byte_without_a_token_is_refused_not_dropped():
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    tokens[0xF0] = "unused"
    tokenizer = build(bpe_metadata(tokens=tokens))
    assert tokenizer.decode(tokenizer.encode("€")) == "€"
    with pytest.raises(TokenizerError, match="U\\+1F600"):
        tokenizer.encode("smile 😀")


ZERO = np.zeros(3, np.float32)
SPM_TOKENS = spm_metadata()["tokenizer.ggml.tokens"]


def spm_with_token(i, text):
    return spm_metadata(tokens=[*SPM_TOKENS[:i], text, *SPM_TOKENS[i + 1 :]])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (bpe_metadata("klingon"), "klingon.*known: .*qwen2"),
        (bpe_metadata(None), "pre-tokenizer's name, is missing"),
        (bpe_metadata(model="t5"), "'t5' is not supported; known: gpt2"),
        (bpe_metadata(model=None), "holds no vocabulary"),
        (bpe_metadata(model=7), "of type int: expected str"),
        (bpe_metadata(tokens=None), "missing or empty"),
        (bpe_metadata(token_type=None), "missing or empty"),
        (bpe_metadata(tokens=[1, 2]), "not an array of strings"),
        (bpe_metadata(token_type=np.zeros(3, np.int32)), "one for each token"),
        (bpe_metadata(token_type=np.ones(len(bpe_metadata()["tokenizer.ggml.tokens"]), np.int8)), "one for each token"),
        (bpe_metadata(token_type=np.full(len(bpe_metadata()["tokenizer.ggml.tokens"]), 9, np.int32)), "expected 1..6"),
        (bpe_metadata(eos_token_id=2**31), "eos_token_id is 2147483648"),
        (bpe_metadata(bos_token_id=-1), "bos_token_id is -1"),
        (bpe_metadata(bos_token_id=None, add_bos_token=True), "does not say which"),
        (bpe_metadata(merges=["h e"]) | {"tokenizer.ggml.merges": ["he"]}, "merge 0 is 'he'"),
        (bpe_metadata() | {"tokenizer.ggml.merges": ["h zz"]}, "does not fit the tokens"),
        (bpe_metadata() | {"tokenizer.ggml.merges": ["h o"]}, "does not fit the tokens"),
        (spm_metadata(scores=None), "scores is missing"),
        (spm_metadata(scores=np.full(len(SPM_TOKENS), np.nan, np.float32)), "not finite"),
        (spm_metadata(scores=np.zeros(len(SPM_TOKENS), np.uint8)), "one for each token"),
        (spm_metadata(scores=ZERO), "one for each token"),
        (spm_with_token(5, "<0x-1>"), "<0x-1>"),
        (spm_with_token(5, "<0xGG>"), "<0xGG>"),
        (spm_with_token(5, "<0x100>"), "<0x100>"),
        (spm_with_token(5, "<0x>"), "<0x>"),
        (spm_with_token(13, "<0x0B>"), "same token twice"),
        (spm_with_token(300 - 30, "x" * 70_000), "longer than 65536"),
    ],
)  # fmt: skip
def test_broken_vocabularies_are_refused(metadata, message):
    with pytest.raises(TokenizerError, match=message) as error:
        build(metadata)
    assert "model.gguf" in str(error.value)


@settings(max_examples=300)
@given(st.sets(st.text("ab<", min_size=1, max_size=4), max_size=6), st.text("ab<", max_size=30))
def test_finder_is_leftmost_longest(words, text):
    found, at = [], 0
    while at < len(text):
        best = max((w for w in words if text.startswith(w, at)), key=len, default="")
        found += [(at, at + len(best), len(best))] if best else []
        at += len(best) or 1
    assert Finder({w: len(w) for w in words}).find(text) == found


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["a", " ", "<", "<|im_", "e\N{COMBINING ACUTE ACCENT}", "👩\N{ZERO WIDTH JOINER}"])
@ALL
def test_time_grows_with_the_text(tokenizer, unit):
    import time

    def seconds(n):
        text = unit * (n // len(unit))
        return min(_timed(tokenizer, text, time.perf_counter) for _ in range(3))

    small, large = seconds(100_000), seconds(400_000)
    assert large < 0.05 + 8 * small


def _timed(tokenizer, text, clock):
    start = clock()
    tokenizer.encode(text, special=True)
    return clock() - start


# Published vocabularies, with the ids that their own tokenizers give; from the source archive of llama-cpp-python.

FAMILIES = (
    "llama-bpe llama-spm gpt-2 qwen2 qwen35 phi-3 deepseek-llm deepseek-coder falcon starcoder refact command-r mpt"
).split()
SDIST = "llama-cpp-python==0.3.36"


@pytest.fixture(scope="module")
def published():
    """The folder of vocabularies, downloaded with pip on first use and kept in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeinfer-tests"
    folder = cache / SDIST
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "-d",
            str(cache),
            SDIST,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{SDIST} cannot be downloaded: {error}")
        archives = list(cache.glob("llama_cpp_python-*.tar.gz"))
        if done.returncode or not archives:
            pytest.skip(f"{SDIST} cannot be downloaded: {done.stderr[-300:]}")
        partial = cache / f"{SDIST}.{os.getpid()}"
        partial.mkdir()
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                if "/models/ggml-vocab-" in member.name and member.isfile():
                    (partial / Path(member.name).name).write_bytes(archive.extractfile(member).read())
        partial.rename(folder)
        archives[0].unlink()
    return folder


@pytest.mark.model
@pytest.mark.parametrize("family", FAMILIES)
def test_published_vocabularies(published, family):
    path = published / f"ggml-vocab-{family}.gguf"
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, bos=False)
        assert ids == [int(i) for i in line.split()], text
        assert tokenizer.decode(ids) == text
    for marker in tokenizer.marker_texts:
        assert not any(map(tokenizer.is_control, tokenizer.encode(f"a{marker} {marker}", bos=False)))


@pytest.mark.model
@pytest.mark.parametrize("family", ["bert-bge", "gemma-4", "gpt-neox"])
def test_published_vocabularies_of_other_kinds_are_refused(published, family):
    path = published / f"ggml-vocab-{family}.gguf"
    with open_gguf(path) as file, pytest.raises(TokenizerError, match="known: "):
        Tokenizer.from_metadata(file.metadata, path)
