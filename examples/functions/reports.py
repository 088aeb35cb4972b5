import penstock

app = penstock.App("reports")


@app.function(sku="g1.1", idle_s=60)
def count(source: str, target: str) -> int:
    lines = 0
    with penstock.objects.open(source) as reader:  # A file that reads and can seek, of any size.
        for _ in reader:
            lines += 1
    penstock.objects.put(target, str(lines).encode(), content_type="text/plain")
    return lines
