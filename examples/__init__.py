"""Example programs: `python -m examples.train_text`, `python -m examples.train_llama`."""
