"""The one wall around the libraries that read vocabularies: whatever they raise is one error of ours.

They raise plain Exception for bad input, and their panics are no Exception at all. Knows nothing of what they are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from microserving.errors import MicroservingError

_logger = logging.getLogger(__name__)


@contextmanager
def raising(error: MicroservingError) -> Iterator[None]:
    """Raises ``error`` when the library fails within; our own errors pass."""
    try:
        yield
    except (MicroservingError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as cause:  # noqa: BLE001 - a panic of the library derives from BaseException
        _logger.debug("the tokenizer's library failed: %s", cause)
        raise error from None
