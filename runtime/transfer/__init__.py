"""Copies between device and stores: links, their queues, their measured rates."""
