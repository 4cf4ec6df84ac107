"""Plans in a training run: made in the background, followed, corrected."""
