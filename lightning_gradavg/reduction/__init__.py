"""Weighing each micro-batch's loss, and reducing the gradients of a window by a rule."""
