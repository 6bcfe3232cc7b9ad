"""An accelerator with streams, pretended on the CPU; README.md says what it models and how a finding reads."""
