"""GGUF files, which llama.cpp, Ollama and LM Studio read: `alphaapollo export --gguf`, `alphaapollo import-gguf`."""
