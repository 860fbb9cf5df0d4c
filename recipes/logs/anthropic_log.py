"""Convert a log of Anthropic messages into chats, one row per line.

python recipes/logs/anthropic_log.py < log.jsonl > chats.jsonl
"""

import json
import sys

from turns import joined


def turn(role, block):
    if block["type"] == "thinking":
        return {"role": role, "reasoning_content": block["thinking"]}
    if block["type"] == "tool_use":
        function = {"name": block["name"], "arguments": block["input"]}
        return {"role": role, "tool_calls": [{"id": block["id"], "type": "function", "function": function}]}
    if block["type"] == "tool_result":
        return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content") or ""}
    return {"role": role, "content": [block]}


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
