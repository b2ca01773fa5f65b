"""The Batch axis: who owns which piece of the parameters, and where their gradients are summed."""
