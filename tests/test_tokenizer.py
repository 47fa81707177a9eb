import base64
import json

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from dasc_jax.tokenizer import (
    BYTE_SPECIALS,
    TokenizerError,
    load_tokenizer,
    tokenizer_files,
    write_byte_tokenizer,
)

# What Kimi releases, with class intersections, as tiktoken's engine reads it.
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
WORDS = ["hello", "World", "don", "'t", "it", "'s", " the", "中文", "字", "12", "123", "  ", "\n\n"]
SAMPLES = [
    "helloWorld don't it's",
    "中文hello字World",
    "1234567 the\n\n  the ",
    "ÀÉîõ ǅ x\u0301y",
    "  \r\n\t(the)!!\n",
    "",
]


def kimi_ranks() -> dict[bytes, int]:
    """All bytes, then every prefix of a few words, so that each word can be merged."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in WORDS:
        encoded = word.encode()
        tokens += [encoded[:end] for end in range(2, len(encoded) + 1)]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """A synthetic Kimi directory, and the encoding that the released code would build from it."""
    path = tmp_path_factory.mktemp("kimi")
    ranks = kimi_ranks()
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (path / "tiktoken.model").write_text("".join(lines))
    first = len(ranks)
    named = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>", first + 255: "[PAD]"}
    settings = {
        "added_tokens_decoder": {str(i): {"content": name} for i, name in named.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "[PAD]"},
        "tokenizer_class": "TikTokenTokenizer",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_user|>{{ m['role'] }}{% endfor %}"
    )
    specials = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(first, first + 256)}
    encoding = tiktoken.Encoding(
        "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=specials
    )
    return path, load_tokenizer(path), encoding


def test_a_directory_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert tokenizer_files(tmp_path) == []


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model"])
def test_an_unreadable_tokenizer_is_a_tokenizer_error(tmp_path, name):
    (tmp_path / name).write_text("{ not a tokenizer")
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", SAMPLES)
def test_kimi_text_splits_as_in_the_released_code(kimi, text):
    _, tokenizer, encoding = kimi
    assert tokenizer.encode(text) == encoding.encode(text, allowed_special="all")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    st.lists(
        st.sampled_from([*WORDS, "A", "b", "'LL", "\r", "!", "é", "ß", "x\u0301", "٣", "ﬁ"])
        | st.text(max_size=3),
        max_size=12,
    ).map("".join)
)
def test_any_kimi_text_splits_as_in_the_released_code(kimi, text):
    _, tokenizer, encoding = kimi
    assert tokenizer.encode(text) == encoding.encode(text, disallowed_special=())


def test_kimi_specials_come_from_the_configuration(kimi):
    path, tokenizer, encoding = kimi
    first = len(kimi_ranks())
    assert tokenizer.eos_token_id == first + 2
    assert tokenizer.pad_token_id == first + 255
    assert len(tokenizer) == first + 256
    assert tokenizer.encode("Hi<|im_end|>")[-1] == first + 2
    assert tokenizer.convert_ids_to_tokens(first + 7) == f"<|reserved_token_{first + 7}|>"
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_user|>user"
    assert [file.name for file in tokenizer_files(path)] == [
        "tokenizer_config.json",
        "tiktoken.model",
        "chat_template.jinja",
    ]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(path)
    return load_tokenizer(path)


@given(st.text())
def test_byte_tokens_are_the_bytes(byte_tokenizer, text):
    if any(name in text for name in BYTE_SPECIALS):
        return
    tokens = byte_tokenizer.encode(text)
    assert bytes(tokens) == text.encode()
    assert byte_tokenizer.decode(tokens) == text


def test_byte_tokenizer_speaks_chatml(byte_tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = byte_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = byte_tokenizer.encode(text)
    assert tokens[0] == 257
    assert tokens.count(byte_tokenizer.eos_token_id) == 2
    assert byte_tokenizer.eos_token_id == 258
    assert len(byte_tokenizer) == 259


def test_a_bare_tokenizer_json_loads(tmp_path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).encode("ab") == [97, 98]
