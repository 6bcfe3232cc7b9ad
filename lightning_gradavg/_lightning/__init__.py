"""What touches Lightning: its private names, and the objects that the strategies hand to its loops."""
