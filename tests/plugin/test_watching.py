"""What is not decorated: functions that are named, and the requests of LLM packages."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

from pytest_idemguard.watching import install

TESTS = Path(__file__).parents[1]

LIB = """
import functools
from operator import itemgetter
class Base:
    def inherited(self, question): return question
    def told(self, question): return question
class Client(Base):
    def ask(self, question): return question
    @staticmethod
    def plain(question): return question
    @classmethod
    def made(cls, question): return question
    def __init__(self): self.tool = Tool()
class Built:
    def __init__(self, prompt): self.prompt = prompt
class Tool:
    name = "tool"
    def __call__(self, prompt): return prompt
def complete(prompt, client=None): return prompt
async def acomplete(prompt): return prompt
def stream(prompt): yield prompt
def echo(prompt):
    try: return (yield (yield prompt))
    except IndexError: yield "caught"
async def aecho(prompt):
    try: yield (yield prompt)
    except IndexError: yield "caught"
    finally: ended.append(prompt)
ended = []
partly = functools.partial(complete, client=None)
@functools.lru_cache(maxsize=8)
def kept(prompt): return prompt
tool, client, first = Tool(), Client(), itemgetter(0)
def bare(fn): return lambda *args: fn(*args)
@bare
async def later(prompt): return prompt
def __getattr__(name):
    if name == "lazy": return str.upper
    raise AttributeError(name)
VALUE = 1
"""


NAMES = (
    "complete", "acomplete", "stream", "echo", "aecho", "partly", "kept", "tool", "first", "later",
    "lazy", "client.told", "Client.ask", "Client.plain", "Client.made", "Client.inherited",
    "Built.__init__",
)  # fmt: skip
OTHERS = ("package:ask", "package.llm:ask", "tasks:good", "json:dumps")


def test_named_functions(project):
    project.write("lib.py", LIB)
    project.write("package/__init__.py", "from package.llm import ask\n")
    project.write("package/llm.py", "def ask(prompt): return prompt\n")
    project.write("conftest.py", "from lib import complete\n")
    targets = [f"lib:{name}" for name in NAMES]
    result = project.run(
        """
import asyncio, functools, os, pickle
import pytest
from conftest import complete
import lib, package, package.llm
from lib import Base, Client, Tool, acomplete, stream
from tasks import good
def test_by_name(): complete("x"); complete(prompt="x")
def test_method(): Client().ask("x"); Client().ask("x")
def test_static(): Client.plain("x"); Client.plain("x")
def test_class(): Client.made("x"); Client.made("x")
def test_coroutine():
    async def main(): await acomplete("x"); await acomplete("x")
    asyncio.run(main())
def test_stream(): assert list(stream("x")) + list(stream("x")) == ["x", "x"]
def test_handed_on(): package.ask("x"); package.llm.ask("x")
def test_forked():
    complete("x")
    if (child := os.fork()) == 0:
        complete("x")
        os._exit(0)
    os.waitpid(child, 0)
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
def test_inherited(idemguard_ledger):
    assert Client().inherited("x") == Base().inherited("x") == "x"
    idemguard_ledger.assert_ran_once("lib:Client.inherited")
def test_a_method_of_an_object(idemguard_ledger):
    assert lib.client.told("x") == Client().told("x") == "x"
    idemguard_ledger.assert_ran_once("lib:client.told")
def test_what_a_class_makes(idemguard_ledger):
    assert type(lib.Built("x")) is lib.Built and lib.Built("y").prompt == "y"
    idemguard_ledger.assert_ran("lib:Built.__init__", 2)
def test_what_is_kept_is_no_run(idemguard_ledger):
    assert lib.kept("x") == lib.kept("x") == "x"
    assert lib.kept.cache_info().hits == 1 and lib.kept.cache_info().maxsize == 8
    idemguard_ledger.assert_ran_once("lib:kept")
