"""Programs that show teraio at work: `python -m examples.train_text`."""
