"""An OpenAI-compatible chat service for tests: deterministic, offline, standard library only.

It answers what Hindsight asks of a language model: fact extraction (one fact for each sentence), consolidation (one
observation for each fact), and the tool loop of `reflect`. `GET /stats` counts the calls.

    python3 openai_stub.py PORT KEY
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
UUID = r"[0-9a-f]{8}-[0-9a-f-]{27}"
calls: Counter[str] = Counter()


def text_of(message: dict[str, Any]) -> str:
    """The text of a chat message, whose content is a string or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content)


def extract(prompt: str) -> dict[str, Any]:
    """One fact for each sentence after the heading of the content."""
    body = re.split(r"\n(?:Content|Text):\s*\n", prompt)[-1]
    sentences = [part.strip() for part in SENTENCE_END.split(body) if len(part.strip()) >= 8]
    unknown = dict.fromkeys(("when", "where", "who", "why"), "N/A")
    return {
        "facts": [
            {
                "what": sentence,
                **unknown,
                "fact_kind": "conversation",
                "fact_type": "world",
                "occurred_start": None,
                "occurred_end": None,
                "entities": [],
                "causal_relations": None,
            }
            for sentence in sentences[:20]
        ]
    }


def consolidate(prompt: str) -> dict[str, Any]:
    """One observation for each fact that is listed with its id."""
    facts = re.findall(rf"\[({UUID})\]\s*(.+)", prompt)
    creates = [{"text": text.strip(), "source_fact_ids": [fact], "reason": "test"} for fact, text in facts]
    return {"creates": creates, "updates": [], "deletes": []}


def use_tool(request: dict[str, Any], question: str) -> dict[str, Any]:
    """The tool call that brings `reflect` to its end: the demanded tool, else the one that finishes."""
    names = [tool["function"]["name"] for tool in request["tools"]]
    demanded = request.get("tool_choice")
    if isinstance(demanded, dict):
        name = demanded["function"]["name"]
    else:
        name = next((known for known in ("answer_ready", "done") if known in names), names[0])
    seen = "\n".join(text_of(message) for message in request["messages"] if message["role"] == "tool")
    memories = list(dict.fromkeys(re.findall(rf'"id":\s*"({UUID})"', seen)))[:10]
    arguments: dict[str, Any] = {
        "done": {
            "answer": f"The memories say about: {question}",
            "memory_ids": memories,
            "answer_found": True,
        },
        "answer_ready": {"answer_found": True},
    }.get(name, {"reason": "test", "query": question})
    return {
        "id": "call_test",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message for a chat request."""
    users = [text_of(message) for message in request["messages"] if message["role"] == "user"]
    everything = "\n".join(text_of(message) for message in request["messages"])
    everything += json.dumps(request.get("response_format") or {})
    if request.get("tools"):
        calls["tools"] += 1
        return {"role": "assistant", "content": None, "tool_calls": [use_tool(request, users[0][-200:])]}
    if '"facts"' in everything and "fact_" in everything:
        calls["extract"] += 1
        return {"role": "assistant", "content": json.dumps(extract(users[-1]))}
    if "source_fact_ids" in everything:
        calls["consolidate"] += 1
        return {"role": "assistant", "content": json.dumps(consolidate(users[-1]))}
    calls["plain"] += 1
    structured = (request.get("response_format") or {}).get("type", "text") != "text"
    return {"role": "assistant", "content": "{}" if structured else f"An answer to: {users[-1][-200:]}"}


class Handler(BaseHTTPRequestHandler):
    """One request of the chat API."""

    protocol_version = "HTTP/1.1"
    key = ""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is logged: prompts hold memories."""

    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Send `body` as JSON."""
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        """Counters, and the list of models."""
        if self.path == "/stats":
            self.answer(200, dict(calls))
        else:
            self.answer(200, {"object": "list", "data": [{"id": "stub-model", "object": "model"}]})

    def do_POST(self) -> None:
        """A chat completion for the right key."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {self.key}":
            calls["unauthorized"] += 1
            self.answer(401, {"error": {"message": "invalid key", "type": "invalid_request_error"}})
            return
        message = reply(request)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        self.answer(
            200,
            {
                "id": "chatcmpl-test",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.get("model"),
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            },
        )


if __name__ == "__main__":
    Handler.key = sys.argv[2]
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
