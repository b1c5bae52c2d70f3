"""OpenAI's Responses API, as a dialect of the chat."""
