"""Updates inside the backward pass (option `overlap_step`)."""
