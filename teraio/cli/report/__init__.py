"""The command `teraio report`: a plan as one page, as a timeline for Perfetto, and as a picture."""
