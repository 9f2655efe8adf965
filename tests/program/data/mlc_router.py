"""A router file in MLC-LLM's style, with its import lines changed. Engine 0 computes prompts, the others generate."""

from collections.abc import AsyncGenerator
from typing import Any

from microserving.program.mlc import Router, aiohttp, microserving_entrypoints, openai_api_protocol, serve


class LeastBusyDecode(Router):
    async def translate_request(
        self, request: openai_api_protocol.CompletionRequest, request_id: str
    ) -> AsyncGenerator[openai_api_protocol.CompletionResponse | None, Any]:
        request.user = request_id
        decode_id = self._pick_endpoint(range(1, self.num_servers))
        split = len(request.prompt) - 1
        self.num_running_requests[decode_id] += 1
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=3600), trust_env=True
        ) as session:
            prepare = microserving_entrypoints.PrepRecvRequest(**request.model_dump(), end=split)
            address, matched = await self.send_prepare_receive(
                session=session, request=prepare, server_url=self.server_urls[decode_id]
            )
            if matched < split:
                send = microserving_entrypoints.RemoteSendRequest(
                    **request.model_dump(),
                    begin=matched,
                    end=split,
                    kv_addr_info=address,
                    recv_rank=self.device_id_starts[decode_id],
                )
                await self.send_remote_send(session=session, request=send, server_url=self.server_urls[0])
            generate = microserving_entrypoints.StartGenerateRequest(**request.model_dump(), begin=split)
            async for response in self.send_start_generate(
                session=session, request=generate, server_url=self.server_urls[decode_id]
            ):
                if response.choices and response.choices[0].finish_reason == "preempt":
                    yield None
                yield response
        self.num_running_requests[decode_id] -= 1


serve(
    model="/no/such/model",
    model_lib="/no/such/model.so",
    router_host="127.0.0.1",
    router_port=9123,
    endpoint_hosts=["127.0.0.1", "127.0.0.1"],
    endpoint_ports=[9124, 9125],
    endpoint_num_gpus=[2, 2],
    enable_prefix_cache=False,
    router_type=LeastBusyDecode,
)
