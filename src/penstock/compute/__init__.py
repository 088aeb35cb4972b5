"""SKUs and prices, quotas, placement, claims and allocations. Owns the Postgres schema `compute`."""
