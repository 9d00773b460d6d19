"""A server that answers as the providers' APIs do, byte for byte where it matters."""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

from idemguard.usage import Usage

# what the ledger makes of a chat completion, and of a message
CHAT = Usage(
    input_tokens=2255,
    output_tokens=5,
    cache_read_tokens=512,
    reasoning_tokens=3,
    model="gpt-4.1-2025-04-14",
    provider="openai",
)
MESSAGE = Usage(
    input_tokens=12307,
    output_tokens=550,
    cache_read_tokens=0,
    cache_write_tokens=12304,
    model="claude-opus-5-5",
    provider="anthropic",
)
OPENAI_USAGE = {
    "prompt_tokens": 2255,
    "completion_tokens": 5,
    "total_tokens": 2260,
    "prompt_tokens_details": {"cached_tokens": 512, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 3,
        "audio_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}
RESPONSES_USAGE = {
    "input_tokens": 2255,
    "input_tokens_details": {"cached_tokens": 512, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 2260,
}
ANTHROPIC_USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 12304,
    "cache_read_input_tokens": 0,
    "cache_creation": {"ephemeral_5m_input_tokens": 12304, "ephemeral_1h_input_tokens": 0},
    "output_tokens": 550,
    "service_tier": "standard",
}
GOOGLE_USAGE = {
    "promptTokenCount": 900,
    "cachedContentTokenCount": 300,
    "candidatesTokenCount": 40,
    "thoughtsTokenCount": 60,
    "toolUsePromptTokenCount": 100,
    "totalTokenCount": 1100,
    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 900}],
}
BEDROCK_USAGE = {
    "inputTokens": 3,
    "outputTokens": 550,
    "totalTokens": 12857,
    "cacheReadInputTokens": 2304,
    "cacheWriteInputTokens": 10000,
}


def chat_completion(number: int) -> dict:
    """What POST /v1/chat/completions answers."""
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1741569952,
        "model": "gpt-4.1-2025-04-14",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello there",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": OPENAI_USAGE,
        "service_tier": "default",
        "system_fingerprint": "fp_1",
    }


def chat_chunks(number: int) -> list[dict]:
    """The events of a streamed chat completion; usage stands in the last alone."""
    head = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion.chunk",
        "created": 1741569952,
        "model": "gpt-4.1-2025-04-14",
        "system_fingerprint": "fp_1",
    }
    deltas = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hello"}, None),
        ({"content": " there"}, None),
        ({}, "stop"),
    ]
    chunks = [
        {
            **head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
            "usage": None,
        }
        for delta, reason in deltas
    ]
    return [*chunks, {**head, "choices": [], "usage": OPENAI_USAGE}]


def openai_response(number: int, status: str = "completed") -> dict:
    """What POST /v1/responses answers."""
    done = status == "completed"
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1741476542,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "model": "gpt-4.1-2025-04-14",
        "output": [
            {
                "type": "message",
                "id": f"msg_{number}",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello there", "annotations": []}],
            }
        ]
        if done
        else [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": RESPONSES_USAGE if done else None,
        "user": None,
        "metadata": {},
    }


def response_events(number: int) -> list[dict]:
    """The events of a streamed response."""
    item = {
        "type": "message",
        "id": f"msg_{number}",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }
    place = {"item_id": f"msg_{number}", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    ended = openai_response(number)
    events = [
        {"type": "response.created", "response": openai_response(number, "in_progress")},
        {"type": "response.in_progress", "response": openai_response(number, "in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **place, "part": part},
        {"type": "response.output_text.delta", **place, "delta": "Hello there", "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "Hello there", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": {**part, "text": "Hello there"}},
        {"type": "response.output_item.done", "output_index": 0, "item": ended["output"][0]},
        {"type": "response.completed", "response": ended},
    ]
    return [{**event, "sequence_number": place} for place, event in enumerate(events)]


def embeddings(number: int) -> dict:
    """What POST /v1/embeddings answers."""
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}],
        "model": "text-embedding-3-small",
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }


def anthropic_message(number: int) -> dict:
    """What POST /v1/messages answers."""
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "claude-opus-5-5",
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": ANTHROPIC_USAGE,
    }


