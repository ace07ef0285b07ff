"""Scripts that make training data: python -m examples.data_preprocess.NAME --help."""
