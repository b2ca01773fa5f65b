"""The Channel axis: every weight matrix cut by columns or rows (tensor parallelism)."""
