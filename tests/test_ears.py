"""Subscriptions that are given up and taken up again while the server still answers."""

from __future__ import annotations

import asyncio
import os
import resource
import threading

import pytest

from idemguard.stores.clients import Clients
from idemguard.stores.ears import Ears, LoopEars, Subscription

ROUNDS = 300
LONG = 60.0


def test_an_end_that_was_asked_for_is_no_loss_where_the_channel_is_wanted_again():
    subscription = Subscription()
    subscription.wanted["a"] = None
    assert subscription.changes() == (["a"], [])
    subscription.confirmed("a")
    del subscription.wanted["a"]
    assert subscription.changes() == ([], ["a"])
    subscription.wanted["a"] = None  # before the server has confirmed the end
    assert subscription.changes() == (["a"], [])
    assert subscription.ended("a")
    assert not subscription.confirmed("a")
    assert not subscription.ended("a")  # this one nobody asked for


def test_an_end_by_the_servers_doing_is_a_loss_where_the_channel_is_wanted():
    subscription = Subscription()
    subscription.wanted |= {"a": None, "b": None}
    subscription.changes()
    subscription.confirmed("a")
    subscription.confirmed("b")
    assert not subscription.ended("a")
    del subscription.wanted["b"]
    assert subscription.ended("b")
    subscription.wanted["b"] = None  # before it was noticed that nobody needed it
    assert subscription.changes() == (["a", "b"], [])


def test_what_was_asked_for_before_a_break_is_not_waited_for_after_it():
    subscription = Subscription()
    subscription.wanted["a"] = None
    subscription.changes()
    del subscription.wanted["a"]
    subscription.changes()
    subscription.lost()
    subscription.wanted["a"] = None
    subscription.changes()
    assert not subscription.ended("a")


class Fickle:
    """Needs a channel no longer as soon as it is asked."""

    def __init__(self) -> None:
        self.unneeded = []
        self.breaks = 0

    def stands(self, channel, *, anew) -> None: ...

    def broken(self, channels) -> None:
        self.breaks += len(list(channels))

    def idle(self):
        return list(self.unneeded)


class Hearing(Fickle):
    def __init__(self) -> None:
        super().__init__()
        self.hints = threading.Semaphore(0)

    def heard(self, channel, hint) -> None:
        self.hints.release()


class AsyncHearing(Fickle):
    def __init__(self) -> None:
        super().__init__()
        self.hints = asyncio.Semaphore(0)

    async def heard(self, channel, hint) -> None:
        self.hints.release()


@pytest.fixture
def clients(standalone):
    made = Clients.from_url(standalone.url)
    yield made
    made.close()


def test_a_channel_is_given_up_and_wanted_again_at_once(clients):
    listener = Hearing()
    ears = Ears(clients, listener)
    try:
        ears.listen("idemguard:stays")  # the connection is busy with another one
        listener.unneeded = ["idemguard:comes-and-goes"]
        for _ in range(ROUNDS):
            ears.listen("idemguard:comes-and-goes")
            ears.tidy()
            for ear in ears._ears.values():
                ear._nudge()
        listener.unneeded = []
        ears.listen("idemguard:comes-and-goes")
        clients.plain().publish("idemguard:comes-and-goes", "all")
        assert listener.hints.acquire(timeout=LONG)
        assert not listener.breaks
    finally:
        ears.close()


def test_a_channel_is_given_up_and_wanted_again_at_once_on_a_loop(clients):
    async def main():
        listener = AsyncHearing()
        client = clients.on_loop()
        ears = LoopEars(clients, client, listener)
        try:
            await ears.listen("idemguard:stays")
            tasks = []
            listener.unneeded = ["idemguard:comes-and-goes"]
            for _ in range(ROUNDS):
                await ears.listen("idemguard:comes-and-goes")
                ears.tidy()
                tasks += [
                    asyncio.ensure_future(ear._tidy(ear._pubsub)) for ear in ears._ears.values()
                ]
            listener.unneeded = []
            await ears.listen("idemguard:comes-and-goes")
            await client.publish("idemguard:comes-and-goes", "all")
            async with asyncio.timeout(LONG):
                await listener.hints.acquire()
            await asyncio.gather(*tasks)
            assert not listener.breaks
        finally:
            await ears.close()
            await client.aclose()

    asyncio.run(main())


def test_who_comes_while_a_channel_is_given_up_keeps_it(clients):
    listener = Hearing()
    ears = Ears(clients, listener)
    try:
        ears.listen("idemguard:c")
        told = iter([["idemguard:c"], []])  # somebody comes after the first look
        listener.idle = lambda: next(told)
        ears.tidy()
        clients.plain().publish("idemguard:c", "all")
        assert listener.hints.acquire(timeout=LONG)
        assert all(ear.subscription.hears("idemguard:c") for ear in ears._ears.values())
    finally:
        ears.close()


def test_it_is_heard_where_many_descriptors_are_open(clients):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    ears = Ears(clients, listener := Hearing())
    try:
        while opened[-1] <= 1024:  # more than select() knows
            opened.append(os.dup(opened[0]))
        ears.listen("c")
        clients.plain().publish("c", "hint")
        assert listener.hints.acquire(timeout=LONG)
    finally:
        ears.close()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
