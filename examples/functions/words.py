"""A class that loads something once for each worker, a stream, and functions that call one another."""

import time

import penstock

app = penstock.App("words")


@app.cls(sku="g1.1", concurrency=4, idle_s=60)
class Model:
    @penstock.enter()
    def load(self) -> None:
        # A real one reads weights here. It happens once for each worker, before its first call.
        self.words = {"one": 1, "two": 2, "three": 3}

    @penstock.method()
    def number(self, word: str) -> int:
        return self.words[word]

    @penstock.method()
    def spell(self, word: str):
        for done, letter in enumerate(word, start=1):
            penstock.progress(done, len(word), f"letter {letter}")
            time.sleep(0.01)
            yield letter


@app.function(sku="g1.1", retries=2, retry_for=[ConnectionError], retry_delay_s=0.1, idle_s=60)
def total(words: list[str]) -> int:
    """Calls the other function of this app, one word at a time."""
    return sum(Model().number.map(words))


@app.function(sku="g1.1", schedule=penstock.Cron("0 3 * * *", timezone="Europe/Berlin"), idle_s=60)
async def nightly() -> str:
    return "swept"


if __name__ == "__main__":
    model = Model()
    print(model.number.remote("two"))
    print("".join(model.spell.stream("penstock")))
    print(list(model.number.map(["one", "two", "three"])))
    print(total.remote(["one", "three"]))
    try:
        model.number.remote("four")
    except KeyError as error:
        print("no such word:", error)
