"""Tests of microserving.model_files."""
