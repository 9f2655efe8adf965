"""microserving: LLM serving whose router is a program that the user writes."""

__version__ = "0.1.0"
