"""`microserving router`: a router in front of engines. Every field of ``RouterConfig`` is a flag; no engine code is loaded."""

from __future__ import annotations

import argparse

from microserving.cli.flags import add_config_flags, config_from
from microserving.cli.logs import start_logging
from microserving.cli.settings import add_set_flag
from microserving.router.config import RouterConfig

HELP_TEXTS = {
    "program": "the router program: a Python file, or the name of one that comes with microserving",
    "program_state_file": "file that remembers what is deployed, so that a router which is started again goes on with it",
    "prefill_peers": "URLs of the engines that compute prompts, separated by commas",
    "decode_peers": "URLs of the engines that generate, separated by commas; a hybrid engine may be in both lists",
    "serving_bind": "address to listen on; beyond loopback --cluster-secret-file is needed",
    "port": "port to listen on; 0 = any free one",
    "peer_timeout_s": "seconds within which every peer must answer at the start",
    "connect_timeout_s": "seconds to connect to an engine",
    "probe_interval_s": "seconds between two probes of an engine",
    "probe_connect_timeout_s": "seconds to connect to an engine for a probe",
    "probe_timeout_s": "seconds that an engine may take to answer a probe",
    "probe_misses": "probes without an answer after which an engine is out of its pools",
    "allow_missing_peers": "start although engines do not answer; 503 until one joins",
    "served_model": "the only model that an engine may serve; known before any engine answers",
    "tokenizer_dir": "directory with a tokenizer.json, for engines that cannot give theirs (MLC-LLM)",
    "circuit_failures": "failures in a row after which an engine is only tried now and then",
    "engine_drain_timeout_s": "seconds after which requests on an engine that is drained go on elsewhere",
    "prep_recv_timeout_s": "seconds that a reservation may take",
    "stage_timeout_s": "longest silence of an engine within one verb or stream, in seconds",
    "release_timeout_s": "seconds that freeing what a request holds may take",
    "request_timeout_s": "seconds until the deadline of a request that brings none",
    "stall_timeout_s": "seconds that a program may neither ask an engine nor give output",
    "max_attempts": "attempts at a request in a row without a new token",
    "retry_budget_share": "retries of all requests, as a share of them",
    "retry_budget_burst": "retries beyond that share that may come at once",
    "hedge_after_s": "seconds without output after which another engine is tried as well",
    "cluster_secret_file": "file with the cluster's secret (16 bytes or more)",
    "api_key_file": "file with the API keys of clients, one a line, with or without a name before it",
    "engine_api_key_file": "file with the API key that the engines want",
    "max_concurrent_per_client": "most requests at once of one API key (without keys: of one address)",
    "requests_per_minute": "most requests a minute of one API key (without keys: of one address)",
    "cors_origins": "origins of web pages that may ask, separated by commas; * = all",
    "max_in_flight": "most requests dispatched at once",
    "admission": "what becomes of requests beyond that, or when all engines are full",
    "queue_size": "most requests that wait to be dispatched",
    "queue_timeout_s": "seconds that a request may wait to be dispatched",
    "max_body_bytes": "most bytes of a request's body",
    "write_timeout_s": "seconds that a client may not read before its stream is cut",
    "shutdown_timeout_s": "seconds that running requests may take to finish when the router is told to stop",
    "strict_fields": "refuse requests with unknown fields instead of naming them in a header",
    "admin_bind": "address of the admin port; beyond loopback --admin-key-file is needed",
    "admin_port": "port of the admin routes (deploy programs, add engines); 0 = none",
    "admin_socket": "Unix socket of the admin routes, for this user only",
    "admin_key_file": "file with the key that admin callers send as bearer token (16 bytes or more)",
    "kept_programs": "earlier programs that are kept for rollbacks",
    "program_drain_timeout_s": "seconds after which requests that still run on a replaced program are logged",
    "dry_run_timeout_s": "seconds that a program may take on engines in memory before it is put in charge",
    "rollback_window": "first attempts of a new program that decide whether it is rolled back; 0 = never",
    "rollback_threshold": "share of them that must fail through the program for a rollback",
}
OTHER_FORM = frozenset({"program_settings"})
"""Fields that are not a flag of the same name: ``--set``."""
IN_FORCE = {"max_body_bytes": "what the longest prompt of the model needs", "hedge_after_s": "never"}
"""Field whose default is None -> what then holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start a router: an OpenAI server (/v1) that runs your program over engines.\n"
        "It needs no model and no GPU: the tokenizer comes from the engines."
    )
    add_config_flags(parser, RouterConfig, HELP_TEXTS, skip=OTHER_FORM, in_force=IN_FORCE)
    add_set_flag(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the program, as `microserving program check` does, then end",
    )


def run(options: argparse.Namespace) -> int:
    if options.check:
        from microserving.cli.program import check

        return check(options.config_program, dict(options.settings))
    config = config_from(options, RouterConfig, {"program_settings": dict(options.settings)})
    from microserving.cluster.addresses import bracketed
    from microserving.cluster.secret import check_secret
    from microserving.observability.console import Console
    from microserving.router.run import run_router

    start_logging(options.verbose)
    check_secret("router", config.serving_bind, config.cluster_secret_file)
    console = Console(verbose=options.verbose)
    host = bracketed(config.serving_bind)
    admin = " and ".join(_admin_addresses(config))

    def on_ready(port: int) -> None:
        console.line(f"router ready at http://{host}:{port}{admin and f' (admin routes: {admin})'}")

    run_router(config, on_ready=on_ready)
    return 0


def _admin_addresses(config: RouterConfig) -> list[str]:
    from microserving.cluster.addresses import bracketed

    port = [f"http://{bracketed(config.admin_bind)}:{config.admin_port}"] if config.admin_port else []
    return port + ([] if config.admin_socket is None else [str(config.admin_socket)])