def anthropic_events(number: int) -> list[dict]:
    """The events of a streamed message: its numbers grow, and only the first has an id."""
    opening = {**anthropic_message(number), "content": [], "stop_reason": None}
    opening["usage"] = {**ANTHROPIC_USAGE, "output_tokens": 1}
    return [
        {"type": "message_start", "message": opening},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        },
        {"type": "ping"},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "Hello there"},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {
                "input_tokens": 3,
                "cache_creation_input_tokens": 12304,
                "cache_read_input_tokens": 0,
                "output_tokens": 550,
            },
        },
        {"type": "message_stop"},
    ]


def google_content(number: int) -> dict:
    """What POST …:generateContent answers."""
    return {
        "candidates": [
            {
                "content": {"parts": [{"text": "Hello there"}], "role": "model"},
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "usageMetadata": GOOGLE_USAGE,
        "modelVersion": "gemini-2.5-flash",
        "responseId": f"google-{number}",
    }


def google_chunks(number: int) -> list[dict]:
    """The chunks of streamed content: each tells the whole so far."""
    whole = google_content(number)
    chunks = []
    for candidates in (1, 20):
        candidate = {
            "content": {"parts": [{"text": "Hello"}], "role": "model"},
            "index": 0,
        }
        usage = {**GOOGLE_USAGE, "candidatesTokenCount": candidates}
        usage["totalTokenCount"] = GOOGLE_USAGE["totalTokenCount"] - 40 + candidates
        chunks.append({**whole, "candidates": [candidate], "usageMetadata": usage})
    return [*chunks, whole]


def converse() -> dict:
    """What POST /model/…/converse answers."""
    return {
        "output": {"message": {"role": "assistant", "content": [{"text": "Hello there"}]}},
        "stopReason": "end_turn",
        "usage": BEDROCK_USAGE,
        "metrics": {"latencyMs": 1200},
    }


def converse_events() -> list[tuple[str, dict]]:
    """The events of a streamed conversation."""
    return [
        ("messageStart", {"role": "assistant"}),
        ("contentBlockDelta", {"delta": {"text": "Hello there"}, "contentBlockIndex": 0}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": "end_turn"}),
        ("metadata", {"usage": BEDROCK_USAGE, "metrics": {"latencyMs": 1200}}),
    ]


def frame(event: str, payload: dict) -> bytes:
    """One message of application/vnd.amazon.eventstream."""
    headers = b""
    for name, value in (
        (":event-type", event),
        (":content-type", "application/json"),
        (":message-type", "event"),
    ):
        headers += struct.pack("!B", len(name)) + name.encode()
        headers += struct.pack("!BH", 7, len(value)) + value.encode()
    body = json.dumps(payload).encode()
    prelude = struct.pack("!II", 16 + len(headers) + len(body), len(headers))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + body
    return message + struct.pack("!I", zlib.crc32(message))


def _sse(events: list[dict], *, named: bool = False, end: str = "") -> bytes:
    lines = [
        (f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n"
        for event in events
    ]
    return ("".join(lines) + end).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    numbers = count(1)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = json.loads(self.rfile.read(length) or b"{}")
        path = self.path.partition("?")[0]
        number, streams = next(self.numbers), bool(request.get("stream"))
        kind = "text/event-stream" if streams else "application/json"
        if path.endswith("/chat/completions"):
            wants = (request.get("stream_options") or {}).get("include_usage")
            chunks = chat_chunks(number) if wants else chat_chunks(number)[:-1]
            answer = _sse(chunks, end="data: [DONE]\n\n") if streams else chat_completion(number)
        elif path.endswith("/responses"):
            events = response_events(number)
            answer = _sse(events, named=True) if streams else openai_response(number)
        elif path.endswith("/embeddings"):
            answer = embeddings(number)
        elif path.endswith("/messages"):
            events = anthropic_events(number)
            answer = _sse(events, named=True) if streams else anthropic_message(number)
        elif path.endswith(":generateContent"):
            answer = google_content(number)
        elif path.endswith(":streamGenerateContent"):
            kind, answer = "text/event-stream", _sse(google_chunks(number))
        elif path.endswith("/converse"):
            answer = converse()
        elif path.endswith("/converse-stream"):
            kind = "application/vnd.amazon.eventstream"
            answer = b"".join(frame(*event) for event in converse_events())
        else:
            self.send_error(404, f"no such path: {path}")
            return
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-amzn-RequestId", f"bedrock-{number}")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[str]:
    """A stub on a free port of the loopback; its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
