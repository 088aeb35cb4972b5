import penstock

app = penstock.App("vectors")

with app.imports():
    import numpy as np


@app.function(sku="g1.1", requirements=["numpy"], idle_s=60)
def norm(values: list) -> float:
    return float(np.linalg.norm(values))
