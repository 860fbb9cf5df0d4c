"""Convert a log of OpenAI Responses or Chat Completions into chats, one row per line.

python recipes/logs/openai_log.py < log.jsonl > chats.jsonl
"""

import json
import sys

from turns import joined


def turn(item):
    kind = item.get("type", "message")
    if kind == "reasoning":
        thinking = [part["text"] for part in item.get("content") or item["summary"]]
        return {"role": "assistant", "reasoning_content": "".join(thinking)}
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    if kind != "message":
        raise SystemExit(f"a chat has no place for an item of the type {kind}")
    said = item["content"]
    return {"role": item["role"], "content": [{"type": "text", "text": said}] if isinstance(said, str) else said}


def function(tool):
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["parameters"]}


def completions(request, choices, **others):
    """Yield a chat for each choice of a call of Chat Completions."""
    for choice in choices:
        if choice.get("finish_reason") in ("length", "content_filter"):
            raise SystemExit("an answer was cut off, and the model would learn to stop there: remove the row")
        chat = {"prompt": request["messages"], "completion": [choice["message"]]}
        yield {**others, "tools": request.get("tools"), **chat}


for row in map(json.loads, sys.stdin):
    if "choices" in row.get("response", {}):  # as a proxy logs a call
        print(*map(json.dumps, completions(row.pop("request"), row.pop("response")["choices"], **row)), sep="\n")
        continue
    if row.get("previous_response_id") or row.get("conversation"):
        raise SystemExit("the history is in another row: put its items before those of input")
    items = [{"role": "user", "content": row["input"]}] if isinstance(row["input"], str) else row["input"]
    system = [{"role": "system", "content": row["instructions"]}] if row.get("instructions") else []
    tools = [{"type": "function", "function": function(tool)} for tool in row.get("tools") or []]
    prompt, completion = joined(map(turn, system + items)), joined(map(turn, row["output"]))
    print(json.dumps({"tools": tools, "prompt": prompt, "completion": completion}))
