"""Measures this machine for the planner: blocks of a model on a device, collectives between ranks.

What is measured is written as a calibration file, whose keys are the fields of
`fourfold.planner.machine.Machine`.
"""
