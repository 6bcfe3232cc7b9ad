"""The demo, `python -m examples.demo`: stock DDP and GradAvg compared with one process, on two real tasks."""
