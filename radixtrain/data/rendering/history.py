"""Whether a chat template rewrites history: renders an assistant's turn in another way once others follow it.

Those of Qwen3, gpt-oss and DeepSeek drop its thinking. With `split_turns: true` every turn is trained as the model
writes it; in a whole chat earlier turns are trained as nothing that the model ever writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from radixtrain.data.rendering.conversation import Conversation
from radixtrain.errors import DataError

if TYPE_CHECKING:
    from radixtrain.data.chat import ChatEncoder
    from radixtrain.data.formats import Row, UnreadRow

__all__ = ["rewrites_history", "warn_of_rewritten_history"]

logger = logging.getLogger(__name__)

WARNING = (
    "split_turns: false: the template drops the thinking of earlier turns, or else renders them in another way once "
    "others follow: they are trained in a rendering that never occurs at inference; split_turns: true trains every "
    "turn as it is"
)


def rewrites_history(encoder: ChatEncoder, row: Row | UnreadRow | DataError) -> bool:
    """Whether a chat of this row, up to one of the assistant's turns, is not how the whole chat begins.

    What a template writes after the text of the turn, such as its end-of-turn token, does not count. False for a row
    that is no chat, or of which no turn can be rendered with the prompt that it has at inference.
    """
    try:
        return any(_is_rewritten(chat, encoder.tokenize.special_tokens) for chat in encoder.chats(row))
    except DataError:
        return False


def warn_of_rewritten_history(encoder: ChatEncoder, rows: Iterable[Row | UnreadRow | DataError]) -> None:
    """One line in the log if whole chats are trained and the template rewrites the history of one of these rows."""
    trains_whole_chats = encoder.assistant_only_loss and not encoder.split_turns
    if trains_whole_chats and any(rewrites_history(encoder, row) for row in rows):
        logger.warning(WARNING)


def _is_rewritten(chat: Conversation, special_tokens: tuple[str, ...]) -> bool:
    whole = chat.text()
    turns = (chat.prompt_and_target(turn, turn + 1) for turn in chat.assistant_turns() if turn)
    return not all(whole.startswith(_without_end(prompt + target, special_tokens)) for prompt, target in turns)


def _without_end(text: str, special_tokens: tuple[str, ...]) -> str:
    """A text without the special tokens and blanks at its end."""
    text = text.rstrip()
    while token := max((token for token in special_tokens if text.endswith(token)), key=len, default=""):
        text = text.removesuffix(token).rstrip()
    return text
