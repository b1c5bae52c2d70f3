import asyncio
import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from router.tokenizer import INLINE_CHARS, Tokenizer, load_tokenizer, special_tokens


async def test_long_texts_are_encoded_off_the_loop_with_the_same_result(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir, {})
    text = "the quick brown fox, naïvely: 你好 🙂 " * (INLINE_CHARS // 16)
    inside = asyncio.Event()

    async def beside() -> None:
        inside.set()

    encoding = asyncio.create_task(tokenizer.encode(text, special_tokens=False))
    await beside()
    assert inside.is_set()
    assert not encoding.done()
    assert await encoding == tokenizer.encode_now(text, special_tokens=False) == tokenizer.backend.encode(text).ids


async def test_special_tokens_come_from_the_post_processor(model_dir: Path) -> None:
    backend = Backend.from_file(str(model_dir / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer = Tokenizer(backend)
    plain = await tokenizer.encode("fox", special_tokens=False)
    assert await tokenizer.encode("fox", special_tokens=True) == [0, *plain]


async def test_prompts_are_never_cut_or_filled_up(model_dir: Path) -> None:
    backend = Backend.from_file(str(model_dir / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    text = "the quick brown fox"
    ids = await Tokenizer(backend).encode(text, special_tokens=True)
    assert backend.decode(ids) == text


def test_special_tokens_are_named_by_text_or_object() -> None:
    config = json.loads(
        '{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,'
        ' "add_bos_token": true, "image_token": "<image>"}'
    )
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
