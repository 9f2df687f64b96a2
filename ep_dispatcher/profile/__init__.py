"""Where the time of an MoE layer goes: traces of a training job, and one layer by itself."""
