"""A first function: deploy it with `penstock fn deploy hello.py`."""

import penstock

app = penstock.App("hello")


@app.function(sku="g1.1", idle_s=60)
def greet(name: str = "world") -> str:
    print(f"greeting {name}")
    return f"hello, {name}"


if __name__ == "__main__":
    print(greet.remote("Ada"))
