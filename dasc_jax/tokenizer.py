"""Tokenizers from local files only: no network, no remote code, no torch.

Qwen3-Next ships ordinary tokenizer files. Kimi-Linear ships `tiktoken.model` and remote code; the
generic conversion of transformers splits text with another model's pattern, so it is rebuilt here
with Kimi's own. The byte tokenizer serves small demo checkpoints.
"""

import base64
import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
KIMI_SPECIAL_SLOTS = 256
"""Ids after the byte-pair ranks that Kimi reserves; 163,584 ranks + 256 = the 163,840 embedding
rows."""

BYTE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TokenizerError(ValueError):
    """Tokenizer files that are there but cannot be read; requests by token id still work."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the library needs of a transformers tokenizer."""

    def encode(self, text: str, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def tokenizer_files(path: str | Path) -> list[Path]:
    """The tokenizer files of a checkpoint directory, as `save_native` copies them."""
    return [Path(path) / name for name in TOKENIZER_FILES if (Path(path) / name).is_file()]


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, None when it has none.

    Raises TokenizerError when there are files that cannot be read.
    """
    path = Path(path)
    try:
        if (path / "tiktoken.model").is_file():
            return _kimi_tokenizer(path)
        if not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            return None
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if (path / "tokenizer_config.json").is_file():
            options = {"local_files_only": True, "trust_remote_code": False}
            return AutoTokenizer.from_pretrained(str(path), **options)
        return PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    except (
        Exception
    ) as error:  # transformers and tokenizers raise bare Exceptions for malformed files
        raise TokenizerError(f"cannot read the tokenizer in {path}: {error}") from error


def _kimi_pattern() -> str:
    """How Kimi splits text before byte-pair merging.

    The released pattern intersects character classes with "not Han"; the `tokenizers` engine has no
    intersection, so a look-ahead stands before each class.
    """
    upper = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
    lower = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return "|".join(
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def _kimi_ranks(file: str) -> dict[bytes, int]:
    """Lines of "base64 rank". Read here because tiktoken's own reader caches by path in a temporary
    directory, and would give the ranks of a replaced file."""
    pairs = (line.split() for line in Path(file).read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _kimi_tokenizer(path: Path) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return _kimi_ranks(tiktoken_url)

    file = str(path / "tiktoken.model")
    settings = _json(path / "tokenizer_config.json")
    first = len(_kimi_ranks(file))
    named = {
        int(number): token["content"]
        for number, token in (settings.get("added_tokens_decoder") or {}).items()
    }
    specials = [
        named.get(number, f"<|reserved_token_{number}|>")
        for number in range(first, first + KIMI_SPECIAL_SLOTS)
    ]
    backend = Converter(file, _kimi_pattern(), extra_special_tokens=specials).converted()
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    options: dict[str, Any] = {
        name: _content(settings[name]) for name in names if settings.get(name) is not None
    }
    template = path / "chat_template.jinja"
    options["chat_template"] = (
        template.read_text() if template.is_file() else settings.get("chat_template")
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **options
    )


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def write_byte_tokenizer(path: str | Path) -> None:
    """Writes a byte tokenizer as `tokenizer.json` and `tokenizer_config.json` into a directory.

    Token b is byte b, 256.. are `BYTE_SPECIALS`; the vocabulary has 259 entries. Chat format:
    ChatML.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in BYTE_SPECIALS])
    save_tokenizer(tokenizer, path)


def save_tokenizer(tokenizer: Any, path: str | Path) -> None:
    """Writes a `tokenizers.Tokenizer` that has `BYTE_SPECIALS` as `tokenizer.json` and
    `tokenizer_config.json` into a directory. Chat format: ChatML."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies: itself where printable in
    Latin-1, else the next code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
