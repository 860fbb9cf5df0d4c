"""Convert a log of Langfuse generations into chats, one row per line.

python recipes/logs/langfuse_log.py < log.jsonl > chats.jsonl
"""

import json
import sys

for row in map(json.loads, sys.stdin):
    if row.get("type", "GENERATION") != "GENERATION":
        continue  # a span around calls
    given = row["input"] if isinstance(row["input"], dict) else {"messages": row["input"]}
    answer = row["output"]
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    chat = {"prompt": given["messages"], "completion": [answer], "tools": given.get("tools") or []}
    print(json.dumps(chat))
