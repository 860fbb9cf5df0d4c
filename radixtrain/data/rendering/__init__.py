"""Chats as the tokenizer's template writes them, and where in that text the assistant speaks."""
