"""Where a text can be cut so that its parts, tokenised one by one, give the tokens of the whole.

The tokenizers library first takes the added tokens (`<|im_start|>` and the like) out of the raw text; from left to
right, the longest where several begin at one place. What is between them is normalised, split and tokenised piece by
piece, and knows nothing of the rest; only whether it is at the very beginning (Metaspace with prepend_scheme "first").
So a text can be cut *before* an added token, if every place where its characters stand is sure to be that token, and
what surrounds it does not matter. Then the second part begins with the token, and what follows is no beginning.
"""

import re

from tokenizers import AddedToken, Tokenizer


def cut_pattern(backend: Tokenizer) -> re.Pattern[str] | None:
    """Matches the added tokens before which texts can be cut; None where there are none."""
    tokens = list(backend.get_added_tokens_decoder().values())
    if backend.encode_special_tokens or any(token.single_word for token in tokens):
        return None
    contents = [token.content for token in tokens]
    all_contents = "\0".join(contents)
    # what another token, or the same one, may have begun with before
    endings = {content[start:] for content in contents for start in range(1, len(content))}

    def is_safe(token: AddedToken) -> bool:
        content = token.content
        if token.normalized or token.lstrip or not content:
            return False
        if content[0].isspace() or content[-1].isspace():  # others may take whitespace to their sides
            return False
        begun = any(content[:length] in endings for length in range(1, len(content)))
        return not begun and all_contents.count(content) == 1

    safe = sorted((token.content for token in tokens if is_safe(token)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, safe))) if safe else None
