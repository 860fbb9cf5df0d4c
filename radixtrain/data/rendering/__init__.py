"""Chats as the tokenizer's template writes them."""
