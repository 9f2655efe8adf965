"""Tests of microserving.tokenizer."""
