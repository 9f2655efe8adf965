"""KV transport between engines of one user on one host, by mapped memory.

The receiver's pool is a sealed memfd, handed to writers over a private Unix socket; a put is a store. The socket
carries only the leases' begin and finish. Owns memory, sockets and process liveness; knows nothing of pages' content.
"""

from microserving.transports.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
