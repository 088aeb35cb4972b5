"""Handlers that read and write the objects of their project."""

import hashlib

import penstock

app = penstock.App("keeping")


@app.function(sku="g1.1", idle_s=60)
def copy(source: str, target: str) -> dict[str, object]:
    """Streams both ways: the object is larger than one part."""
    digest = hashlib.sha256()
    with penstock.objects.open(source) as reader, penstock.objects.open(target, "wb") as writer:
        for piece in iter(lambda: reader.read(1 << 20), b""):
            digest.update(piece)
            writer.write(piece)
    return {"sha256": digest.hexdigest(), "keys": [each.key for each in penstock.objects.list(target)]}


@app.function(sku="g1.1", idle_s=60)
async def aside(key: str, text: str) -> str:
    """The twins for asynchronous code."""
    await penstock.objects.put.aio(key, text.encode(), content_type="text/plain")
    read = await penstock.objects.get.aio(key)
    await penstock.objects.delete.aio(key)
    try:
        await penstock.objects.get.aio(key)
    except penstock.ObjectNotFound:
        return read.decode()
    return "still there"


@app.function(sku="g1.1", idle_s=60)
def refused(key: str) -> str:
    """The code of what objects refuse."""
    try:
        penstock.objects.put(key, b"x")
    except penstock.ObjectError as error:
        return error.code
    return "stored"
