"""From text to batches: sources, tokenizers, token files and the batch of a step.

Import from the modules: only `dataset` needs torch.
"""
