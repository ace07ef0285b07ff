"""Scripts that prepare training data: python -m examples.data_preprocess.NAME --help."""
