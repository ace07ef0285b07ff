"""Mathematical answers: LaTeX normalization, units and words, and symbolic comparison with math-verify."""
