"""The command `teraio report`: a plan as one page, and as a timeline for Perfetto."""
