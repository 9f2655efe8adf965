"""Independent, slow and plain implementations that tests compare against."""
