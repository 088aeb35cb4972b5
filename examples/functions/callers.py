"""Calls deployed functions by name, from anywhere: no code of theirs is needed here."""

import asyncio

import penstock

greet = penstock.Function.lookup("hello-greet")


def one_after_the_other() -> None:
    call = greet.spawn("Grace")  # Returns at once; `call.id` is the invocation.
    print(call.status(), call.get(timeout=60))
    for result in greet.map(["Ada", "Alan"], return_exceptions=True):
        print(result)


async def together() -> list[str]:
    return await asyncio.gather(greet.remote.aio("Ada"), greet.remote.aio("Alan"))


if __name__ == "__main__":
    print(greet.remote(name="Ada"))
    one_after_the_other()
    print(asyncio.run(together()))
