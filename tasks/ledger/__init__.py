"""The ledger that results are written to and resumed from, and the files beside it."""
