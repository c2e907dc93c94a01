"""The sample contract, the store, extraction, and readers of other tools' files."""
