"""Chats to drafts: one turn or the whole chat, and which turns bear loss."""

from __future__ import annotations

from radixtrain.data.rendering.conversation import Conversation
from radixtrain.data.tokens.tokenization import Draft
from radixtrain.errors import DataError

__all__ = ["draft_turn", "draft_whole", "refuse_weights", "trained_turns"]


def draft_turn(chat: Conversation, start: int, end: int) -> Draft:
    """Messages `start` to `end` as the target, those before them as the prompt."""
    prompt, target = chat.prompt_and_target(start, end)
    return Draft(prompt, target, chat.where, "turn")


def draft_whole(chat: Conversation) -> Draft:
    """The chat with loss on every token."""
    refuse_weights(chat)
    return Draft("", chat.text(), chat.where, "chat")


def trained_turns(chat: Conversation, first: int = 0) -> list[int]:
    """The assistant's turns that bear loss, from message `first` on."""
    turns = [turn for turn in chat.assistant_turns() if turn >= first]
    if not turns:
        roles = ", ".join(message["role"] for message in chat.messages[first:])
        raise DataError(chat.where, f"expected at least one assistant turn to learn from; found the roles {roles}")
    trained = [turn for turn in turns if chat.messages[turn].get("weight") != 0]
    if not trained:
        raise DataError(chat.where, "every assistant turn has weight: 0, so nothing is learned; leave the row out")
    return trained


def refuse_weights(chat: Conversation, first: int = 0) -> None:
    """DataError if a message from `first` on has weight 0: every token bears loss here."""
    for number, message in enumerate(chat.messages[first:], start=first + 1):
        if message.get("weight") == 0:
            reason = f"turn {number} has weight: 0, but here every token bears loss"
            raise DataError(chat.where, f"{reason}; set assistant_only_loss: true and split_turns: true")
