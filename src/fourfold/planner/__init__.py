"""Which layout, how fast, does it fit: answered before a device is rented. Floor 0: no torch."""
