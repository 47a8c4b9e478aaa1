"""Pure values and state machines: no I/O, no asyncio, no clock."""