def test_objects_that_are_called(idemguard_ledger):
    assert lib.partly("x") == lib.tool("x") == "x" and lib.first("x") == "x"
    assert isinstance(lib.partly, functools.partial) and lib.partly.keywords == {"client": None}
    assert isinstance(lib.tool, Tool) and lib.tool.name == "tool"
    assert pickle.loads(pickle.dumps(lib.tool))("x") == "x"
    for name in ("partly", "tool", "first"): idemguard_ledger.assert_ran_once(f"lib:{name}")
def test_a_coroutine_beneath_a_plain_decorator(idemguard_ledger):
    waiting = lib.later("x")
    assert idemguard_ledger._book().runs and not idemguard_ledger._book().calls
    assert asyncio.run(waiting) == "x"
    assert idemguard_ledger._book().called("executed", "lib:later") == 1
def test_what_a_module_makes_when_asked(idemguard_ledger):
    assert lib.lazy("x") == "X"
    idemguard_ledger.assert_ran_once("lib:lazy")
def test_what_is_sent_into_a_generator(idemguard_ledger):
    flow = lib.echo("x")
    assert next(flow) == "x" and flow.send("y") == "y"
    with pytest.raises(StopIteration) as end: flow.send("z")
    assert end.value.value == "z"
    with pytest.raises(KeyError):
        flow = lib.echo("raises"); next(flow); flow.throw(KeyError())
    flow = lib.echo("left"); next(flow); flow.close()
    flow = lib.echo("caught"); next(flow)
    assert flow.throw(IndexError()) == "caught" and list(flow) == []
    assert (idemguard_ledger.runs("lib:echo"), idemguard_ledger.failed("lib:echo")) == (2, 2)
def test_what_is_sent_into_an_async_generator(idemguard_ledger):
    async def main():
        flow = lib.aecho("x")
        assert await anext(flow) == "x" and await flow.asend("y") == "y"
        with pytest.raises(StopAsyncIteration): await anext(flow)
        with pytest.raises(KeyError):
            flow = lib.aecho("raises"); await anext(flow); await flow.athrow(KeyError())
        flow = lib.aecho("left"); await anext(flow); await flow.aclose()
        assert lib.ended[-1] == "left"  # at once
        flow = lib.aecho("caught"); await anext(flow)
        assert await flow.athrow(IndexError()) == "caught" and [one async for one in flow] == []
    asyncio.run(main())
    assert (idemguard_ledger.runs("lib:aecho"), idemguard_ledger.failed("lib:aecho")) == (2, 2)
def test_two_names_of_one_function_count_once(idemguard_ledger):
    package.ask("x")
    idemguard_ledger.assert_ran_once()
def test_a_guarded_one_counts_once(idemguard_ledger):
    assert good("x") == good("x") == "X"
    assert (idemguard_ledger.runs(), idemguard_ledger.reused()) == (1, 1)
def test_what_counting_itself_needs(idemguard_ledger):
    import json
    json.dumps([1])
    idemguard_ledger.assert_ran_once("json:dumps")
