"""The Sequence axis: each rank has some of every sequence's tokens (context parallelism)."""
