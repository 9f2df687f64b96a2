"""Trains a small GPT MoE of Megatron-Core with ep_dispatcher: the main job.

Importing it, `config` or `data` needs neither Megatron nor a GPU.
"""
