"""Join the parts of a logged message into turns of a chat. The scripts in this folder import it."""

ORDER = ["role", "reasoning_content", "content", "tool_calls"]


def joined(turns):
    """Make one turn of all that the model said before somebody else did. Another order than ORDER would be lost."""
    chat = []
    for new in turns:
        if chat and chat[-1]["role"] == new["role"] != "tool":
            last, key = chat[-1], [*new][-1]
            if ORDER.index(key) < ORDER.index([*last][-1]):
                raise SystemExit(f"{key} after {[*last][-1]} in one turn: {new}")
            last[key] = last[key] + new[key] if key in last else new[key]
        else:
            chat.append(new)
    return chat
