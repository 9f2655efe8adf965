"""`microserving bench`: sends requests, writes down when each token came, and compares patterns.

A run (``load``) sends what a ``workloads`` workload asks at the times that ``arrivals`` says, through a ``client``, and
gives ``measurement.Measured`` records, of which ``statistics`` makes figures. ``experiment`` interleaves the runs of
several patterns, on ``clusters`` that it starts or any OpenAI address; ``report``, ``table``, ``charts`` and ``page``
show what came out. Nothing is imported here.
"""
