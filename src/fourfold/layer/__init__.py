"""The Layer axis: which stage computes when."""
