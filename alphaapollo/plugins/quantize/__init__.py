"""`alphaapollo quantize MODEL OUT`: weights of 4 bits, which vLLM and transformers read."""
