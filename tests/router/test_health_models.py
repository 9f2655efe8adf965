"""What the engines serve: late joiners, another model, other weights, tokenizers that cannot be had."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest

from microserving.errors import ConfigError, ModelLoadError
from microserving.grammar import GrammarTokenizer, compiler
from microserving.protocol.generation import Grammar

from .watching import engines, run, watched


def test_a_late_joiner_that_does_not_fit_harms_nobody() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, {}, {"engine_id": "decode-1"})
        watch = watched(stack, [], [one, two])
        await watch.monitor.connect(5)
        watch.monitor.start()
        two.info["kv_layout_hash"] = "l2"  # restarted with another configuration
        peer = await watch.until("refused", 1)
        assert "kv_layout_hash l2 vs l1" in peer.reason
        assert watch.ids("decode") == ["decode-0"]
        two.info["kv_layout_hash"] = "l1"
        await watch.until("up", 1)

    run(scenario)


def test_another_model_is_adopted_when_no_engine_has_the_old_one() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, {}, {"engine_id": "decode-1"})
        watch = watched(stack, [], [one, two])
        await watch.monitor.connect(5)
        changed = {"model": "other", "model_hash": "m2"}
        two.info |= changed
        await watch.monitor.probe(watch.registry.peers[1])
        assert watch.states == ["up", "refused"]
        await one.kill()
        await watch.monitor.probe(watch.registry.peers[0])
        await watch.monitor.probe(watch.registry.peers[1])
        assert watch.states == ["down", "up"]
        assert watch.monitor.model is not None
        assert watch.monitor.model.id == "other"
        assert len(watch.tokenizers) == 2

    run(scenario)


@pytest.mark.case("PX-05")
@pytest.mark.parametrize("alone", [True, False])
def test_other_weights_under_the_same_name_have_none_of_the_old_prefixes(alone: bool) -> None:
    """Beside an engine with the old weights the restarted one is refused; its cache is a new process's."""

    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, {}, {"engine_id": "decode-1"})
        watch = watched(stack, [], [one] if alone else [one, two])
        await watch.monitor.connect(5)
        index, prompt = watch.registry.cluster.index, range(500)
        for number, engine in enumerate(watch.ids("decode")):
            index.routed(index.look_up("", prompt), f"r{number}", engine)
        assert set(index.look_up("", prompt).remembered) == set(watch.ids("decode"))
        one.info |= {"epoch": "e2", "model_hash": "m2"}
        await watch.monitor.probe(watch.registry.peers[0])
        if alone:
            assert watch.states == ["up"]
            assert index.look_up("", prompt).remembered == {}
            assert len(watch.tokenizers) == 2
        else:
            assert watch.states == ["refused", "up"]
            assert watch.ids("decode") == ["decode-1"]

    run(scenario)


def test_an_engine_whose_tokenizer_cannot_be_had_is_not_used() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        engine.answers["/microserving/tokenizer"] = (500, b"", {})
        watch = watched(stack, [], [engine])
        with pytest.raises(ConfigError, match="answered with status 500"):
            await watch.monitor.connect(0.2)
        assert not watch.monitor.ready

    run(scenario)


def test_whatever_goes_wrong_with_an_engine_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer of which our code was not prepared, for example: the watch over the engine does not end with that."""

    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine])
        load, watch.monitor._load_tokenizer = watch.monitor._load_tokenizer, lambda _: {}["nothing"]
        with pytest.raises(ConfigError, match="it cannot be used: KeyError"):
            await watch.monitor.connect(0.2)
        watch.monitor.start()
        assert not watch.monitor.ready
        watch.monitor._load_tokenizer = load
        async with asyncio.timeout(5):
            while not watch.monitor.ready:  # noqa: ASYNC110 - what is tested has no event
                await asyncio.sleep(0.002)
        assert watch.states == ["up"]

    run(scenario)
    assert "probing decode engine http://127.0.0.1:" in caplog.text
    assert "KeyError: 'nothing'" in caplog.text


def test_an_engine_that_dies_while_its_tokenizer_is_fetched_comes_back() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine])
        (peer,) = watch.registry.peers
        fetch = peer.client.fetch_tokenizer

        async def fetch_and_die() -> dict[str, Any]:
            data = await fetch()
            watch.registry.mark_down(peer, "the connection broke")
            return data

        peer.client.fetch_tokenizer = fetch_and_die  # type: ignore[method-assign]
        await watch.monitor.probe(peer)
        assert watch.states == ["down"]
        assert watch.monitor.model is not None
        assert watch.monitor.model.max_context == engine.info["max_context"]
        await watch.monitor.probe(peer)
        assert watch.states == ["up"]

    run(scenario)


def test_the_first_grammar_does_not_wait_for_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read, off the event loop, while the model is learnt, once for all engines."""
    threads: list[threading.Thread] = []
    read = compiler.make_vocabulary

    def reading(tokenizer: GrammarTokenizer) -> Any:
        threads.append(threading.current_thread())
        return read(tokenizer)

    monkeypatch.setattr(compiler, "make_vocabulary", reading)

    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, {}, {"engine_id": "decode-1"})
        watch = watched(stack, [], [one, two])
        assert watch.monitor.grammars is None
        await watch.monitor.connect(5)
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()
        assert watch.monitor.grammars is not None
        assert watch.monitor.grammars.tokenizer is watch.monitor.tokenizer
        await watch.monitor.grammars.compile_off_loop(Grammar("regex", "t1+"))
        assert len(threads) == 1

    run(scenario)


def test_an_engine_whose_vocabulary_is_no_use_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tokenizer: GrammarTokenizer) -> Any:
        raise ModelLoadError("the tokenizer's vocabulary cannot be used for grammars")

    monkeypatch.setattr(compiler, "make_vocabulary", refuse)

    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine])
        with pytest.raises(ConfigError, match="vocabulary cannot be used"):
            await watch.monitor.connect(0.2)
        assert not watch.monitor.ready

    run(scenario)
