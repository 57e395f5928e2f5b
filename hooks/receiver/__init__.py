"""Everything between a raw POST and a handler's effect."""
