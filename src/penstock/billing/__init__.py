"""What organisations owe and own: the ledger, usage, balances, budgets and payments."""
