"""Where stages run: devices, streams and events, and which bytes are theirs."""
