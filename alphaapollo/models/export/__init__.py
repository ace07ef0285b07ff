"""Export to Hugging Face folders, and the verification of an exported folder."""
