"""The sample contract, the store, and extraction."""
