"""The tool `local_rag`, which searches documents with BM25, and `alphaapollo search-index`, which builds its index."""
