"""The ledger, to which runs write results and from which they resume, and the files beside it."""
