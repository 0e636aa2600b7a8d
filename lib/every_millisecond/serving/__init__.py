"""A server measured as its users feel it: streamed answers over HTTP, under an open load, from one process."""
