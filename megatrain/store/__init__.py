"""Homes of layers in host memory."""
