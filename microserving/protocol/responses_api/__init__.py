"""OpenAI's `/v1/responses`: a chat in other words. Its request becomes the chat's fields, its answer the chat's pieces."""
