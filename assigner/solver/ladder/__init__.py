"""1F1B, throughput and latency: a dynamic program over suffixes of pipelines whose price adds up stage by stage."""
