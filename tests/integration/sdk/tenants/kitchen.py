"""Handlers of every kind, as a tenant writes them."""

import asyncio
import contextvars
import logging
import os
import sys
import threading
import time
from pathlib import Path

import penstock

app = penstock.App("kitchen")
other = penstock.Function.lookup("pantry-fetch")
log = logging.getLogger("tenant")
entered: list[str] = []


class Spoilt(Exception):
    """An error of the tenant's own."""


class Dish:
    """A value that JSON cannot hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dish) and other.name == self.name

    __hash__ = None


@app.function(sku="g1.1")
def add(a, b=2):
    return a + b


@app.function(sku="g1.1")
def fetch():
    return "nothing"


@app.function(sku="g1.1", concurrency=16)
def stubborn(seconds=0, until=""):
    """Waits where no exception of ours can reach it, or until there is a file."""
    if seconds:
        time.sleep(seconds)
    while until and not Path(until).exists():
        time.sleep(0.01)
    return "slept"


@app.function(sku="g1.1")
def leave(how):
    if how == "closed":
        sys.__stdout__.close()
    if how in ("exit", "closed"):
        sys.exit(3)
    raise KeyboardInterrupt


@app.cls(sku="g1.1", concurrency=16)
class Kitchen:
    def __init__(self):
        self.count = 0

    @penstock.enter()
    def heat(self):
        entered.append("heat")

    @penstock.enter()
    async def simmer(self):
        await asyncio.sleep(0)
        entered.append("simmer")

    @penstock.exit()
    def clean(self):
        print("cleaned up", flush=True)

    @penstock.method()
    def state(self):
        self.count += 1
        return [self.count, entered]

    @penstock.method()
    def echo(self, value):
        return value

    @penstock.method()
    async def cook(self, name, seconds=0.0):
        print("cooking", name)
        await asyncio.sleep(seconds)
        print("done", name)
        return {"dish": name}

    @penstock.method()
    def talk(self, name):
        print("hello", name)
        print("to stderr", file=sys.stderr)
        log.warning("careful with %s", name)
        sys.stdout.buffer.write(b"raw\n")
        print("no end", end="")
        return name

    @penstock.method()
    def report(self):
        penstock.progress(1, 4, "chopping")
        who = penstock.current_invocation()
        return [who.id, who.attempt, who.mode, who.timeout_s]

    @penstock.method()
    def count_to(self, n):
        yield from range(n)
        return "all"

    @penstock.method()
    async def count_slowly(self, n):
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    @penstock.method()
    def spoil(self, what):
        try:
            {}["missing"]
        except KeyError as error:
            raise Spoilt(what) from error

    @penstock.method()
    async def spoil_later(self):
        await asyncio.sleep(0)
        raise ValueError("later")

    @penstock.method()
    def dish(self, name):
        return Dish(name)

    @penstock.method()
    def picture(self):
        return b"\x89PNG\x00"

    @penstock.method()
    def together(self, name, barrier):
        barriers.setdefault(barrier, threading.Barrier(2)).wait(20)
        print("with", name)
        return name

    @penstock.method()
    def in_a_thread(self, text):
        thread = threading.Thread(target=print, args=(text,))
        thread.start()
        thread.join()

    @penstock.method()
    def report_oddly(self):
        penstock.progress(float("nan"))
        return "told"

    @penstock.method()
    def speak_later(self, text):
        context = contextvars.copy_context()
        threading.Thread(target=lambda: (time.sleep(0.2), context.run(print, text, flush=True))).start()

    @penstock.method()
    def order(self, what):
        return ["got", other.remote(what, size=2)]

    @penstock.method()
    async def order_async(self, what):
        return await asyncio.gather(other.remote.aio(what), other.remote.aio(what + "2"))

    @penstock.method()
    def order_many(self, things):
        return list(other.map(things))

    @penstock.method()
    def order_later(self, what):
        return other.spawn(what).id

    @penstock.method()
    async def order_wrongly(self, what):
        return other.remote(what)

    @penstock.method()
    def loop_for_ever(self):
        print("looping")
        while True:
            time.sleep(0.01)

    @penstock.method()
    async def wait_for_ever(self):
        print("waiting")
        await asyncio.Event().wait()

    @penstock.method()
    def fork(self):
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        print("from the child", flush=True)
        return "an answer of the child's"

    @penstock.method()
    def shout(self, lines):
        for number in range(lines):
            print("x" * 1000, number)
        return lines


barriers: dict[str, threading.Barrier] = {}
