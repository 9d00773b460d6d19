"""What is not decorated: functions that are named, and the requests of LLM packages."""

from __future__ import annotations

import pytest

LIB = """
class Client:
    def ask(self, question): return question
    @staticmethod
    def plain(question): return question
    @classmethod
    def made(cls, question): return question
def complete(prompt, client=None): return prompt
async def acomplete(prompt): return prompt
def stream(prompt): yield prompt
"""


def test_named_functions(project):
    project.write("lib.py", LIB)
    project.write("conftest.py", "from lib import complete\n")
    targets = ("complete", "acomplete", "stream", "Client.ask", "Client.plain", "Client.made")
    result = project.run(
        """
import asyncio
import pytest
from conftest import complete
import lib
from lib import Client, acomplete, stream
def test_by_name(): complete("x"); complete(prompt="x")
def test_method(): Client().ask("x"); Client().ask("x")
def test_static(): Client.plain("x"); Client.plain("x")
def test_class(): Client.made("x"); Client.made("x")
def test_coroutine():
    async def main(): await acomplete("x"); await acomplete("x")
    asyncio.run(main())
def test_stream(): assert list(stream("x")) + list(stream("x")) == ["x", "x"]
def test_objects(idemguard_ledger):
    one, other = object(), Client()
    complete("x", one); complete("x", other); complete("x", Client())
    assert idemguard_ledger.runs("lib:complete") == 3
def test_raises(idemguard_ledger):
    with pytest.raises(TypeError): complete()
    idemguard_ledger.assert_not_run()
def test_ok(idemguard_ledger):
    complete("x"); complete("y")
    idemguard_ledger.assert_ran("lib:complete", 2)
""",
        *(f"--idemguard-watch=lib:{name}" for name in targets),
    )
    result.came_to(failed=6, passed=3)
    result.has(
        "idemguard: lib:complete * ran 2 times in this test, 1 allowed",
        "     called from test_it.py:* in test_by_name",
        "  likely cause: this function is not guarded*",
    )


def test_a_function_that_was_imported_before(project):
    project.write("lib.py", LIB)
    project.write("early.py", "import lib\nfrom lib import complete as by_name\n")
    result = project.run(
        "from early import by_name\ndef test_dup(): by_name('x'); by_name('x')\n",
        "-p", "early", "--idemguard-watch=lib:complete",
    )  # fmt: skip
    result.came_to(failed=1)


@pytest.mark.parametrize("target", ["lib", "lib:nothing", ":f", "lib:Client.nothing"])
def test_a_target_that_is_none_is_told(project, target):
    project.write("lib.py", LIB)
    result = project.run("import lib\ndef test_a(): pass\n", f"--idemguard-watch={target}")
    assert result.ret in (2, 4)
    assert "idemguard_watch" in result.out + result.err


SDKS = """
import asyncio, importlib, json
import pytest

def transport(httpx, reply, fail_first=False, stream=None):
    calls = []
    def handler(request):
        calls.append(request)
        if fail_first and len(calls) == 1:
            return httpx.Response(500, json={"error": {"message": "x"}}, headers={"retry-after-ms": "1"})
        if stream is not None:
            return httpx.Response(200, content=stream, headers={"content-type": "text/event-stream"})
        return httpx.Response(200, json=reply)
    return httpx.MockTransport(handler), calls

def client(package, name, **how):
    module = importlib.import_module(package)  # imported late
    base = importlib.import_module(f"{package}._base_client")
    httpx = vars(base).get("httpx2") or vars(base)["httpx"]
    made, calls = transport(httpx, REPLIES[package], **how)
    kind = httpx.AsyncClient if name.startswith("Async") else httpx.Client
    http = kind(transport=made)
    return getattr(module, name)(api_key="k", base_url="http://x.test/v1", http_client=http), calls

REPLIES = {
    "openai": {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [],
               "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}},
    "anthropic": {"id": "1", "type": "message", "role": "assistant", "content": [], "model": "m",
                  "usage": {"input_tokens": 7, "output_tokens": 3}},
}
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

def test_its_own_retry_is_one_run(idemguard_ledger):
    openai, calls = client("openai", "OpenAI", fail_first=True)
    openai.chat.completions.create(**ASK)
    assert len(calls) == 2
    idemguard_ledger.assert_ran_once()
    assert idemguard_ledger.tokens() == 10
def test_openai():
    openai, _ = client("openai", "OpenAI")
    for _ in range(2): openai.chat.completions.create(**ASK)
def test_anthropic():
    anthropic, _ = client("anthropic", "Anthropic")
    for _ in range(2): anthropic.messages.create(max_tokens=5, **ASK)
def test_streaming():
    openai, _ = client("openai", "OpenAI", stream=b"data: [DONE]\\n\\n")
    for _ in range(2): assert list(openai.chat.completions.create(stream=True, **ASK)) == []
def test_async():
    async def main():
        openai, _ = client("openai", "AsyncOpenAI")
        await asyncio.gather(*(openai.chat.completions.create(**ASK) for _ in range(2)))
    asyncio.run(main())
def test_async_anthropic_swallowed():
    async def main():
        anthropic, _ = client("anthropic", "AsyncAnthropic")
        for _ in range(2): await anthropic.messages.create(max_tokens=5, **ASK)
    try: asyncio.run(main())
    except BaseException: pass
def test_different(idemguard_ledger):
    openai, _ = client("openai", "OpenAI")
    openai.chat.completions.create(**ASK); openai.chat.completions.create(**ASK | {"model": "n"})
    openai.models.list(); openai.models.list()
    idemguard_ledger.assert_ran("openai /chat/completions", 2)
"""


def test_llm_packages(project):
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    # large packages: as they were compiled when they were installed
    project.environment |= {"PYTHONPYCACHEPREFIX": "", "PYTHONDONTWRITEBYTECODE": "1"}
    result = project.run(SDKS, "--idemguard-watch-llm")
    result.came_to(failed=5, passed=2)
    result.has(
        "idemguard: openai /chat/completions * ran 2 times in this test, 1 allowed",
        "     called from test_it.py:* in test_openai",
    )
