"""What must never pass in silence or be waited for: replicas that differ, numbers that are none, ranks that are lost."""
