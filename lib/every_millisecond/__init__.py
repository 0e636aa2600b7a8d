"""Every Millisecond: what runs the course. Notebooks, exercises and the ladder use it; `llm_latency` never does."""
