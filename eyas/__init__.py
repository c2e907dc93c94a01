"""eyas trains EAGLE-3 draft models for speculative decoding and proves every step on the way."""

__version__ = "0.1.0"
