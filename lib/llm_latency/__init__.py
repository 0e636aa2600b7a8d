"""The library behind the course "Every Millisecond": measure and reduce the latency of a language model's answer."""

__version__ = "0.1.0"
