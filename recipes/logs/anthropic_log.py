"""Convert a log of Anthropic messages into chats, a row for each line.

python recipes/logs/anthropic_log.py < log.jsonl > chats.jsonl
"""

import json
import sys

ORDER = ["role", "reasoning_content", "content", "tool_calls"]


def turn(role, block):
    if block["type"] == "thinking":
        return {"role": role, "reasoning_content": block["thinking"]}
    if block["type"] == "tool_use":
        function = {"name": block["name"], "arguments": block["input"]}
        return {"role": role, "tool_calls": [{"id": block["id"], "type": "function", "function": function}]}
    if block["type"] == "tool_result":
        return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content") or ""}
    return {"role": role, "content": [block]}


def joined(turns):
    """One turn for all that the model said before somebody else did. Another order than ORDER would be lost."""
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


def function(tool):
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}


for row in map(json.loads, sys.stdin):
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for message in row["messages"]:
        said = message["content"]
        blocks = [{"type": "text", "text": said}] if isinstance(said, str) else said
        turns += [turn(message["role"], block) for block in blocks]
    tools = [{"type": "function", "function": function(tool)} for tool in row.get("tools") or []]
    print(json.dumps({"tools": tools, "messages": joined(turns)}))
