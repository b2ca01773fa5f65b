"""A training step of one rank of any layout, on tensors without data: what it holds, computes and sends."""
