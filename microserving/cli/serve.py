"""`microserving serve`: one engine. Every field of ``EngineConfig`` is a flag."""

from __future__ import annotations

import argparse

from microserving.cli.flags import add_config_flags, config_from
from microserving.cli.logs import start_logging
from microserving.engine.config import DRAIN_S, EngineConfig

HELP_TEXTS = {
    "model": "a model of the catalog (`microserving model list`), a GGUF file, or a Hugging Face directory",
    "served_model_name": "names of the model in the API: may be given several times; answers have the one that was asked for",
    "serving_bind": "address to listen on; beyond loopback prefill and decode need --cluster-secret-file",
    "port": "port to listen on; 0 = any free one",
    "node_role": "what the engine is for; hybrid serves OpenAI clients by itself and takes every verb",
    "node_id": "this engine's name in its cluster",
    "rank": "rank within a tensor-parallel engine",
    "threads": "compute threads; the default is the cores that this process may use",
    "activations": "precision of activations where weights are quantised; int8 is faster and as llama.cpp computes",
    "kv_dtype": "number format of the KV cache",
    "page_size": "tokens in one KV page",
    "kv_cache_bytes": "bytes of the KV pool",
    "max_context": "most tokens of prompt plus output",
    "chat_template": "file with a chat template (Jinja) in place of the model's own",
    "tool_call_format": "how the model writes calls of tools; auto: as its chat template shows",
    "reasoning_format": "whether <think>...</think> is told apart from the answer; auto: if the chat template has it",
    "chunk_size_tokens": "most prompt tokens computed in one step, so that long prompts do not stop other output",
    "max_batch_size": "most sequences that decode in one step",
    "max_sequences": "most sequences held, active and queued",
    "max_concurrent_prefills": "most prompts that are computed at once",
    "ingestion_queue_size": "most requests that wait to be started; then 503",
    "memory_threshold": "share of the KV pool that may be in use when a request starts beside others",
    "chunked_prefill_enabled": "compute long prompts over several steps",
    "max_itl_ratio": "how much longer a step may take with prompt tokens in it than its decodes alone",
    "prefix_cache": "keep the KV of prompts and answers for later prompts that begin like them",
    "reserve_wait_s": "seconds that prep_recv waits for free pages before it answers 503",
    "lease_ttl_s": "seconds that a reservation lives without being renewed",
    "transfer_timeout_s": "seconds without an answer from the receiver after which a hand-off has failed",
    "shutdown_timeout_s": "seconds that running requests may take to finish when the engine is told to stop; told a "
    "second time it ends at once",
    "cluster_secret_file": "file with the cluster's secret (16 bytes or more) that signs KV descriptors",
    "api_key_file": "file with the API keys that callers need, one a line; a router is given one of them",
    "runtime_dir": "private directory for the sockets between engines of one machine; all must name the same",
    "cache_dir": "where models, their packed weights and compiled code are kept",
    "strict_fields": "refuse requests with unknown fields instead of naming them in a header",
    "max_body_bytes": "most bytes of a request's body",
    "max_concurrent_per_client": "most requests at once of one API key (without keys: of one address)",
    "requests_per_minute": "most requests a minute of one API key (without keys: of one address)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start one engine: an OpenAI server (/v1) that also takes the verbs (/microserving).\n"
        "A hybrid engine needs nothing else; prefill and decode engines stand behind a router."
    )
    add_config_flags(parser, EngineConfig, HELP_TEXTS, in_force=in_force())


def in_force() -> dict[str, object]:
    """Field whose default is None -> what then holds."""
    from microserving.model_files.catalog import default_cache_dir
    from microserving.transports.registry import default_runtime_dir

    return {
        "served_model_name": "the model's own name",
        "max_context": "what the model was trained for",
        "chat_template": "the model's own",
        "max_body_bytes": "what the longest prompt of the model needs",
        "runtime_dir": default_runtime_dir(),
        "cache_dir": default_cache_dir(),
        "shutdown_timeout_s": f"{DRAIN_S:g} on a hybrid engine, 0 on others: behind a router they go on elsewhere",
    }


def run(options: argparse.Namespace) -> int:
    config = config_from(options, EngineConfig)
    from microserving.cluster.addresses import bracketed
    from microserving.cluster.secret import check_secret
    from microserving.observability.console import Console

    start_logging(options.verbose)
    check_secret(config.node_role, config.serving_bind, config.cluster_secret_file)  # before TVM is imported
    from microserving.server.run import run_engine

    console = Console(verbose=options.verbose, plain_step=0.25)
    host = bracketed(config.serving_bind)
    run_engine(
        config,
        progress=console.progress,
        on_ready=lambda port: console.line(f"{config.node_id} ready at http://{host}:{port}"),
    )
    return 0