""",
        *(f"--idemguard-watch={target}" for target in (*targets, *targets)),  # twice is once
        *(f"--idemguard-watch={target}" for target in OTHERS),
    )
    result.came_to(failed=8, passed=15)
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


@pytest.mark.parametrize("target", ["lib:nothing", ":f"])
def test_a_target_that_is_none_is_told(project, target):
    project.write("lib.py", LIB)
    result = project.run("import lib\ndef test_a(): pass\n", f"--idemguard-watch={target}")
    assert result.ret in (2, 4)
    assert "idemguard_watch" in result.out + result.err


@pytest.fixture
def lib(tmp_path, monkeypatch):
    """The module's name, not yet imported."""
    (tmp_path / "watched_lib.py").write_text(LIB)
    (tmp_path / "user.py").write_text("from watched_lib import complete, tool\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "watched_lib"
    for name in ("watched_lib", "user"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("qualname", "why"),
    [
        ("", "is not MODULE:QUALNAME"),
        ("Client.nothing", "has no 'Client.nothing'"),
        ("Client", r"is a class; name a method of it, watched_lib:Client\.__init__"),
        ("VALUE", "is no function or method"),
        ("Base.__dict__", "is no function or method"),
        ("VALUE.bit_length", "cannot be watched"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_what_cannot_be_watched_is_told(lib, qualname, why, early):
    if early:
        importlib.import_module(lib)
    finders = list(sys.meta_path)
    ends = []

    def watch():
        ends.append(install([f"{lib}:{qualname}"], llm=False))
        importlib.import_module(lib)

    with pytest.raises(pytest.UsageError, match=f"idemguard_watch: .*{why}"):
        watch()
    for end in ends:
        end()
    assert sys.meta_path == finders


def test_all_is_left_as_it_was(lib):
    names = ("complete", "tool", "Client.ask", "Client.inherited", "client.told")
    end = install([f"{lib}:{name}" for name in names], llm=False)
    module = importlib.import_module(lib)
    user = importlib.import_module("user")
    module = importlib.reload(module)
    assert "inherited" in vars(module.Client)
    assert "told" in vars(module.client)
    assert module.complete.__wrapped__
    assert type(module.tool).__name__ == "Stand"
    module.Client.made = patched = classmethod(repr)
    end()
    assert not hasattr(module.complete, "__wrapped__")
    assert not hasattr(user.complete, "__wrapped__")
    assert type(module.tool) is module.Tool
    assert type(user.tool).__name__ == "Tool"
    assert not hasattr(module.Client.ask, "__wrapped__")
    assert "inherited" not in vars(module.Client)
    assert "told" not in vars(module.client)
    assert vars(module.Client)["made"] is patched


NEVER = "idemguard_watch: lib:complete: nothing was counted, the module 'lib' was never imported"


def test_a_module_that_is_never_imported_is_told(project):
    project.write("lib.py", LIB)
    project.write(
        "conftest.py",
        "import sys, types\nsys.modules['put'] = put = types.ModuleType('put')\nput.ask = len\n",
    )
    targets = [f"--idemguard-watch={name}" for name in ("lib:complete", "json:dumps", "put:ask")]
    result = project.run(
        """
import put
def test_a(idemguard_ledger):
    assert put.ask("x") == 1
    idemguard_ledger.assert_ran_once("put:ask")
""",
        *targets,
    )
    result.came_to(passed=1)
    assert result.ret == 0
    result.has("*= idemguard: not watched =*", NEVER)
    assert "json:dumps" not in result.out
    assert "put:ask" not in result.out
    for silence in ("--no-summary", "--idemguard-mode=off"):
        assert "not watched" not in project.run(None, silence, *targets).out


@pytest.mark.parametrize("target", ["libb:complete", "lib.inner:f", "json.no:f"])
def test_a_module_that_there_is_not_is_told_before_the_first_test(project, target):
    project.write("tests/lib.py", LIB)  # found beside the tests alone
    project.write("tests/test_it.py", "def test_a(): pass\n")
    result = project.run(None, "--idemguard-watch=lib:complete", f"--idemguard-watch={target}")
    assert result.ret == 4
    name = target.partition(":")[0]
    assert f"idemguard_watch: {target}: there is no module {name!r}" in result.err
    assert "passed" not in result.out


def test_a_module_that_one_worker_imports_is_watched(project):
    project.write("lib.py", LIB)
    project.write("seldom.py", "def ask(): pass\n")
    result = project.run(
        """
import pytest
@pytest.mark.parametrize("number", range(4))
def test_a(number, worker_id):
    if worker_id == "gw0":
        import seldom
""",
        "-n2", "--idemguard-watch=lib:complete", "--idemguard-watch=seldom:ask",
        "--idemguard-watch=libb:complete", plugins=("xdist",),
    )  # fmt: skip
    result.came_to(passed=4)
    assert result.ret == 4
    result.has(NEVER, "idemguard_watch: libb:complete: there is no module 'libb'")
    assert "seldom" not in result.out


def test_a_child_that_begins_anew_counts_what_is_decorated_alone(project):
    project.write("lib.py", LIB)
    result = project.run(
        """
import subprocess, sys
import lib, tasks
def test_a(idemguard_ledger):
    code = "import lib, tasks; lib.complete('x'); tasks.naive('x')"
    for _ in range(2): subprocess.run([sys.executable, "-c", code], check=True)
    assert (idemguard_ledger.runs("lib:complete"), idemguard_ledger.runs("summarise")) == (0, 2)
""",
        "--idemguard-watch=lib:complete", "--idemguard-max-runs=2",
    )  # fmt: skip
    result.came_to(passed=1)


def test_a_project_does_without_the_plugin_as_the_page_says(project):
    page = (TESTS.parent / "docs" / "ci.md").read_text()
    [snippet] = re.findall(r"```python\n(SETTINGS = .*?)```", page, re.DOTALL)
    settings = re.findall(r'"(idemguard_\w+)"', snippet)
    [marker] = re.findall(r"`(markers = \[.*?\])`", page)
    lines = ["[tool.pytest]", marker, *(f"{name} = {VALUES[name]}" for name in settings)]
    project.write("pyproject.toml", "\n".join(lines))
    strict = ("-W", "error", "--strict-config", "--strict-markers")
    test = "import pytest\n@pytest.mark.idemguard(max_runs=2)\ndef test_a(): pass\n"
    alone = project.run(test, *strict, plugin=False)
    assert alone.ret == 4
    assert "Unknown config option: idemguard_" in alone.err
    project.write("conftest.py", snippet)
    project.run(None, *strict, plugin=False).came_to(passed=1)
    project.run(None, *strict, "-p", "idemguard", plugin=False).came_to(passed=1)


VALUES = {"idemguard_mode": '"error"', "idemguard_max_session_cost": "2.5"}


SDKS = """
import asyncio, gc, importlib, os
import pytest
from idemguard import configure
from stub_llm import CHAT, MESSAGE, serving

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
def test_a_stream_that_breaks_is_tried_again(idemguard_ledger):
    def cut(): yield b'data: {"id": "1"}\\n\\n'; raise ConnectionError("cut")
    for stream in (b'data: {"error": {"message": "overloaded"}}\\n\\n', cut()):
        openai, _ = client("openai", "OpenAI", stream=stream)
        with pytest.raises(Exception): list(openai.chat.completions.create(stream=True, **ASK))
    openai, _ = client("openai", "OpenAI", stream=cut())
    with openai.chat.completions.with_streaming_response.create(stream=True, **ASK) as answer:
        with pytest.raises(ConnectionError): list(answer.iter_lines())
    assert (idemguard_ledger.failed(), idemguard_ledger.runs()) == (3, 0)
def test_a_stream_that_a_forked_child_reads(idemguard_ledger):
    openai, _ = client("openai", "OpenAI", stream=b"data: [DONE]\\n\\n")
    stream = openai.chat.completions.create(stream=True, **ASK)
    if (child := os.fork()) == 0:
        list(openai.chat.completions.create(stream=True, **ASK | {"model": "n"}))
        list(stream)
        os._exit(0)
    os.waitpid(child, 0)
    assert (idemguard_ledger.runs(), idemguard_ledger._book().called("executed")) == (2, 1)
    list(stream)
    assert idemguard_ledger._book().called("executed") == 2
def test_streams_that_nobody_reads(idemguard_ledger):
    openai, _ = client("openai", "OpenAI", stream=b"data: [DONE]\\n\\n")
    streams = [openai.chat.completions.create(stream=True, **ASK) for _ in range(2)]
    assert idemguard_ledger.runs() == 2
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
    for sent in (b"one", b"two"):
        openai.audio.transcriptions.create(model="m", file=("a.wav", sent))
    for extra in (1, 2): openai.chat.completions.create(extra_body={"extra": extra}, **ASK)

# --- what is spent, told by a server's bytes -----------------------------------------------------
configure(store="sqlite:///llm.db", pricer={
    "gpt-4.1-2025-04-14": {"input": "2", "output": "8", "cache_read": "0.5"},
    "claude-opus-5-5": {"input": "5", "output": "25", "cache_read": "0.5", "cache_write": "6.25"},
})
HELLO = [{"role": "user", "content": "Hello"}]
CHATS = {"model": "gpt-4.1", "messages": HELLO}
USAGE = CHATS | {"stream_options": {"include_usage": True}}
MESSAGES = {"model": "claude-opus-5-5", "max_tokens": 1000, "messages": HELLO}
@pytest.fixture(scope="module")
def url():
    with serving() as base: yield base
@pytest.fixture
def spent(idemguard_ledger):
    def of(chats, messages):
        runs = list(idemguard_ledger._book().runs.values())
        assert {run.status for run in runs} == {"ok"}, runs
        assert len(runs) == chats + messages
        assert idemguard_ledger.tokens() == chats * CHAT.total_tokens + messages * MESSAGE.total_tokens
        assert float(idemguard_ledger.cost()) == pytest.approx(chats * 0.003782 + messages * 0.090665)
    return of
def test_openai_answers(url, spent, idemguard_ledger):
    openai = importlib.import_module("openai")
    with openai.OpenAI(api_key="x", base_url=f"{url}/v1") as llm:
        chats = llm.chat.completions
        stream = chats.create(**USAGE, seed=1, stream=True)
        [run] = idemguard_ledger._book().runs.values()
        assert run.status == "open"  # until it was read
        list(stream)
        with chats.stream(**USAGE, seed=2) as stream: list(stream)
        with llm.responses.stream(model="gpt-4.1", input="Hello") as stream: stream.get_final_response()
        chats.with_raw_response.create(**CHATS, seed=3)
        list(chats.with_raw_response.create(**USAGE, seed=4, stream=True).parse())
        with chats.with_streaming_response.create(**CHATS, seed=5) as answer: answer.parse()
        with chats.with_streaming_response.create(**CHATS, seed=6) as answer: list(answer.iter_lines())
        with chats.with_streaming_response.create(**USAGE, seed=7, stream=True) as answer:
            list(answer.parse())
        spent(8, 0)
def test_anthropic_answers(url, spent):
    anthropic = importlib.import_module("anthropic")
    with anthropic.Anthropic(api_key="x", base_url=url) as llm:
        messages = llm.messages
        list(messages.create(**MESSAGES, system="1", stream=True))
        with messages.stream(**MESSAGES, system="2") as stream: stream.get_final_message()
        with messages.stream(**MESSAGES, system="3") as stream: list(stream.text_stream)
        messages.with_raw_response.create(**MESSAGES, system="4")
        list(messages.with_raw_response.create(**MESSAGES, system="5", stream=True).parse())
        with messages.with_streaming_response.create(**MESSAGES, system="6", stream=True) as answer:
            list(answer.parse())
        with messages.with_streaming_response.create(**MESSAGES, system="7") as answer: answer.parse()
        spent(0, 7)
def test_async_answers(url, spent, idemguard_ledger):
    openai, anthropic = importlib.import_module("openai"), importlib.import_module("anthropic")
    async def chats(llm):
        chats = llm.chat.completions
        async for _ in await chats.create(**USAGE, seed=1, stream=True): pass
        async with chats.stream(**USAGE, seed=2) as stream: await stream.get_final_completion()
        await chats.with_raw_response.create(**CHATS, seed=3)
        async with chats.with_streaming_response.create(**CHATS, seed=4) as answer: await answer.parse()
    async def messages(llm):
        async for _ in await llm.messages.create(**MESSAGES, system="1", stream=True): pass
        async with llm.messages.stream(**MESSAGES, system="2") as stream: await stream.get_final_message()
    async def main():
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as llm:
            async with anthropic.AsyncAnthropic(api_key="x", base_url=url) as other:
                await asyncio.gather(chats(llm), messages(other))
                spent(4, 2)
                idemguard_ledger.fresh()
                await left(llm, other)
    async def left(llm, other):
        stream = await llm.chat.completions.create(**USAGE, stream=True)
        await anext(stream); await stream.close()
        stream = await other.messages.create(**MESSAGES, stream=True)
        await anext(stream); await stream.close()
    asyncio.run(main())
    assert idemguard_ledger.runs() == 2 and idemguard_ledger._book().called("executed") == 2
def test_streams_that_are_left(url, idemguard_ledger):
    openai, anthropic = importlib.import_module("openai"), importlib.import_module("anthropic")
    with openai.OpenAI(api_key="x", base_url=f"{url}/v1") as llm, \\
            anthropic.Anthropic(api_key="x", base_url=url) as other:
        for number in range(3):  # closed, dropped amid, dropped unread
            streams = [llm.chat.completions.create(**USAGE, seed=number, stream=True),
                       other.messages.create(**MESSAGES, system=str(number), stream=True)]
            if number < 2: [next(stream) for stream in streams]
            if number < 1: [stream.close() for stream in streams]
            del streams
            gc.collect()
            assert idemguard_ledger._book().called("executed") == 2 * number + 2
    assert 0 < idemguard_ledger.tokens("anthropic /v1/messages") <= 2 * MESSAGE.total_tokens
"""


LLM = """
def ask(number, id):
    return {"id": id, "object": "chat.completion", "model": "gpt-4o", "choices": [],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}
def outer(number): return ask(number, f"chatcmpl-{number}")
"""


def test_an_answer_that_is_told_twice_is_spent_once(project):
    project.write("llm.py", LLM)
    result = project.run(
        """
import llm
from idemguard import Guard, record_usage
guard = Guard(store="memory://")
@guard.idempotent(task_type="work")
def work(number):
    answer = llm.ask(number, f"chatcmpl-{number}")
    record_usage(answer)
    return answer["id"]
def test_in_a_task(idemguard_ledger):
    work(1); work(2)
    assert idemguard_ledger.tokens() == idemguard_ledger.tokens("work") == 30
def test_in_a_watched_function(idemguard_ledger):
    llm.outer(1)
    assert idemguard_ledger.runs() == 2 and idemguard_ledger.tokens() == 15
def test_a_server_that_gives_all_one_id(idemguard_ledger):
    llm.ask(1, "chatcmpl-0"); llm.ask(2, "chatcmpl-0")
    assert idemguard_ledger.tokens() == 30
""",
        "--idemguard-watch=llm:ask", "--idemguard-watch=llm:outer", "--idemguard-json=report.json",
    )  # fmt: skip
    result.came_to(passed=3)
    assert result.report["totals"]["tokens"] == 30 + 15 + 30


def test_an_object_in_a_list_is_equal_to_itself(project):
    project.write("lib.py", "def ask(value): pass\n")
    result = project.run(
        """
import pytest
from lib import ask
class Slots: __slots__ = ()
class Plain: pass
around = []; around.append(around)
VALUES = [Plain(), [Plain()], {"m": [Plain(), 1]}, {(1, 2): Plain()}, [Slots()], 1 + 2j, range(3),
          "\\udcff", {"a": "\\udcff"}, around, ValueError("x")]
@pytest.mark.parametrize("number", range(len(VALUES)))
def test_twice(number):
    ask(VALUES[number]); ask(VALUES[number])
@pytest.mark.parametrize("number", range(len(VALUES)))
def test_others(number):
    for value in VALUES: ask(value)
    ask([Plain()]); ask([Slots()])
""",
        "--idemguard-watch=lib:ask",
    )
    result.came_to(failed=11, passed=11)


def test_llm_packages(project):
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    # large packages: as they were compiled when they were installed
    project.environment |= {"PYTHONPYCACHEPREFIX": "", "PYTHONDONTWRITEBYTECODE": "1"}
    project.environment["PYTHONPATH"] += f"{os.pathsep}{TESTS}"
    result = project.run(SDKS, "--idemguard-watch-llm")
    result.came_to(failed=6, passed=8)
    result.has(
        "idemguard: openai /chat/completions * ran 2 times in this test, 1 allowed",
        "     called from test_it.py:* in test_openai",
    )
