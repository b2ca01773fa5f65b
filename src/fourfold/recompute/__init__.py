"""Activation checkpointing: which forwards run again instead of being kept."""
