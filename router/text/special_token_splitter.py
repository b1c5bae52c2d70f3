"""Finds where a text can be split so that its parts, tokenised one by one, give the tokens of the whole.

The tokenizers library first takes the added tokens (such as `<|im_start|>`) out of the raw text, from left to right,
the longest if several begin at one place. The pieces between them are normalised, split and tokenised independently;
only the first piece may be treated differently (Metaspace with prepend_scheme "first"). So a text can be split *before*
an added token, if its characters are that token in any context: the second part then begins with the token, and no
other piece becomes a first piece.
"""

import re

from tokenizers import AddedToken, Tokenizer


def cut_pattern(backend: Tokenizer) -> re.Pattern[str] | None:
    """Returns a pattern of the added tokens before which texts can be split; None if there are none."""
    tokens = list(backend.get_added_tokens_decoder().values())
    if backend.encode_special_tokens or any(token.single_word for token in tokens):
        return None
    contents = [token.content for token in tokens]
    all_contents = "\0".join(contents)
    # a token that begins like one of these may overlap the end of another token, or of itself
    endings = {content[start:] for content in contents for start in range(1, len(content))}

    def is_safe(token: AddedToken) -> bool:
        content = token.content
        if token.normalized or token.lstrip or not content:
            return False
        if content[0].isspace() or content[-1].isspace():  # other tokens may strip adjacent whitespace
            return False
        begun = any(content[:length] in endings for length in range(1, len(content)))
        return not begun and all_contents.count(content) == 1

    safe = sorted((token.content for token in tokens if is_safe(token)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, safe))) if safe else None
