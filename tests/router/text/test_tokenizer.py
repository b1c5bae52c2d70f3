import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from cpd.common.blocks import pack_tokens, unpack_tokens
from router.text import tokenizer as tokenizer_module
from router.text.tokenizer import INLINE_CHARS, MAX_PARTS, Tokenizer, load_tokenizer, special_tokens


async def test_long_texts_are_encoded_off_the_loop_with_the_same_result(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir, {})
    text = "the quick brown fox, naïvely: 你好 🙂 " * (INLINE_CHARS // 16)
    inside = asyncio.Event()

    async def beside() -> None:
        inside.set()

    encoding = asyncio.create_task(tokenizer.encode(text))
    await beside()
    assert inside.is_set()
    assert not encoding.done()
    assert await encoding == pack_tokens(tokenizer.backend.encode(text).ids)


async def test_special_tokens_come_from_the_post_processor_unless_it_is_a_chat(model_dir: Path) -> None:
    backend = Backend.from_file(str(model_dir / "tokenizer.json"))
    plain = backend.encode("fox").ids
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer = Tokenizer(backend)
    assert await tokenizer.encode("fox") == pack_tokens([0, *plain])
    assert await tokenizer.encode_chat("fox", b"") == pack_tokens(plain)


class TestChats:
    @pytest.fixture
    def encoded(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The texts that were tokenised."""
        encoded: list[str] = []
        encode = Tokenizer._encode

        async def record(self: Tokenizer, texts: Sequence[str], owner: bytes, *, special_tokens: bool) -> list[bytes]:
            encoded.extend(texts)
            return await encode(self, texts, owner, special_tokens=special_tokens)

        monkeypatch.setattr(Tokenizer, "_encode", record)
        return encoded

    async def test_only_new_turns_are_tokenised(self, model_dir: Path, encoded: list[str]) -> None:
        tokenizer = load_tokenizer(model_dir, {})
        text = ""
        for turn in range(5):
            text += f"<|start|>user\nthe {turn} quick<|end|>\n<|start|>assistant\nfox {turn}"
            assert await tokenizer.encode_chat(text, b"a") == pack_tokens(tokenizer.backend.encode(text).ids)
            text += "<|end|>\n"
        assert sorted(encoded) == sorted(
            ["<|end|>\n"]
            + [f"<|start|>user\nthe {turn} quick" for turn in range(5)]
            + [f"<|start|>assistant\nfox {turn}" for turn in range(5)]
        )

    async def test_owners_do_not_share(self, model_dir: Path, encoded: list[str]) -> None:
        tokenizer = load_tokenizer(model_dir, {})
        for owner in (b"a", b"b", b"a"):
            await tokenizer.encode_chat("<|start|>fox", owner)
        assert encoded == ["<|start|>fox"] * 2

    async def test_the_cache_has_a_limit(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokenizer_module, "CACHED_CHARS", 3_000)
        tokenizer = load_tokenizer(model_dir, {})
        for number in range(100):
            text = f"<|start|>{number}<|end|>" + "x" * number
            assert await tokenizer.encode_chat(text, b"") == pack_tokens(tokenizer.backend.encode(text).ids)
            assert tokenizer._parts.size <= 3_000

    async def test_a_text_with_too_many_parts_is_encoded_whole(self, model_dir: Path, encoded: list[str]) -> None:
        tokenizer = load_tokenizer(model_dir, {})
        text = "<|start|>fox" * MAX_PARTS
        assert await tokenizer.encode_chat(text, b"") == pack_tokens(tokenizer.backend.encode(text).ids)
        assert encoded == [text]
        assert tokenizer._parts.size == 0

    async def test_an_empty_chat_has_no_tokens(self, model_dir: Path) -> None:
        assert await load_tokenizer(model_dir, {}).encode_chat("", b"") == b""


async def test_prompts_are_never_truncated_or_padded(model_dir: Path) -> None:
    backend = Backend.from_file(str(model_dir / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    text = "the quick brown fox"
    ids = unpack_tokens(await Tokenizer(backend).encode(text)).tolist()
    assert backend.decode(ids) == text


def test_special_tokens_are_named_by_text_or_object() -> None:
    config = json.loads(
        '{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,'
        ' "add_bos_token": true, "image_token": "<image>"}'
    )
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
